"""The checks of the gate that need no clock: identity of lossless outputs, predictions of
artifacts, size and start-up of the bundle, and a checkout's deterministic counts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from draftwell.components.bench.engines.measure import groups_of
from draftwell.components.bench.interleaved import REFERENCE
from draftwell.components.collect.decoding import room
from draftwell.components.gate.baseline_checks import compare_with_baseline
from draftwell.components.gate.baseline_counts import CountsReport, deterministic_report
from draftwell.components.gate.bench_checks import identity
from draftwell.components.gate.evidence import Interval, at_least, surely
from draftwell.components.gate.footprint import footprint, judge_footprint, room_for_another
from draftwell.components.gate.losslessness import identity_entry, judge_texts
from draftwell.components.gate.predictions import judge_predictions, predictions
from draftwell.components.gate.temperatures import tuned_classes
from draftwell.components.gate.weights_check import (
    LAYERS,
    judge_layers,
    judge_weights,
    weights_agreement,
)
from draftwell.components.prompts.prompt import Prompt, demo_prompts, ids_of
from draftwell.components.tune.by_batch import GROUPS, MOST_TOKENS, beside_plain
from draftwell.flows.context import StepContext, open_trace
from draftwell.flows.workspace import Workspace
from draftwell.registry.bundles.places import bundle_bytes
from draftwell.registry.gates import load_baseline, load_gates
from draftwell.registry.pairs import find_pair
from draftwell.registry.releases import ReleaseVersion
from draftwell.serving.artifacts.base import Artifact
from draftwell.serving.artifacts.decoding_config import DecodingConfig
from draftwell.serving.artifacts.kinds import temperature_of
from draftwell.serving.bundle.verdict import Check, GateVerdict, Skipped, Thresholds
from draftwell.serving.errors import DraftwellError
from draftwell.serving.number_format import dtype_of, in_dtype, weights_of
from draftwell.serving.runtime.pair import LoadedPair
from draftwell.serving.runtime.strategies import (
    PLAIN,
    StrategyChoice,
    StrategyResources,
    build_strategy,
    find_strategy,
)

IDENTITY_PROMPTS, IDENTITY_TOKENS, IDENTITY_SLOTS = 8, 64, 4
"""Enough tokens that a lossy strategy leaves the target's choice: CSD's rescues are one or two in a
hundred. In float32, so many requests at once: a batch of four takes hardly longer than one of
them."""
LAYERS_PROMPTS = 4
START_LIMIT = 120.0
"""Seconds that a start may take where the thresholds name none."""
PREDICTING = ("acceptance_table", "verifier")
"""Kinds whose predictions are judged on traces."""
COUNTED_PROMPTS, COUNTED_TOKENS = 6, 32
COUNTED = ("autoregressive", "vanilla_sd", "prompt_lookup", "sprinter", "csd", "spide")
"""Strategies whose deterministic counts are recorded as a pair's baseline."""
NOT_COLLECTED = ("no_traces", "collection_unfinished")
SHOWABLE = (
    "feature_missing",
    "no_untouched_prompts",
    "sampled_trace",
    "no_target_texts",
    "no_draft_tokens",
    "too_few_prompts",
)
"""Errors whose message says what to do and names no folder, which nobody needs to read in the
registry."""


def prediction_check(
    step: StepContext,
    mine: dict[str, Artifact],
    theirs: dict[str, Artifact],
    thresholds: Thresholds,
) -> GateVerdict:
    """How well table and verifier predict, compared with the champion's.

    Each is judged on the workspace's traces of its own class of temperatures: what it learnt from
    says nothing about the other class. A table with counts for both is judged twice, those for
    sampled requests under a name of their own.
    """
    verdict, parts = GateVerdict(()), list(predicting_parts(mine))
    if not parts:
        why = "the release has neither table nor verifier"
        return GateVerdict.of([Skipped("predicts", why, applies=False)])
    for name, part in parts:
        temperature = temperature_of(part) or 0.0
        rivals = {kind: artifact.at(temperature) for kind, artifact in theirs.items()}
        try:
            trace = open_trace(step, temperature=temperature)
            found, notes = predictions({part.kind: part}, rivals, trace)
        except DraftwellError as error:
            step.workspace.say(str(error))
            why = why_unusable(error, step.workspace.spec.name, temperature)
            verdict += GateVerdict.of([Skipped(f"{name} predicts", why)])
            continue
        named = [replace(one, kind=name) for one in found]
        verdict += judge_predictions(named, thresholds) + GateVerdict((), tuple(notes))
    return verdict


def predicting_parts(artifacts: dict[str, Artifact]) -> Iterator[tuple[str, Artifact]]:
    """Name and artifact of all that predicts; of one with a part for sampled requests that one
    too."""
    for kind in PREDICTING:
        if kind in artifacts:
            greedy, sampled = (artifacts[kind].at(temperature) for temperature in (0.0, 1.0))
            yield kind, greedy
            if sampled is not greedy:
                yield f"{kind} for sampled requests", sampled


def why_unusable(error: DraftwellError, pair: str, temperature: float) -> str:
    """Why the traces of a temperature cannot be used, with the command that collects others."""
    command = f"draftwell step collect --pair {pair}"
    if temperature:
        command += f" --set temperature={temperature:g}"
    traces = f"traces at temperature {temperature:g}"
    if error.code in NOT_COLLECTED:
        return f"the workspace has no finished {traces} (`{command}` collects them)"
    why = error if error.code in SHOWABLE else f"the workspace's {traces} cannot be used"
    return f"{why} (`{command} --set fresh=true` collects others)"


def footprint_check(
    step: StepContext, bundle: Path, release: ReleaseVersion, thresholds: Thresholds
) -> GateVerdict:
    """The size of the release's bundle, and how fast a new process starts from it."""
    limit = 2 * (thresholds.max_startup_seconds or START_LIMIT)
    size, files = bundle_bytes(bundle), step.workspace.files()
    return judge_footprint(footprint(bundle, size, files, release.device, limit=limit), thresholds)


def identity_verdict(
    step: StepContext, config: DecodingConfig, resources: Any, prompts: Sequence[Prompt]
) -> GateVerdict:
    """Identity at temperature 0 of every choice of a config that claims to be lossless; the sampled
    one's under a name of its own.

    The models are loaded once for all of them, and a choice that serves both classes of
    temperatures is decoded once.
    """
    classes = [
        (choice, temperature)
        for choice, temperature in tuned_classes(config)
        if find_strategy(choice.name).lossless and choice.name != PLAIN.name
    ]
    if not classes:
        why = "no choice but plain decoding claims to be lossless"
        return GateVerdict.of([Skipped("identical outputs", why, applies=False)])
    pair = identity_pair(step)
    found = {
        choice: identity_check(pair, choice, resources, prompts[:IDENTITY_PROMPTS])
        for choice in dict.fromkeys(choice for choice, _ in classes)
    }
    return GateVerdict(
        tuple(
            replace(check, name=f"sampled {check.name}") if temperature else check
            for choice, temperature in classes
            for check in found[choice]
        )
    )


def identity_check(
    pair: LoadedPair,
    choice: StrategyChoice,
    resources: StrategyResources,
    prompts: Sequence[Prompt],
) -> tuple[Check, ...]:
    """Whether a choice that claims to be lossless gives autoregressive's tokens; `pair`: exact, or
    in float32."""
    entry = identity_entry(pair, resources, choice, prompts, IDENTITY_TOKENS)
    return GateVerdict.of([identity(entry)]).checks


def weights_check(
    step: StepContext, prompts: Sequence[Prompt], thresholds: Thresholds
) -> GateVerdict:
    """How a target with rounded weights compares with the full ones; nothing for a target that has
    these."""
    weights = weights_of(step.pair.dtype)
    if weights is None or thresholds.min_weights_agreement is None:
        return GateVerdict(())
    full = step.workspace.in_dtype(dtype_of(step.pair.dtype)).load(device=step.pair.device)
    read = weights_agreement(step.pair, full, prompts, max_tokens=IDENTITY_TOKENS)
    return judge_weights(read, weights, thresholds)


def layers_check(
    step: StepContext, prompts: Sequence[Prompt], thresholds: Thresholds
) -> GateVerdict:
    """How the library that computes the layers compares with torch's."""
    if getattr(step.pair.models["target"], "library", None) is None:
        return GateVerdict.of([Skipped(LAYERS, "no library computes them", applies=False)])
    if not room_for_another(step.workspace.files()):
        why = "there is too little memory to load the models once more"
        return GateVerdict.of([Skipped(LAYERS, why)])
    torchs = step.workspace.load(device=step.pair.device, compile="off")
    some = prompts[:LAYERS_PROMPTS]
    read = weights_agreement(step.pair, torchs, some, max_tokens=IDENTITY_TOKENS)
    return judge_layers(read, thresholds)


def load_check(
    step: StepContext,
    choice: StrategyChoice,
    resources: StrategyResources,
    prompts: Sequence[Prompt],
    thresholds: Thresholds,
) -> GateVerdict:
    """The speed over plain decoding of the most requests at once that a choice still drafts for,
    as a server decodes them; it fails where that is surely too slow."""
    floor, table = thresholds.min_speedup_lower_bound, choice.draft_length_by_batch
    most = max((size for size, length in table.items() if size > 1 and length), default=None)
    if floor is None or most is None:
        return GateVerdict(())
    name = f"speed at {most} at once"
    if room(step.pair.engine(), most) < most:
        return GateVerdict.of([Skipped(name, "the models are loaded for fewer requests")])
    plain, served = (
        build_strategy(one.name, dict(one.parameters), resources.private())
        for one in (PLAIN, choice)
    )
    served.draft_length_by_batch = table
    groups = groups_of([ids_of(step.pair, prompt) for prompt in prompts], most, GROUPS)
    sampling = step.pair.sampling(max_tokens=MOST_TOKENS)
    sides = {REFERENCE: plain, str(most): served}
    figure = beside_plain(step.pair, sides, groups, sampling, None)[most]
    found = Interval(figure.ratio, figure.low, figure.high, figure.prompts)
    text = f"{found.value:.2f} x autoregressive {found} (upper end at least {floor:.2f})"
    return GateVerdict((surely(at_least(name, found, floor, text), text),))


def identity_pair(step: StepContext) -> LoadedPair:
    """The pair that identity is judged on: as it is shipped where its passes are exact, with as
    many slots as a server has; else in float32."""
    device = step.pair.device
    if step.pair.exact:
        again = step.workspace.load(slots=IDENTITY_SLOTS, device=device)
        if again.exact:
            return again
    exact = dtype_of(step.pair.dtype) == "float32"
    return step.pair if exact else float32_pair(step.workspace, device)


def float32_pair(workspace: Workspace, device: str = "cpu") -> LoadedPair:
    """The same pair, with the same weights, in float32."""
    space = workspace.in_dtype(in_dtype(workspace.dtype, "float32"))
    return space.load(slots=IDENTITY_SLOTS, device=device)


def count_checkout(pair_name: str, say: Any, bar: Any = None) -> tuple[CountsReport, GateVerdict]:
    """Deterministic counts of the strategies in `COUNTED` on the shipped prompts, in float32, and
    whether every strategy that claims to be lossless gave the target's own tokens."""
    pair = Workspace(pair_name, "float32", say).load()
    prompts = demo_prompts(COUNTED_PROMPTS)
    texts: dict[str, list[list[int]]] = {}
    choices = [StrategyChoice(name) for name in COUNTED]
    report = deterministic_report(pair, choices, prompts, COUNTED_TOKENS, progress=bar, texts=texts)
    return report, judge_texts(pair, prompts, texts, COUNTED_TOKENS)


def judge_baseline(pair_name: str, say: Any, bar: Any = None) -> GateVerdict:
    """Compare this checkout's deterministic counts with the recorded ones, and lossless outputs
    with the target's own choices."""
    name, gates = find_pair(pair_name).name, load_gates()
    recorded = load_baseline(name, CountsReport)
    if recorded is None:
        raise DraftwellError(
            f"pair {name} has no recorded baseline: record one with `draftwell gate --pair {name} "
            "--set record_counts=true`",
            code="no_baseline",
        )
    report, identical = count_checkout(pair_name, say, bar)
    verdict = compare_with_baseline(report, recorded)
    return verdict + identical if gates.lossless_identical else verdict
