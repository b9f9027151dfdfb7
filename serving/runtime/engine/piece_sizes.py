"""Sizes of pieces of prompts that settings name, too: a module that loads nothing."""

SMALLEST = 8
"""Tokens of the smallest piece of a prompt. Late in a prompt of thousands a pause is mostly
attention, which is in proportion to them."""
