"""A text with the draft's rollouts along it, and the errors of a replay that asks for more than was
recorded."""

from __future__ import annotations

from dataclasses import dataclass

from draftwell.serving.errors import DraftwellError


class RolloutExhausted(DraftwellError):
    """A draft continued after its first wrong token for longer than the trace's rollouts.

    Args:
        needed: length of rollout that this forward pass would have needed.
        recorded: K of the trace.
    """

    code = "rollout_exhausted"

    def __init__(self, needed: int, recorded: int):
        self.needed, self.recorded = needed, recorded
        super().__init__(
            f"the draft continued for {needed} tokens after its last right one, but the "
            f"trace holds rollouts of {recorded}: "
            "draft fewer tokens, or collect with a longer rollout"
        )


class NotInTrace(DraftwellError):
    """A strategy asked for something that a trace does not hold."""

    code = "not_in_trace"


@dataclass(frozen=True)
class TracedText:
    """A text and the draft's rollouts along it.

    Args:
        name: the prompt's id, with the turn where it is not the first.
        ids: prompt and continuation.
        prompt_length: tokens of the prompt.
        tokens, confidence, entropy: `[continuation][K]`, the draft's own continuation of `ids[:
            prompt_length + i]`: greedy, or at temperature > 0 as one seed sampled it
            (`draftwell.components.replay.sampled`); a row may be shorter than K.
        raw: `[continuation][K]`, raw draft probability of each of those tokens; None where they are
            the most likely, whose probability is the confidence.
    """

    name: str
    ids: list[int]
    prompt_length: int
    tokens: list[list[int]]
    confidence: list[list[float]]
    entropy: list[list[float]]
    raw: list[list[float]] | None = None

    @property
    def prompt(self) -> list[int]:
        return self.ids[: self.prompt_length]

    @property
    def output(self) -> list[int]:
        return self.ids[self.prompt_length :]
