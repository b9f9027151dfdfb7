"""Tuning another engine by running it: `candidates` are the ways to speculate, `ngram_replay` predicts those that texts decide, `lab`
runs them beside plain decoding, `schedule` chooses lengths by load, `tune` is the search, `settings` its settings."""
