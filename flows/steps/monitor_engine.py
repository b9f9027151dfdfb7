"""Monitoring of another engine: do drafts fare as they did when they were tuned? By counts that our plug-in records, without any text."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.engines.port import Acceptance
from components.engines.vllm import NAME
from serving.errors import DraftwellError
from serving.files import write_json

if TYPE_CHECKING:
    from components.drift.acceptance import AcceptanceReport
    from components.drift.schema import DriftLimits
    from components.tune.engines.tune import EngineChoice
    from flows.steps.engine import EngineSpace

REPORT = "drift.json"


def check_engine(space: EngineSpace, *, spool: Path, out: Path, limits: DriftLimits, temperature: float = 0.0,
                 now: datetime | None = None) -> AcceptanceReport:
    """Compare the newest counts with the tuning of what is served; the report is written into the engine's folder of the workspace.

    Args:
        spool: folder that the plug-in writes to.
        out: folder of bundles, for what `current` serves.
        temperature: of the requests that it was tuned for.
        now: None takes the clock.
    Raises:
        DraftwellError: nothing is deployed (`no_bundle`) or tuned (`not_tuned`), or the spool is empty (`spool_empty`).
    """
    from components.drift.acceptance import compare_acceptance, read_lines

    pair = space.workspace.spec.name
    served = served_config(out, pair)
    choice = space.choice(temperature)
    if choice is None:
        raise DraftwellError(f"nothing is tuned for {NAME}: run `draftwell tune --engine {NAME} --pair {space.workspace.name}` first",
                             code="not_tuned")
    report = compare_acceptance(read_lines(spool), tuned_acceptance(choice), served, limits, pair=pair, engine=NAME,
                                now=now or datetime.now(UTC))
    write_json(space.folder / REPORT, report.model_dump(mode="json"))
    return report


def served_config(out: Path, pair: str) -> dict[str, Any] | None:
    """The speculative config of the bundle that `current` leads to; None: plain decoding."""
    from registry.bundles.vllm.build import bundles_of
    from registry.bundles.vllm.render import MANIFEST

    current = bundles_of(out, pair) / "current"
    try:
        found = json.loads((current / MANIFEST).read_text())["settings"]["speculative"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DraftwellError(f"no bundle at {current}: build one with `draftwell deploy --engine {NAME}`", code="no_bundle") from error
    return dict(found) if found else None


def tuned_acceptance(choice: EngineChoice) -> Acceptance:
    """How drafts of what was chosen fared when it was measured: at every load where lengths follow the load."""
    figures = choice.scheduled or [one for one in choice.confirmed if one.label == choice.chosen.with_k(choice.k).label]
    return Acceptance.total(figure.acceptance for figure in figures)
