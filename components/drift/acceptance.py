"""Whether drafts fare as they did when they were tuned, by counts alone: all that our plug-in of
another engine can record.

Looked at is the first token of drafts: how often the target keeps it does not depend on how long
drafts are, which follows the load.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from draftwell.components.drift.schema import DRIFTED, NOT_ENOUGH, STEADY, DriftLimits, Record
from draftwell.components.engines.port import Acceptance
from draftwell.components.report.intervals import bootstrap_of_sums
from draftwell.serving.errors import DraftwellError

FILES = "acceptance-*.ndjson"
LEARNS = "custom_class"
"""The method of our plug-in, whose rule learns while it serves, so that drafts are to fare better
than at first."""
HEAD = "eagle3"
"""The method of a head, which was trained for the target's texts and may no longer fit them."""
FEWEST_LINES = 12
"""Lines, each of a minute or more, below which an interval over them says little."""


class AcceptanceLine(BaseModel):
    """A line of the spool: sums of a minute. Fields that are not read here may be there too."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    version: int = Field(ge=1, le=1)
    begun: float = Field(ge=0, description="seconds since 1970")
    bundle: str | None = Field(
        None, description="that was served, such as default/3-cpu; left out, none of ours"
    )
    method: str | None = None
    num_speculative_tokens: int | None = None
    rounds: int = Field(ge=0)
    accepted_at: tuple[int, ...] = ()

    @property
    def first(self) -> tuple[int, int]:
        """Drafts whose first token was kept, and all."""
        return (self.accepted_at[0] if self.accepted_at else 0), self.rounds


class AcceptanceReport(Record):
    """What a check found."""

    pair: str
    engine: str
    verdict: str = Field(description="one of steady, drift, not enough yet")
    why: str
    tuned: float | None = Field(
        description="share of drafts whose first token was kept when it was tuned"
    )
    served: float | None = Field(None, description="the same of what was served")
    low: float | None = Field(None, description="of an interval of it, over lines")
    high: float | None = None
    change_low: float | None = Field(
        None,
        description="of an interval of served less tuned, over lines and the tuning's prompts; "
        "None: "
        "the tuning did not count each prompt",
    )
    change_high: float | None = None
    limit: float = Field(description="difference that counts")
    lines: int = 0
    drafts: int = 0
    notes: tuple[str, ...] = ()

    @property
    def drifted(self) -> bool:
        return self.verdict == DRIFTED


def read_lines(folder: Path) -> list[AcceptanceLine]:
    """All lines of a spool, the oldest first; those that are cut or foreign are passed over.

    Raises:
        DraftwellError: the folder holds none (`spool_empty`).
    """
    found: list[AcceptanceLine] = []
    for file in sorted(folder.glob(FILES)):
        try:
            texts = file.read_text(encoding="utf-8", errors="replace").splitlines()
        except FileNotFoundError:  # an old one, which the plug-in has just removed
            continue
        for text in texts:
            try:
                found.append(AcceptanceLine.model_validate(json.loads(text)))
            except (ValueError, ValidationError):
                continue
    if not found:
        raise DraftwellError(
            f"{folder} holds no counts of acceptance: name the folder that vLLM writes to "
            "(DRAFTWELL_SPOOL), and see that "
            "the bundle has our plug-in",
            code="spool_empty",
        )
    return sorted(found, key=lambda line: line.begun)


def compare_acceptance(
    lines: Iterable[AcceptanceLine],
    tuned: Acceptance,
    served: Mapping[str, Any] | None,
    limits: DriftLimits,
    *,
    pair: str,
    engine: str,
    bundle: str,
    now: datetime,
) -> AcceptanceReport:
    """Compare what was counted last with the tuning. Both are counted with their chance: of lines
    and of prompts.

    Args:
        lines: the oldest first.
        tuned: of what was chosen, when it was measured, with `each` prompt where that is known;
            else the tuning is taken as exact.
        served: the speculative config that is served; lines of others are left out.
        bundle: that is served, as lines name it; those of others are left out, such as of a draft
            that was made again.
        limits: `acceptance`, `window` (lines here), `min_positions` (drafts here),
            `false_alarm_rate`, `resamples`, `stale_after_hours`.
        now: the age of the counts is measured from.
    """
    known = list(lines)
    wanted = (bundle, (served or {}).get("method"), (served or {}).get("num_speculative_tokens"))
    matching = [
        line for line in known if (line.bundle, line.method, line.num_speculative_tokens) == wanted
    ]
    own, others = matching[-limits.window :], len(known) - len(matching)
    notes = (
        (
            (
                f"{others} lines of other bundles or settings than those that are served "
                f"({bundle}) are left out"
            ),
        )
        if others
        else ()
    )
    table = np.array([line.first for line in own], dtype=np.float64).reshape(-1, 2)
    kept, drafts = (int(one) for one in table.sum(axis=0))
    before = tuned.first[0] / tuned.rounds if tuned.rounds and tuned.accepted_at else None
    if before is not None and len(tuned.each) < 2:
        notes = (
            *notes,
            "the tuning is taken as exact, because the bundle does not say how drafts of "
            "each prompt fared: drift is said "
            "more often than false_alarm_rate; tune and deploy again",
        )

    def report(verdict: str, why: str, **more: Any) -> AcceptanceReport:
        return AcceptanceReport(
            pair=pair,
            engine=engine,
            verdict=verdict,
            why=why,
            tuned=before,
            limit=limits.acceptance,
            lines=len(own),
            drafts=drafts,
            notes=notes,
            **more,
        )

    if before is None:
        return report(
            NOT_ENOUGH,
            "nothing is drafted, or the tuning counted no drafts: there is nothing to compare",
        )
    if len(own) < FEWEST_LINES or drafts < limits.min_positions:
        return report(
            NOT_ENOUGH,
            (
                f"{len(own)} minutes with {drafts} drafts: {FEWEST_LINES} and "
                f"{limits.min_positions} are needed"
            ),
        )
    newest = datetime.fromtimestamp(own[-1].begun, UTC)
    if now - newest > timedelta(hours=limits.stale_after_hours):
        return report(
            NOT_ENOUGH,
            f"the newest counts are of {newest:%Y-%m-%d at %H:%M} UTC, more than "
            f"{limits.stale_after_hours:g} hours "
            "ago",
        )
    low, high = bootstrap_of_sums(
        table,
        lambda sums: sums[:, :1] / np.maximum(sums[:, 1:], 1),
        resamples=limits.resamples,
        tail=limits.false_alarm_rate / 2,
    )
    share, ends = kept / drafts, (float(low[0]), float(high[0]))
    figures: dict[str, Any] = {"served": share, "low": ends[0], "high": ends[1]}
    words = (
        f"the target keeps {share:.3f} of first draft tokens ({ends[0]:.3f} to {ends[1]:.3f}), "
        f"and kept {before:.3f} when it was tuned"
    )
    change = (
        max(before - share, 0.0) if (served or {}).get("method") == LEARNS else abs(share - before)
    )
    if len(tuned.each) >= 2:
        least, most = change_interval(
            table, np.array(tuned.each, dtype=np.float64), limits.false_alarm_rate / 2
        )
        if not (math.isfinite(least) and math.isfinite(most)):
            return report(
                NOT_ENOUGH,
                f"{words}, but all drafts of the tuning or of what was served are of one "
                "prompt or minute: nothing "
                "can be compared",
                **figures,
            )
        figures |= {"change_low": least, "change_high": most}
        words += f", a change of {least:+.3f} to {most:+.3f}"
        sure = least > 0 or most < 0
    else:
        sure = not ends[0] <= before <= ends[1]
    if change >= limits.acceptance and sure:
        head = (served or {}).get("method") == HEAD and share < before
        train = (
            f"train the head again (`draftwell train --kind eagle3_head --pair {pair}`), then "
            if head
            else ""
        )
        return report(
            DRIFTED,
            f"{words}: {train}tune and gate again on prompts like those that are served",
            **figures,
        )
    return report(STEADY, words, **figures)


def change_interval(served: np.ndarray, tuned: np.ndarray, tail: float) -> tuple[float, float]:
    """Ends of an interval of the share of first tokens that are kept, served less tuned: a
    jackknife of both sides, with Student's t.

    A percentile bootstrap of a tuning's dozen prompts would need millions of resamples for a tail
    as small as that of monitoring. Degrees of freedom are Welch's (1947).

    Args:
        served: [lines, 2] float64, first tokens that were kept, and drafts; two lines or more.
        tuned: [prompts, 2] float64, the same of each prompt of the tuning, two or more.
        tail: probability beyond each end.
    Returns:
        low and high; NaN where all drafts of a side are of one line or prompt.
    """
    from scipy.stats import t

    (one, spread), (other, more) = share_of(served), share_of(tuned)
    variance = spread + more
    if variance == 0:
        return one - other, one - other
    freedom = variance**2 / (spread**2 / (len(served) - 1) + more**2 / (len(tuned) - 1))
    reach = float(t.ppf(1 - tail, freedom)) * variance**0.5
    return one - other - reach, one - other + reach


def share_of(table: np.ndarray) -> tuple[float, float]:
    """[units, 2] kept and drafts → the share that is kept, and the jackknife's variance of it."""
    sums, units = table.sum(axis=0), len(table)
    with np.errstate(divide="ignore", invalid="ignore"):
        without = (sums[0] - table[:, 0]) / (sums[1] - table[:, 1])
        variance = (units - 1) / units * ((without - without.mean()) ** 2).sum()
    return float(sums[0] / sums[1]), float(variance)
