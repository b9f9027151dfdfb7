"""Tuning another engine by running it: `candidates` are the ways to speculate, `ngram_replay`
predicts those that texts decide, `lab` runs them beside plain decoding, `tune` is the search and
`choice` what it finds, `by_load` chooses lengths by load, `regret` compares the choice with a full
grid, `settings` are those of the search."""
