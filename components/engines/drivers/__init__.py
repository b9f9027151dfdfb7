"""Scripts that run in the peers' environments. They import their library and `peer_protocol`, which
lies next to them, and nothing of the project."""
