"""The card that a tuning ends in: what was chosen, how much faster, how sure, and how to run it."""
