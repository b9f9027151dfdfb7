"""Running the tuner in a test: settings by name, wherever they belong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from draftwell.components.prompts.prompt import Prompt
from draftwell.components.tune.evidence import TuningEvidence
from draftwell.components.tune.settings import TuneSettings
from draftwell.components.tune.tune import TuneInputs, tune_strategy
from draftwell.serving.artifacts.acceptance_table import AcceptanceTable
from draftwell.serving.artifacts.base import Provenance
from draftwell.serving.artifacts.correction_memory import CorrectionMemory
from draftwell.serving.artifacts.hardware_profile import HardwareProfile
from draftwell.serving.recording.trace import TraceSet
from draftwell.serving.runtime.pair import LoadedPair
from draftwell.serving.runtime.strategies import StrategyResources

ORIGIN = Provenance(pair="tiny", fingerprint="f" * 64, device_class="cpu-test")
PROFILE = HardwareProfile(1.0, {1: 10.0, 4: 11.0, 8: 12.0}, 0.1, ORIGIN)
RESOURCES = StrategyResources(
    {
        "acceptance_table": AcceptanceTable.empty(ORIGIN),
        "hardware_profile": PROFILE,
        "correction_memory": CorrectionMemory.empty(ORIGIN),
    },
    deterministic=True,
)


def run_tuner(
    pair: LoadedPair,
    trace: TraceSet,
    prompts: Sequence[Prompt],
    evaluate: Any,
    *,
    resources: StrategyResources = RESOURCES,
    profile: HardwareProfile = PROFILE,
    champion: Any = None,
    quality: Any = None,
    **settings: Any,
) -> TuningEvidence:
    """`tune_strategy` with the fields of `TuneSettings` and of `TuneInputs` as keywords, beside its
    own."""
    own = {
        name: settings.pop(name)
        for name in ("study", "rungs", "spread", "progress")
        if name in settings
    }
    width = {
        name: settings.pop(name)
        for name in ("strategies", "explored", "measured")
        if name in settings
    }
    inputs = TuneInputs(pair, trace, prompts, resources, profile, champion, **width)
    return tune_strategy(inputs, TuneSettings(**settings), evaluate, quality, **own)
