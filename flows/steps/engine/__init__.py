"""The steps with `--engine vllm`: what another engine reads of a pair, and each step over the
engine port."""
