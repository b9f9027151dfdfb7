"""Collection: what draft and target say along texts, kept as a trace.

`collect` is the entry. `continuations` writes the texts, `trace_rows` reads them with both models, and `rollouts` lets the
draft continue from every position.
"""
