"""The checks of the gate that need no clock: identity of lossless outputs, predictions of artifacts, size and start-up of the bundle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.gate.verdict import Check, GateVerdict, Thresholds
from flows.context import StepContext
from flows.workspace import Workspace
from serving.errors import DraftwellError
from serving.number_format import dtype_of, in_dtype, weights_of

if TYPE_CHECKING:
    from components.prompts.prompt import Prompt
    from registry.releases import ReleaseVersion
    from serving.artifacts.base import Artifact
    from serving.artifacts.decoding_config import DecodingConfig
    from serving.runtime.pair import LoadedPair

IDENTITY_PROMPTS, IDENTITY_TOKENS = 8, 64
"""Enough tokens that a lossy strategy leaves the target's choice: CSD's rescues are one or two in a hundred."""
START_LIMIT = 120.0
"""Seconds that a start may take where the thresholds name none."""
PREDICTING = ("acceptance_table", "verifier")
"""Kinds whose predictions are judged on traces."""
NOT_COLLECTED = ("no_traces", "collection_unfinished")
SHOWABLE = ("feature_missing", "no_untouched_prompts", "sampled_trace", "no_target_texts", "no_draft_tokens", "too_few_prompts")
"""Errors whose message says what to do and names no folder, which nobody needs to read in the registry."""


def missing(name: str, why: str, reason: str | None, *, enough: bool = True) -> GateVerdict:
    """What could not be measured does not pass, unless a person gives a reason, which becomes a note.

    Args:
        enough: False calls it not enough evidence instead of failed: something on this machine would supply it.
    """
    if reason:
        return GateVerdict((), (f"{why}; let pass: {reason}",))
    return GateVerdict((Check(name, 0, 1, False, f"{why}; `draftwell gate --unmeasured REASON` lets it pass", transient=True,
                              enough=enough),))


def prediction_check(step: StepContext, mine: dict[str, Artifact], theirs: dict[str, Artifact], thresholds: Thresholds,
                     unmeasured: str | None = None) -> GateVerdict:
    """How well table and verifier predict, compared with the champion's; nothing for a release without both.

    Each is judged on the workspace's traces of its own class of temperatures: what it learnt from says nothing about the other class.
    """
    from components.gate.predictions.predictive_loss import judge_predictions, predictions
    from flows.context import open_trace
    from serving.artifacts.kinds import temperature_of

    verdict, lacking = GateVerdict(()), []
    for kind in PREDICTING:
        if kind not in mine:
            continue
        temperature = temperature_of(mine[kind]) or 0.0
        try:
            found, notes = predictions({kind: mine[kind]}, theirs, open_trace(step, temperature=temperature))
        except DraftwellError as error:
            step.workspace.say(str(error))
            lacking.append(f"{kind} not judged: {why_unusable(error, step.workspace.spec.name, temperature)}")
        else:
            verdict += judge_predictions(found, thresholds) + GateVerdict((), tuple(notes))
    return verdict + missing("predictions measured", "; ".join(lacking), unmeasured, enough=False) if lacking else verdict


def why_unusable(error: DraftwellError, pair: str, temperature: float) -> str:
    """Why the traces of a temperature cannot be used, with the command that collects others."""
    command = f"draftwell collect --pair {pair}" + (f" --temperature {temperature:g}" if temperature else "")
    if error.code in NOT_COLLECTED:
        return f"the workspace has no finished traces at temperature {temperature:g} (`{command}` collects them)"
    if error.code in SHOWABLE:
        return f"{error} (`{command} --fresh` collects others)"
    return f"the workspace's traces at temperature {temperature:g} cannot be used (`{command} --fresh` collects others)"


def footprint_check(step: StepContext, bundle: Path, release: ReleaseVersion, thresholds: Thresholds) -> GateVerdict:
    """The size of the release's bundle, and how fast a new process starts from it."""
    from components.gate.footprint import footprint, judge_footprint
    from registry.bundles.build import bundle_bytes

    limit = 2 * (thresholds.max_startup_seconds or START_LIMIT)
    found = footprint(bundle, bundle_bytes(bundle), step.workspace.files(), release.device, limit=limit)
    return judge_footprint(found, thresholds)


def identity_verdict(step: StepContext, config: DecodingConfig, resources: Any, prompts: Sequence[Prompt]) -> GateVerdict:
    """Identity at temperature 0 of every choice of a config that claims to be lossless; the sampled one's under a name of its own."""
    from components.gate.temperatures import tuned_classes

    checks: list[Check] = []
    for choice, temperature in tuned_classes(config):
        found = identity_check(step, choice.name, dict(choice.parameters), resources, prompts[:IDENTITY_PROMPTS])
        checks += [replace(check, name=f"sampled {check.name}") if temperature else check for check in found]
    return GateVerdict(tuple(checks))


def identity_check(
    step: StepContext, strategy: str, parameters: dict[str, Any], resources: Any, prompts: Sequence[Prompt]
) -> tuple[Check, ...]:
    """Whether a choice that claims to be lossless gives autoregressive's tokens in float32; nothing for a lossy one."""
    from components.gate.bench_checks import judge_release
    from components.gate.losslessness import identity_entry
    from serving.runtime.strategies import StrategyChoice, find_strategy

    if not find_strategy(strategy).lossless or strategy == "autoregressive":
        return ()
    exact = float32_pair(step.workspace) if dtype_of(step.pair.dtype) != "float32" else step.pair
    entry = identity_entry(exact, resources, StrategyChoice(strategy, parameters), prompts, max_tokens=IDENTITY_TOKENS)
    return judge_release(entry, None, None, Thresholds(lossless_identical=True)).checks


def weights_check(step: StepContext, prompts: Sequence[Prompt], thresholds: Thresholds) -> GateVerdict:
    """How a target with rounded weights compares with the full ones; nothing for a target that has these."""
    weights = weights_of(step.pair.dtype)
    if weights is None or thresholds.min_weights_agreement is None:
        return GateVerdict(())
    from components.gate.weights_check import judge_weights, weights_agreement

    full = step.workspace.in_dtype(dtype_of(step.pair.dtype)).load()
    return judge_weights(weights_agreement(step.pair, full, prompts, max_tokens=IDENTITY_TOKENS), weights, thresholds)


def float32_pair(workspace: Workspace) -> LoadedPair:
    """The same pair, with the same weights, in float32."""
    return workspace.in_dtype(in_dtype(workspace.dtype, "float32")).load()
