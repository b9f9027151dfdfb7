"""Artifacts: the small versioned files that strategies load, and the model files and fingerprint of
a pair."""
