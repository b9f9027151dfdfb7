"""Replay: what a strategy would do on traced prompts, and how long that would take, without running
a model.

`replay` is the entry, and `sampled` its counterpart for traces at temperature > 0. `texts` reads
the traced texts (`traced_text`), `trace_model` answers a strategy's commands from them, and `costs`
prices these.
"""

from draftwell.components.replay.replay import ReplayResult, replay_strategy
from draftwell.components.replay.sampled import read_sampled
from draftwell.components.replay.texts import Texts, read_texts

__all__ = [
    "ReplayResult",
    "Texts",
    "read_sampled",
    "read_texts",
    "replay_strategy",
]
