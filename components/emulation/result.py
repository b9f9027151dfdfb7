"""The file of an emulated run, and its figures beside what formulas predict."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import Field, ValidationError

from draftwell.components.bench.schema import Frozen, Machine
from draftwell.components.emulation.curve import Curve
from draftwell.components.report.tables import markdown
from draftwell.serving.errors import DraftwellError, first_wrong
from draftwell.serving.files import read_text, write_json

Placement = Literal["own", "shared"]
"""Draft and target on devices of their own, at once; or in turn on one that they share."""
CLOSE = 0.10
"""Share of a prediction by which what is emulated may differ from it and still agree."""


class EmulatedRow(Frozen):
    """One strategy."""

    strategy: str
    parameters: dict[str, Any]
    speed: float | None = Field(
        description="tokens for each unit of the curve's time, the prompt's reading left out; None "
        "where the run is void"
    )
    predicted: float | None = Field(
        description="the same by `prediction`, with vanilla SD's acceptance of each text (kept "
        "runs of before: with the strategy's own); None: no formula"
    )
    acceptance: float | None = Field(description="accepted / judged draft tokens")
    target_calls: int
    outside: float = Field(description="share of the time in which no pass ran")
    late: float = Field(description="share of its passes that ended behind their deadline")
    times: tuple[float, ...] = Field((), description="of each prompt, in the curve's unit")
    tokens: tuple[int, ...] = Field((), description="of each prompt")


class EmulatedRatio(Frozen):
    """Speed over another strategy's on the same prompts, with the ends of its interval (5 % and 95
    %)."""

    contender: str
    over: str
    ratio: float
    low: float
    high: float
    predicted: float | None


class EmulatedRun(Frozen):
    """An emulated run, complete.

    Args (fields):
        stretch: real seconds for each unit of the curve's times.
        void: why its times do not count; None: they do.
        calibration: prompts that SPIDE's acceptance table was counted on before.
        identical: prompts whose texts are the same from all lossless strategies.
        seconds: that the run took.
    """

    version: Literal[1] = 1
    label: Literal["emulated"] = "emulated"
    pair: str
    fingerprint: str
    curve: Curve
    placement: Placement
    stretch: float
    passes: int
    late: float
    void: str | None
    max_tokens: int
    prompts: str
    prompt_ids: tuple[str, ...]
    calibration: int
    identical: int
    seconds: float
    machine: Machine
    rows: dict[str, EmulatedRow]
    ratios: tuple[EmulatedRatio, ...]

    def write(self, path: Path) -> Path:
        """Write it as JSON, atomically."""
        return write_json(path, self.model_dump(mode="json"))


def read_run(path: Path) -> EmulatedRun:
    """A run that was written.

    Raises:
        DraftwellError: the file cannot be read (`bad_emulated_run`).
    """
    try:
        return EmulatedRun.model_validate_json(read_text(path))
    except (OSError, ValidationError) as error:
        why = first_wrong(error) if isinstance(error, ValidationError) else str(error)
        raise DraftwellError(
            f"{path} holds no emulated run ({why}): run it again", code="bad_emulated_run"
        ) from error


class Compared(NamedTuple):
    """An emulated figure beside the predicted one."""

    what: str
    emulated: float
    low: float | None
    high: float | None
    predicted: float

    @property
    def share(self) -> float:
        """What was reached of the prediction."""
        return self.emulated / self.predicted

    @property
    def close(self) -> bool:
        """Whether both agree within `CLOSE`."""
        return abs(self.share - 1) <= CLOSE


def beside_prediction(run: EmulatedRun) -> list[Compared]:
    """Every speed and every ratio of a run that has a prediction; empty of a void one."""
    speeds = [
        Compared(label, row.speed, None, None, row.predicted)
        for label, row in run.rows.items()
        if row.speed is not None and row.predicted is not None
    ]
    return speeds + [
        Compared(f"{one.contender} over {one.over}", one.ratio, one.low, one.high, one.predicted)
        for one in run.ratios
        if one.predicted is not None
    ]


def table_of(run: EmulatedRun) -> str:
    """A run as Markdown: how it was emulated, and its figures beside the predicted ones."""
    cost = "computing without waiting" if run.curve.cost is None else f"c {run.curve.cost:.3g}"
    where = {"own": "devices of their own", "shared": "one device in turn"}[run.placement]
    said = (
        f"Emulated: {run.pair}, curve {run.curve.name} ({run.curve.source}), draft {cost}, on "
        f"{where}; "
        f"{len(run.prompt_ids)} prompts ({run.prompts}), at most {run.max_tokens} tokens; stretch "
        f"{run.stretch:.3g}, {run.late:.2%} of {run.passes} passes late; {run.identical} texts "
        "identical.\n\n"
    )
    if run.void is not None:
        return f"{said}Void: {run.void}\n"
    rows = [
        [
            one.what,
            f"{one.emulated:.3f}",
            "–" if one.low is None else f"{one.low:.3f} to {one.high:.3f}",
            f"{one.predicted:.3f}",
            f"{one.share:.0%}",
        ]
        for one in beside_prediction(run)
    ]
    return said + markdown(("figure", "emulated", "interval", "predicted", "share"), rows)
