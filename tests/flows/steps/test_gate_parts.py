"""The parts of the gate: predictions on traces of the right temperature, what serves sampled
requests, and candidates of another device."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import draftwell.flows.steps.gate
from draftwell.components.bench.runner import StrategyContender
from draftwell.components.gate.baseline_counts import fixed_resources
from draftwell.components.gate.losslessness import identity_entry
from draftwell.components.gate.settings import ROUNDS, GateSettings
from draftwell.components.prompts.prompt import Prompt
from draftwell.flows.context import StepContext
from draftwell.flows.steps.gate_parts import checks, judged as parts
from draftwell.flows.steps.gate_parts.bench import (
    BenchJudge,
    SampledVerdict,
    held_to,
    measured,
    sampled_verdict,
)
from draftwell.flows.steps.gate_parts.champion import ChampionComparison
from draftwell.flows.steps.gate_parts.checks import (
    float32_pair,
    identity_verdict,
    layers_check,
    load_check,
    prediction_check,
    weights_check,
)
from draftwell.serving.artifacts.acceptance_table import AcceptanceTable
from draftwell.serving.artifacts.base import Provenance
from draftwell.serving.artifacts.decoding_config import DecodingConfig, SampledChoice
from draftwell.serving.artifacts.verifier import Verifier
from draftwell.serving.bundle.verdict import FAILED, PASSED, GateVerdict, Thresholds
from draftwell.serving.runtime.pair import LoadedPair, over_slots
from draftwell.serving.runtime.strategies import StrategyChoice, StrategyResources
from tests.support.collecting import collect_traces
from tests.support.errors import raises_code
from tests.support.models.by_library import by_library, compiles
from tests.support.models.tiny import llama, llama_pair, pair_of

ROWS = [
    Prompt(f"p{i}", None, [text])
    for i, text in enumerate(["abcab cabinet", "hello hello", "zebra", "one two three"])
]
ORIGIN = Provenance(pair="tiny", fingerprint="f" * 64)
LIMIT = Thresholds(max_prediction_loss_ratio=1.05)
ANY_SPEED = Thresholds(min_speedup_lower_bound=0.0, max_regression=0.99, max_surprisal_shift=0.1)


@pytest.fixture(scope="module")
def pair() -> LoadedPair:
    return llama_pair(noise=0.02)


@pytest.fixture
def step(pair: LoadedPair, tmp_path: Path) -> StepContext:
    """A workspace as far as the gate's parts ask it; what is said is in `said`."""
    folders = {False: tmp_path / "traces", True: tmp_path / "traces_sampled"}
    space: Any = SimpleNamespace(
        traces_at=lambda temperature: folders[temperature > 0],
        begin=lambda: None,
        spec=SimpleNamespace(name="tiny"),
        device_reports=tmp_path / "reports",
        reports=tmp_path / "reports",
        root=tmp_path,
        said=[],
    )
    space.say = space.said.append
    return StepContext(space, pair)


def verifier(temperature: float | None = None) -> dict[str, Any]:
    made = ORIGIN.model_copy(
        update={"parameters": {} if temperature is None else {"temperature": temperature}}
    )
    return {"verifier": Verifier(torch.zeros(4), 0.0, ("scalars",), 0.5, 1.2, made)}


def collect(step: StepContext, temperature: float) -> None:
    collect_traces(
        step.pair,
        ROWS,
        step.workspace.traces_at(temperature),
        max_tokens=12,
        rollout=3,
        temperature=temperature,
    )


def test_a_sampled_verifier_is_judged_on_sampled_traces_alone(step: StepContext) -> None:
    """The greedy ones of the same workspace say nothing about it."""
    collect(step, 0.0)
    [lacking] = prediction_check(step, verifier(0.7), {}, LIMIT).skipped
    assert (lacking.name, lacking.applies) == ("verifier predicts", True)
    assert "`draftwell step collect --pair tiny --set temperature=0.7` collects them" in lacking.why
    assert [one.name for one in prediction_check(step, verifier(0.0), {}, LIMIT).checks] == [
        "verifier predicts"
    ]
    both = prediction_check(
        step, {**verifier(0.7), "acceptance_table": AcceptanceTable.empty(ORIGIN)}, {}, LIMIT
    )
    assert [one.name for one in (*both.checks, *both.skipped)] == [
        "acceptance_table predicts",
        "verifier predicts",
    ], "what can be judged is judged"
    collect(step, 0.7)
    [check] = prediction_check(step, verifier(0.7), {}, LIMIT).checks
    assert check.name == "verifier predicts"


def test_a_greedy_verifier_is_not_judged_on_sampled_traces(step: StepContext) -> None:
    collect(step, 0.7)
    for artifacts in (
        verifier(0.0),
        verifier(None),
        {"acceptance_table": AcceptanceTable.empty(ORIGIN)},
    ):
        [lacking] = prediction_check(step, artifacts, {}, LIMIT).skipped
        assert lacking.name == f"{next(iter(artifacts))} predicts"
        assert "`draftwell step collect --pair tiny` collects them" in lacking.why
        assert str(step.workspace.root) not in lacking.why


def test_both_counts_of_a_table_are_judged_each_on_traces_of_its_class(step: StepContext) -> None:
    """Counts for sampled requests that say the opposite fail, and the greedy ones of the same table
    pass."""
    from draftwell.components.calibrate.acceptance_table import (
        build_acceptance_table,
        build_sampled_table,
        with_sampled,
    )
    from draftwell.serving.recording.trace import TraceSet

    collect(step, 0.0)
    greedy, warm = (
        ORIGIN.model_copy(update={"parameters": {"temperature": at}}) for at in (0.0, 0.7)
    )
    table = build_acceptance_table(TraceSet(step.workspace.traces_at(0.0)), greedy)
    wrong = {"acceptance_table": with_sampled(table, AcceptanceTable([10**6] * 20, [0] * 20, warm))}
    found = prediction_check(step, wrong, {}, LIMIT)
    assert [one.name for one in (*found.checks, *found.skipped)] == [
        "acceptance_table predicts",
        "acceptance_table for sampled requests predicts",
    ]
    assert len(found.skipped) == 1, "there are no sampled traces yet"
    collect(step, 0.7)
    sampled = build_sampled_table(TraceSet(step.workspace.traces_at(0.7)), warm, 0.7)
    right = {"acceptance_table": with_sampled(table, sampled)}
    for artifacts, expected in ((wrong, [True, False]), (right, [True, True])):
        checks = prediction_check(step, artifacts, {}, LIMIT).checks
        assert [check.name for check in checks] == [
            "acceptance_table predicts",
            "acceptance_table for sampled requests predicts",
        ]
        assert [check.passed for check in checks] == expected
    for one in prediction_check(step, right, right, LIMIT).checks:
        assert "1.00 x the champion's" in one.detail


def test_a_table_that_has_counted_all_of_other_traces_of_the_same_prompts_is_not_judged(
    step: StepContext,
) -> None:
    from draftwell.components.collect.plan import prompt_hashes
    from draftwell.serving.recording.trace import TraceSet

    collect(step, 0.0)
    hashes = prompt_hashes(TraceSet(step.workspace.traces_at(0.0)))
    assert hashes is not None
    made = ORIGIN.model_copy(
        update={"trace_digest": "0" * 64, "training_prompts": sorted(hashes.values())}
    )
    [lacking] = prediction_check(
        step, {"acceptance_table": AcceptanceTable.empty(made)}, {}, LIMIT
    ).skipped
    assert "`draftwell step calibrate`" in lacking.why


def config(
    strategy: str, sampled: SampledChoice | None = None, **parameters: Any
) -> DecodingConfig:
    return DecodingConfig(strategy, parameters, {}, ORIGIN, sampled)


def champion(pair: LoadedPair, sampled: SampledChoice | None) -> ChampionComparison:
    resources = StrategyResources(
        {"decoding_config": config("autoregressive", sampled)}, pair.special_tokens
    )
    return ChampionComparison(
        contenders=(
            StrategyContender(pair, resources, StrategyChoice("autoregressive"), "champion"),
        )
    )


def sampled_part(
    step: StepContext,
    mine: DecodingConfig,
    rival: ChampionComparison,
    limits: Thresholds = ANY_SPEED,
) -> tuple[SampledVerdict, dict[str, Any] | None]:
    resources = StrategyResources({}, step.pair.special_tokens)
    verdict = sampled_verdict(
        step, ROWS, mine, limits, resources, rival, GateSettings(max_tokens=6)
    )
    file = step.workspace.device_reports / "bench_sampled.json"
    return verdict, json.loads(file.read_text()) if file.is_file() else None


@pytest.mark.parametrize(
    ("mine", "served"),
    [
        (config("vanilla_sd", num_speculative_tokens=2), "vanilla_sd"),
        (config("lossy_sd"), "autoregressive"),
    ],
)
def test_a_candidate_without_a_sampled_choice_is_compared_by_what_would_serve(
    step: StepContext, mine: DecodingConfig, served: str
) -> None:
    """It would else be promoted over a champion that is faster for every request without a
    temperature, and nobody would see it."""
    rival = champion(step.pair, SampledChoice(0.7, "vanilla_sd", {"num_speculative_tokens": 3}))
    found, bench = sampled_part(step, mine, rival)
    verdict = found.verdict
    assert bench is not None
    assert bench["settings"]["temperature"] == 0.7
    rows = {
        label: (row["strategy"], row["parameters"]) for label, row in bench["strategies"].items()
    }
    assert rows["champion"] == ("vanilla_sd", {"num_speculative_tokens": 3})
    assert (
        served,
        {"num_speculative_tokens": 2} if served == "vanilla_sd" else {},
    ) in rows.values()
    assert {"sampled speedup", "sampled regression"} <= {check.name for check in verdict.checks}
    judged = "sampled likelihood" in {one.name for one in (*verdict.checks, *verdict.skipped)}
    assert judged is (served == "vanilla_sd"), "plain decoding is what it is compared with"
    assert f"measured at temperature 0.7, {served}" in verdict.notes[0]


def test_a_champion_without_a_sampled_choice_decodes_what_it_would_serve(step: StepContext) -> None:
    mine = config("autoregressive", SampledChoice(0.5, "lossy_sd", {}))
    found, bench = sampled_part(step, mine, champion(step.pair, None))
    assert bench is not None
    assert (bench["settings"]["temperature"], bench["strategies"]["champion"]["strategy"]) == (
        0.5,
        "autoregressive",
    )
    assert {"sampled regression", "sampled likelihood"} <= {
        check.name for check in found.verdict.checks
    }
    assert (found.low, found.as_greedy) == (None, False), "a choice of its own was tuned"


def test_a_greedy_choice_that_was_just_measured_is_judged_by_that(
    step: StepContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, resources = config("prompt_lookup"), fixed_resources(step.pair)
    judging, wanted = BenchJudge(mine.strategy, {}, ANY_SPEED), GateSettings(max_tokens=6)
    known, _ = measured(step, ROWS[:2], judging, resources, ChampionComparison(), wanted)
    space: Any = step.workspace
    space.files = lambda: SimpleNamespace(draft=None)
    monkeypatch.setattr(parts, "measured", lambda *of, **given: pytest.fail("measured"))
    monkeypatch.setattr(parts, "load_check", lambda *of: GateVerdict(()))
    monkeypatch.setattr(parts, "prediction_check", lambda *of: GateVerdict(()))
    candidate = parts.Candidate({"decoding_config": mine}, resources)
    rival, limits = ChampionComparison(), ANY_SPEED
    found = parts.judged(step, ROWS, candidate, rival, limits, wanted, None, known)
    assert found.report is known
    assert "speedup" in {check.name for check in found.verdict.checks}


@pytest.mark.parametrize(("allowed", "least"), [(0.02, 0.98), (0.1, 0.9), (0.5, 0.9), (None, 0.9)])
def test_a_lossy_choice_is_held_to_the_loss_that_it_was_tuned_for(
    allowed: float | None, least: float
) -> None:
    mine = config("csd")
    mine.evidence["constraints"] = {"max_quality_loss": allowed}
    candidate = parts.Candidate({"decoding_config": mine}, StrategyResources())
    limits = Thresholds(min_quality_ratio=0.9)
    assert candidate.greedy(limits).thresholds.min_quality_ratio == least
    assert limits.min_quality_ratio == 0.9


def test_the_loss_of_a_tuning_binds_where_gates_name_none() -> None:
    bound = held_to(Thresholds(), {"constraints": {"max_quality_loss": 0.05}})
    assert bound.min_quality_ratio == 0.95
    assert held_to(Thresholds(), {}).min_quality_ratio is None


def test_a_sampled_bench_measures_no_cost_ratio(step: StepContext) -> None:
    _, bench = sampled_part(
        step,
        config("autoregressive", SampledChoice(0.5, "lossy_sd", {})),
        champion(step.pair, None),
    )
    assert bench is not None
    assert bench["cost_reference"] is None


def test_identity_loads_the_models_once_for_both_classes(
    step: StepContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And decodes what serves both once; what is plain or lossy is not decoded at all."""
    decoded: list[StrategyChoice] = []
    real = checks.identity_check

    def watched(reader: Any, choice: StrategyChoice, *rest: Any) -> Any:
        decoded.append(choice)
        return real(reader, choice, *rest)

    loads: list[Any] = []
    bf16 = SimpleNamespace(dtype="bfloat16", exact=False, device="cpu")
    monkeypatch.setattr(checks, "identity_check", watched)
    monkeypatch.setattr(
        checks,
        "float32_pair",
        lambda workspace, device: loads.append((workspace, device)) or step.pair,
    )
    resources = StrategyResources({}, step.pair.special_tokens)
    context: Any = StepContext(step.workspace, bf16)  # type: ignore[arg-type]
    one, other = {"num_speculative_tokens": 2}, {"num_speculative_tokens": 3}
    both = identity_verdict(
        context,
        config("vanilla_sd", SampledChoice(0.7, "vanilla_sd", other), **one),
        resources,
        ROWS,
    )
    assert [(check.name, check.passed) for check in both.checks] == [
        ("identical outputs", True),
        ("sampled identical outputs", True),
    ]
    assert (len(loads), len(decoded)) == (1, 2)
    assert loads == [(step.workspace, "cpu")], "on the device that is judged"
    same = identity_verdict(
        context, config("vanilla_sd", SampledChoice(0.7, "vanilla_sd", one), **one), resources, ROWS
    )
    assert [check.name for check in same.checks] == [
        "identical outputs",
        "sampled identical outputs",
    ]
    assert (len(loads), len(decoded)) == (2, 3)
    none = identity_verdict(
        context, config("autoregressive", SampledChoice(0.7, "lossy_sd", {})), resources, ROWS
    )
    assert (none.checks, len(loads), len(decoded)) == ((), 2, 3)


def test_the_greedy_choice_is_measured_for_sampled_requests_at_the_default_temperature(
    step: StepContext,
) -> None:
    """It served them unmeasured: at a temperature that nobody tuned for it may be slower than plain
    decoding."""
    found, bench = sampled_part(
        step, config("vanilla_sd", num_speculative_tokens=2), ChampionComparison()
    )
    assert bench is not None
    assert (bench["settings"]["temperature"], set(bench["strategies"])) == (
        1.0,
        {"autoregressive", "vanilla_sd"},
    )
    assert found.as_greedy, "any speed is enough here"
    assert bench["settings"]["runs"] == ROUNDS
    assert found.low == bench["strategies"]["vanilla_sd"]["speedup_low"]
    assert "sampled speedup" in {check.name for check in found.verdict.checks}


@pytest.mark.parametrize("rival", [False, True])
def test_a_greedy_choice_that_is_too_slow_for_sampled_requests_gives_way_to_plain_decoding(
    step: StepContext, rival: bool
) -> None:
    """That refuses no release; a champion that is faster at them does."""
    beside = (
        champion(step.pair, SampledChoice(0.7, "vanilla_sd", {"num_speculative_tokens": 3}))
        if rival
        else ChampionComparison()
    )
    limits = ANY_SPEED.model_copy(update={"min_speedup_lower_bound": 1000.0})
    found, bench = sampled_part(
        step, config("vanilla_sd", num_speculative_tokens=2), beside, limits
    )
    assert bench is not None
    assert found.low is not None
    assert (found.low < 1000, found.as_greedy) == (True, False)
    assert [check.name for check in found.verdict.checks] == (
        ["sampled speedup", "sampled regression"] if rival else []
    )
    assert all(check.passed for check in found.verdict.checks)
    assert "autoregressive decodes them" in found.verdict.notes[0]


@pytest.mark.parametrize("mine", [config("lossy_sd"), config("autoregressive")])
def test_sampled_requests_that_are_decoded_plainly_are_a_note(
    step: StepContext, mine: DecodingConfig
) -> None:
    found, bench = sampled_part(step, mine, champion(step.pair, None))
    assert (found.verdict.checks, bench, found.low, found.as_greedy) == ((), None, None, False)
    assert found.verdict.notes[0].startswith("sampled requests are not judged")


def test_the_gate_refuses_a_cpu_config_under_a_cuda_name(
    step: StepContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it was pinned past `draftwell release create`, which refuses it, too."""
    release = SimpleNamespace(
        name="release.tiny.cuda version 3", device="cuda", fingerprint=step.pair.fingerprint
    )
    tuned_on_cpu = DecodingConfig(
        "vanilla_sd", {}, {}, ORIGIN.model_copy(update={"device_class": "cpu-x86-2c"})
    )
    monkeypatch.setattr(draftwell.flows.steps.gate, "find_release", lambda *arguments: release)
    monkeypatch.setattr(
        draftwell.flows.steps.gate,
        "artifacts_of",
        lambda *arguments: {"decoding_config": tuned_on_cpu},
    )
    store: Any = None
    with raises_code(
        "made_on_other_device",
        "the decoding_config of release.tiny.cuda version 3 was made on cpu-x86-2c",
    ):
        draftwell.flows.steps.gate.open_candidate(step, store, "cuda", 3)


def test_rounded_weights_are_compared_with_the_full_ones_and_identity_keeps_them(
    pair: LoadedPair,
) -> None:
    asked: list[str] = []
    other = SimpleNamespace(load=lambda **_: pair)
    space: Any = SimpleNamespace(
        dtype="bfloat16-int8", in_dtype=lambda name: (asked.append(name), other)[1]
    )
    limit = Thresholds(min_weights_agreement=0.97)
    assert weights_check(StepContext(space, pair), ROWS, limit).checks == (), (
        "these are the full ones"
    )
    [check] = weights_check(
        StepContext(space, replace(pair, dtype="bfloat16-int8")), ROWS, limit
    ).checks
    assert (check.name, check.value, check.passed) == ("int8 weights", 1.0, True)
    float32_pair(space)
    assert asked == ["bfloat16", "float32-int8"]


@compiles
def test_a_library_that_computes_wrongly_for_all_is_found(
    step: StepContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain decoding uses it too: every lossless choice gives its tokens, and is identical."""
    monkeypatch.setattr(checks, "room_for_another", lambda files: True)
    limits = Thresholds(min_weights_agreement=0.95)
    sound, planted = by_library(llama(2)), by_library(llama(2))
    planted.shape = replace(planted.shape, eps=50.0)
    planted.native = planted._by_library(planted.library)
    step.workspace.files = lambda: None
    step.workspace.load = lambda **options: pair_of(over_slots(llama(2)), None)
    for target, passed in ((sound, True), (planted, False)):
        pair = pair_of(target, None, {"target": llama(2)})
        entry = identity_entry(
            pair, StrategyResources({}, frozenset()), StrategyChoice("prompt_lookup"), ROWS, 24
        )
        assert entry.identical_outputs == len(ROWS)
        [check] = layers_check(StepContext(step.workspace, pair), ROWS, limits).checks
        assert (check.name, check.passed) == ("compiled layers", passed), check.detail
    monkeypatch.setattr(checks, "room_for_another", lambda files: False)
    [lacking] = layers_check(StepContext(step.workspace, pair), ROWS, limits).skipped
    assert "memory" in lacking.why
    assert not layers_check(step, ROWS, limits).skipped[0].applies, "torch computes these"


@pytest.mark.parametrize(
    ("table", "floor", "result"),
    [({1: 3, 4: 2}, 0.0, PASSED), ({1: 3, 2: 2, 4: 0}, 1000.0, FAILED), ({}, 1.0, None)],
)
def test_what_serves_several_requests_at_once_is_measured_as_it_serves_them(
    step: StepContext, table: dict[int, int], floor: float, result: str | None
) -> None:
    choice = StrategyChoice("vanilla_sd", {"num_speculative_tokens": 3}, table)
    resources = StrategyResources({}, step.pair.special_tokens)
    limits = Thresholds(min_speedup_lower_bound=floor)
    found = load_check(step, choice, resources, ROWS, limits)
    size = max((size for size, length in table.items() if length), default=0)
    expected = [] if result is None else [(f"speed at {size} at once", result)]
    assert [(check.name, check.result) for check in found.checks] == expected
    many = replace(choice, draft_length_by_batch={16: 2})
    [lacking] = load_check(step, many, resources, ROWS, limits).skipped
    assert lacking.name == "speed at 16 at once"
