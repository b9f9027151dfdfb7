"""Collection: both models read texts of a set of prompts, and what they say at every position is
kept as a trace.

`collect` is the entry (it imports torch); its `settings` are imported from here. `work` checks
inputs and writes shards, `plan` binds a folder to a collection, and `meter` reports progress.
`continuations` writes the texts over `decoding`, `trace_rows` reads them with both models,
`batched_probs` computes their distributions, and `rollouts` lets the draft continue from every
position. `trace_checks` and `trace_columns` read a finished trace.
"""

from draftwell.components.collect.settings import CollectionSettings

__all__ = ["CollectionSettings"]
