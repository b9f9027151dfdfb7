"""Monitoring of another engine: do drafts fare as they did when they were tuned? By counts that our
plug-in records, without any text."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from draftwell.components.drift.acceptance import compare_acceptance, read_lines
from draftwell.components.drift.schema import DriftLimits, DriftReport
from draftwell.components.engines.port import Acceptance
from draftwell.components.engines.vllm import NAME
from draftwell.flows.steps.engine.served import served_settings
from draftwell.flows.steps.engine.space import EngineSpace
from draftwell.flows.steps.monitor import write_report
from draftwell.serving.errors import DraftwellError


def check_engine(space: EngineSpace, *, spool: Path, out: Path, limits: DriftLimits) -> DriftReport:
    """Compare the newest counts with the tuning of what is served; the report is written into the
    engine's folder of the workspace.

    Args:
        spool: folder that the plug-in writes to.
        out: folder of bundles, for what `current` serves.
    Raises:
        DraftwellError: nothing is deployed (`no_bundle`), or it does not say how drafts fared when
            they were tuned (`old_bundle`); or the spool is empty (`spool_empty`).
    """
    pair = space.workspace.spec.name
    settings = served_settings(out, pair)
    report = compare_acceptance(
        read_lines(spool),
        tuned_acceptance(settings),
        settings.get("speculative"),
        limits,
        pair=pair,
        fingerprint=settings["gate"]["fingerprint"],
        bundle=f"{pair}/{settings['release']}-{settings['gate']['device']}",
        now=datetime.now(UTC),
    )
    write_report(report, space.folder)
    return report


def tuned_acceptance(settings: dict[str, Any]) -> Acceptance:
    """How first tokens of drafts fared when what is served was tuned; nothing counted where it
    decodes plainly.

    Raises:
        DraftwellError: the bundle does not say (`old_bundle`).
    """
    if not settings.get("speculative"):
        return Acceptance()
    try:
        tuned = settings["tuned"]
        each = tuple((kept, drafts) for kept, drafts in tuned.get("by_prompt", ()))
        return Acceptance(rounds=tuned["drafts"], accepted_at=(tuned["first_kept"],), each=each)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DraftwellError(
            "the bundle that is served does not say how drafts fared when they were "
            "tuned: deploy again with `draftwell "
            f"deploy --engine {NAME}`",
            code="old_bundle",
        ) from error
