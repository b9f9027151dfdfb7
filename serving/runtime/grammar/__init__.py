"""Grammars that an output must follow: structured output and tool calls."""
