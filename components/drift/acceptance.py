"""The drift report of another engine, by counts of drafts alone: all that our plug-in there can
record.

Its one check looks at the first token of drafts: how often the target keeps it does not depend on
how long drafts are, which follows the load.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from draftwell.components.drift.schema import (
    DriftCheck,
    DriftLimits,
    DriftReport,
    Side,
    conclude,
)
from draftwell.components.drift.statistics import Exchanged
from draftwell.components.engines.port import Acceptance
from draftwell.components.report.intervals import jackknife, student_reach
from draftwell.serving.errors import DraftwellError
from draftwell.serving.files import json_digest

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
    bundle: str | None = None
    """That was served, such as default/3-cpu; left out, none of ours."""
    method: str | None = None
    num_speculative_tokens: int | None = None
    rounds: int = Field(ge=0)
    accepted_at: tuple[int, ...] = ()

    @property
    def first(self) -> tuple[int, int]:
        """Drafts whose first token was kept, and all."""
        return (self.accepted_at[0] if self.accepted_at else 0), self.rounds


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
            "(DRAFTWELL_SPOOL), and see that the bundle has our plug-in",
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
    fingerprint: str,
    bundle: str,
    now: datetime,
) -> DriftReport:
    """Compare what was counted last with the tuning. Both are counted with their chance: of lines
    and of prompts.

    Args:
        lines: the oldest first.
        tuned: of what was chosen, when it was measured, with `each` prompt.
        served: the speculative config that is served; lines of others are left out.
        bundle: that is served, as lines name it; those of others are left out, such as of a draft
            that was made again.
        limits: `acceptance`, `window` (lines here), `min_positions` (drafts here),
            `false_alarm_rate`, `stale_after_hours`.
        now: the age of the counts is measured from.
    """
    known, method = list(lines), (served or {}).get("method")
    wanted = (bundle, method, (served or {}).get("num_speculative_tokens"))
    matching = [
        line for line in known if (line.bundle, line.method, line.num_speculative_tokens) == wanted
    ]
    own = matching[-limits.window :]
    sides = (
        side_of([*tuned.each], "prompts"),
        side_of([line.first for line in own], "minutes"),
    )
    missing = too_little(own, tuned, sides[1], limits, now)
    check = None if missing else first_token_check(own, tuned, limits, method, pair)
    if not missing and check is None:
        missing = ["all drafts of the tuning or of what was served are of one prompt or minute"]
    others = len(known) - len(matching)
    left_out = (
        f"{others} lines of other bundles or settings than those that are served ({bundle}) are "
        "left out"
    )
    return DriftReport(
        pair=pair,
        fingerprint=fingerprint,
        baseline=bundle,
        kinds=("first tokens of drafts",),
        reference=sides[0],
        feedback=sides[1],
        limits=limits,
        **conclude(missing, [] if check is None else [check]),
        notes=(left_out,) if others else (),
    )


def side_of(counts: Sequence[tuple[int, int]], unit: str) -> Side:
    """First tokens that were kept and drafts, of each prompt or line, as a side of a report."""
    kept, drafts = (sum(column) for column in zip(*counts, strict=True)) if counts else (0, 0)
    return Side(
        digest=json_digest(list(counts)),
        prompts=len(counts),
        positions=drafts,
        unit=unit,
        acceptance=kept / drafts if drafts else None,
    )


def too_little(
    own: Sequence[AcceptanceLine],
    tuned: Acceptance,
    served: Side,
    limits: DriftLimits,
    now: datetime,
) -> list[str]:
    """Why nothing can be compared, as a sentence; none where it can."""
    if not tuned.rounds:
        return ["nothing is drafted, or the tuning counted no drafts: there is nothing to compare"]
    if len(tuned.each) < 2:
        return ["the bundle does not say how drafts of each prompt fared: tune and deploy again"]
    if len(own) < FEWEST_LINES or served.positions < limits.min_positions:
        return [
            f"{len(own)} minutes with {served.positions} drafts: {FEWEST_LINES} and "
            f"{limits.min_positions} are needed"
        ]
    newest = datetime.fromtimestamp(own[-1].begun, UTC)
    if now - newest > timedelta(hours=limits.stale_after_hours):
        return [
            f"the newest counts are of {newest:%Y-%m-%d at %H:%M} UTC, more than "
            f"{limits.stale_after_hours:g} hours ago"
        ]
    return []


def first_token_check(
    own: Sequence[AcceptanceLine],
    tuned: Acceptance,
    limits: DriftLimits,
    method: str | None,
    pair: str,
) -> DriftCheck | None:
    """How far the share of first tokens that are kept moved; None where all drafts of a side are of
    one prompt or line. Of a rule that learns while it serves only a fall counts.

    A jackknife of both sides with Student's t, its degrees of freedom Welch's (1947): a percentile
    bootstrap of a tuning's dozen prompts would need millions of resamples for a tail as small as
    that of monitoring.
    """
    from scipy.special import stdtr

    counts = [np.array(rows).T for rows in ([line.first for line in own], tuned.each)]
    served, prompts = (table.shape[1] for table in counts)
    (now, spread), (then, more) = (jackknife(lambda sums: sums[0] / sums[1], one) for one in counts)
    variance, moved = spread + more, now - then
    if not math.isfinite(variance):
        return None
    freedom = variance**2 / (spread**2 / (served - 1) + more**2 / (prompts - 1)) if variance else 1
    variance = max(variance, 1e-24)
    reach = student_reach(variance, freedom, limits.false_alarm_rate / 2)
    value = max(-moved, 0.0) if method == LEARNS else abs(moved)
    p_value = float(2 * stdtr(freedom, -abs(moved) / variance**0.5))
    words = (
        f"the target keeps {now:.3f} of first draft tokens, and kept {then:.3f} when it was tuned, "
        f"a change of {moved - reach:+.3f} to {moved + reach:+.3f}"
    )
    found = Exchanged(value, student_reach(variance, freedom, 0.25), p_value)
    rate = limits.false_alarm_rate
    check = DriftCheck.of("first_tokens", found, limits.acceptance, rate, words)
    if not check.drifted:
        return check
    train = (
        f"train the head again (`draftwell step train --kind eagle3_head --pair {pair}`), then "
        if method == HEAD and moved < 0
        else ""
    )
    mend = f"{words}: {train}tune and gate again on prompts like those that are served"
    return check.model_copy(update={"words": mend})
