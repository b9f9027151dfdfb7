"""The gate for another engine's settings: are they faster than its plain decoding, and do they leave greedy outputs as they are?

A setting is judged on the engine, its version, the device and the models that it was measured with; its record names them, and another
engine that shows the record is refused (`EngineGateRecord.check`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import Field

from components.bench.engines.figures import Figure
from components.bench.engines.measure import Beside
from components.bench.target_agreement import first_difference
from components.engines.port import Engine, Message
from components.gate.verdict import Check, GateVerdict, Thresholds
from serving.errors import DraftwellError
from serving.number_format import dtype_of
from serving.runtime.requests import Sampling

NEAR_TIES = {"float32": 1e-3, "float16": 0.0625, "bfloat16": 0.5}
"""dtype → natural logarithm's distance of two tokens that passes of different widths may exchange: four steps between neighbouring numbers
where the largest logit is below 32 (`near_tie_gap`), because engines give log-probabilities and no logits."""
TOP = 5


class Difference(Message):
    """The first token of a greedy output that is another one than plain decoding's."""

    prompt: int = Field(description="place among the prompts, from 0")
    at: int = Field(description="place in the output, from 0")
    gap: float | None = Field(description="between plain decoding's best token and the lower of both; None: not among its best")
    near_tie: bool


def differences(beside: Beside, prompts: Sequence[Sequence[int]], plain: Engine, dtype: str) -> list[Difference]:
    """Where outputs differ from plain decoding's, one entry a prompt; `plain` is asked for its likeliest tokens there.

    Args:
        beside: greedy, one prompt at a time.
        plain: started, without speculation.
    """
    found = []
    for i, (ids, one, other) in enumerate(zip(prompts, beside.plain.outputs, beside.other.outputs, strict=True)):
        at = first_difference(other[0], one[0])
        if at is None:
            continue
        if at >= min(len(one[0]), len(other[0])):  # one goes on where the other has ended, though a stop token would be part of both
            found.append(Difference(prompt=i, at=at, gap=None, near_tie=False))
            continue
        row = plain.decode([[*ids, *one[0][:at]]], Sampling(max_tokens=1, logprobs=TOP)).answers[0].top_logprobs
        rated = dict(row[0]) if row else {}
        wanted = [one[0][at], other[0][at]]
        gap = max(rated.values()) - min(rated[token] for token in wanted) if rated and all(token in rated for token in wanted) else None
        found.append(Difference(prompt=i, at=at, gap=gap, near_tie=gap is not None and gap <= NEAR_TIES[dtype_of(dtype)]))
    return found


def judge_engine(figures: Sequence[Figure], unlike: Sequence[Difference] | None, thresholds: Thresholds) -> GateVerdict:
    """The verdict.

    Args:
        figures: of the setting at each load; empty for plain decoding, which has nothing to prove.
        unlike: of greedy outputs; None for sampled requests, whose outputs are not compared.
    """
    if not figures:
        return GateVerdict((Check("plain decoding", 1.0, 1.0, True, "plain decoding was chosen: nothing to compare"),))
    least = thresholds.min_speedup_lower_bound or 0.0
    checks = [speed_check(figure, least) for figure in figures]
    notes = []
    if unlike is None:
        notes.append("sampled outputs are not compared")
    else:
        wrong = [one for one in unlike if not one.near_tie]
        where = f": the first in prompt {wrong[0].prompt} at token {wrong[0].at}" if wrong else ""
        checks.append(Check("greedy outputs as plain decoding's", len(wrong), 0, not wrong,
                            f"{len(wrong)} of {figures[0].groups} outputs differ{where}; near-ties: {len(unlike) - len(wrong)}"))
    return GateVerdict(tuple(checks), tuple(notes))


def speed_check(figure: Figure, least: float) -> Check:
    """Whether the lower bound of a setting's speed reaches the threshold."""
    passed = figure.low >= least
    return Check(f"speed over plain decoding, {figure.at_once} at once", figure.low, least, passed,
                 f"{figure.ratio:.3f} times ({figure.low:.3f} to {figure.high:.3f}) over {figure.groups} groups, at least {least:g} wanted",
                 enough=passed or figure.high < least)


class EngineGateRecord(Message):
    """What a gate found, and what it is valid for."""

    engine: str
    version: str
    device_class: str
    dtype: str
    fingerprint: str = Field(description="of the models")
    settings: dict[str, Any] | None = Field(description="the speculative config; None: plain decoding")
    passed: bool
    checks: list[dict[str, Any]]
    made: str = Field(description="ISO 8601, UTC")

    def check(self, **here: Any) -> None:
        """Refuse to use the record elsewhere.

        Args:
            here: fields of the record → what is there now, such as `version` and `device_class`.
        Raises:
            DraftwellError: a field differs (`gated_elsewhere`), or the gate failed (`gate_not_passed`).
        """
        for name, value in here.items():
            if getattr(self, name) != value:
                raise DraftwellError(f"the gate judged {name.replace('_', ' ')} {getattr(self, name)!r}, and here it is {value!r}: run "
                                     f"`draftwell gate --engine {self.engine}` here", code="gated_elsewhere")
        if not self.passed:
            raise DraftwellError(f"the gate did not pass these settings of {self.engine}: tune again", code="gate_not_passed")
