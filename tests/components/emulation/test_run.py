"""Emulated devices: passes end when the curve says, tokens are the engine's own, and what is
measured is what formulas expect where every token is accepted."""

from __future__ import annotations

import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from draftwell.components import formulas
from draftwell.components.bench.settings import BenchSettings
from draftwell.components.emulation import run as emulation
from draftwell.components.emulation.curve import Curve, curve_of
from draftwell.components.emulation.devices import Devices
from draftwell.components.emulation.page import beside_prediction, gains_table
from draftwell.components.emulation.prediction import predicted_speeds, predicted_time, profile_of
from draftwell.components.emulation.result import EmulatedRun, read_run
from draftwell.components.emulation.run import run_emulated
from draftwell.components.prompts.prompt import Prompt, ids_of
from draftwell.serving.artifacts.base import Provenance
from draftwell.serving.errors import DraftwellError
from draftwell.serving.runtime.commands import Forward
from draftwell.serving.runtime.engine import engine, task
from draftwell.serving.runtime.pair import LoadedPair
from draftwell.serving.runtime.strategies import StrategyChoice, build_strategy
from tests.support.models.priced import Clock, Priced, PricedWorkers, wait_for_first
from tests.support.models.table_model import TableModel
from tests.support.models.tiny import VOCAB, llama_pair, pair_of

FLAT = curve_of("flat", {"source": "a test", "target": {1: 1.0}, "draft": {1: 0.25}})
RISING = curve_of(
    "rising", {"source": "a test", "target": {1: 1.0, 5: 2.0, 9: 4.0}, "draft": {1: 0.25}}
)
PROMPTS = [Prompt(f"p{i}", None, [text]) for i, text in enumerate(["hello", "abc", "so it goes"])]
CHOICES = [
    StrategyChoice("autoregressive"),
    StrategyChoice("vanilla_sd", {"num_speculative_tokens": 4}),
    StrategyChoice("spide", {"tau": 0.3}),
    StrategyChoice("pearl"),
    StrategyChoice("duo_decoding"),
]
WORK = {"target": 0.020, "draft": 0.002}


def agreeing_models(wrong_behind: int | None = None) -> dict[str, TableModel]:
    """A target that counts up, and a draft that does so too but behind one token."""
    table = torch.full((VOCAB, VOCAB), -20.0)
    for token in range(3, VOCAB):
        table[token, 3 + (token - 2) % (VOCAB - 3)] = 20.0
    draft = table.clone()
    if wrong_behind is not None:
        draft[wrong_behind] = draft[wrong_behind].roll(1)
    return {"target": TableModel(table, slots=1), "draft": TableModel(draft, slots=1)}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The engine's clock and worker threads, and what devices wait by: nothing really waits."""
    clock = Clock()
    for module in (engine, task):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(engine, "Workers", partial(PricedWorkers, clock))
    monkeypatch.setattr(engine, "wait", wait_for_first)

    def pass_time(seconds: float) -> None:
        clock.now += seconds

    monkeypatch.setattr(
        emulation, "Devices", partial(Devices, now=clock.perf_counter, sleep=pass_time)
    )
    return clock


def working_pair(clock: Clock, wrong_behind: int | None = None, **work: float) -> LoadedPair:
    """Models whose real work takes a known time."""
    models = agreeing_models(wrong_behind)
    seconds = WORK | work
    target, draft = (
        Priced(models[role], clock, lambda row, _, role=role: seconds[role])
        for role in ("target", "draft")
    )
    return pair_of(target, draft)


def measured(pair: LoadedPair, curve: Curve, **changes: Any) -> EmulatedRun:
    settings = BenchSettings(max_tokens=33, warmup=False)
    return run_emulated(pair, curve, CHOICES, PROMPTS, settings=settings, **changes)


@pytest.mark.parametrize("curve", [FLAT, RISING], ids=lambda curve: curve.name)
@pytest.mark.parametrize("placement", ["own", "shared"])
def test_a_draft_that_is_the_target_reaches_what_formulas_expect(
    clock: Clock, curve: Curve, placement: Any
) -> None:
    found = measured(working_pair(clock), curve, placement=placement)
    assert found.void is None
    assert found.late == 0
    assert found.identical == len(PROMPTS)
    assert found.rows["vanilla_sd"].acceptance == 1.0
    compared = {one.what: one for one in beside_prediction(found)}
    assert compared.keys() >= {*found.rows, "spide over vanilla_sd", "spide over pearl"}
    for what, one in compared.items():
        assert one.share == pytest.approx(1, abs=0.04), what
    plain, sd = found.rows["autoregressive"], found.rows["vanilla_sd"]
    assert plain.speed == pytest.approx(1 / curve.target[1])
    assert sd.speed == pytest.approx(predicted_speeds(found)["vanilla_sd"])
    assert all(row.outside == pytest.approx(0, abs=1e-9) for row in found.rows.values())


def test_placements_differ_by_what_runs_at_once(clock: Clock) -> None:
    own, shared = (
        measured(working_pair(clock, wrong_behind=9), FLAT, placement=placement)
        for placement in ("own", "shared")
    )
    assert own.rows["vanilla_sd"].speed == pytest.approx(shared.rows["vanilla_sd"].speed)
    for label, gain in {"spide": 1.02, "pearl": 1.3, "duo_decoding": 1.3}.items():
        assert own.rows[label].speed > gain * shared.rows[label].speed, label
    assert own.rows["spide"].tokens == shared.rows["spide"].tokens


def test_all_strategies_are_predicted_with_the_acceptance_of_vanilla_sd(clock: Clock) -> None:
    found = measured(working_pair(clock, wrong_behind=9), FLAT)
    sd, pearl = found.rows["vanilla_sd"], found.rows["pearl"]
    assert 0 < sd.acceptance < 1
    assert pearl.acceptance != pytest.approx(sd.acceptance)
    rates = [kept / judged for kept, judged in zip(sd.accepted, sd.judged, strict=True)]
    assert rates == pytest.approx(text_rates(clock))
    # every text has 33 tokens; PEARL drafts as many as fit into a target pass, and whether the
    # target keeps the first one is known: only the others have the rate's chance
    assert found.first_kept == (False, True, True)
    passes = 0.25, FLAT.target_times()
    whole, behind = (
        [formulas.overlapped_seconds(tokens, rate, passes, lambda _: 4) for rate in rates]
        for tokens in (33, 32)
    )
    expected = [
        (both - (1 - rate) * (1 + lost)) / rate if first else 1 + lost
        for both, lost, rate, first in zip(whole, behind, rates, found.first_kept, strict=True)
    ]
    assert predicted_speeds(found)["pearl"] == pytest.approx(3 * 33 / sum(expected))


@pytest.mark.parametrize("first_kept", [True, False])
def test_pearls_first_token_costs_a_round_where_it_is_lost(first_kept: bool) -> None:
    pearl = build_strategy("pearl", {"num_speculative_tokens": 4})
    profile = profile_of(FLAT, Provenance(pair="tiny", fingerprint="none"))
    certain = predicted_time(pearl, profile, 9, 1.0, in_turn=False, first_kept=first_kept)
    # a round brings the first token alone, and 8 further ones are two rounds of 4 and a first one
    assert certain == (3.0 if first_kept else 4.0)


def text_rates(clock: Clock) -> list[float]:
    """Accepted / judged draft tokens of vanilla SD on each prompt, without emulation."""
    pair, strategy = (
        working_pair(clock, wrong_behind=9),
        build_strategy("vanilla_sd", {"num_speculative_tokens": 4}),
    )
    sampling = pair.sampling(max_tokens=33)
    found = [
        pair.engine(split=False).generate(ids_of(pair, one), sampling, strategy) for one in PROMPTS
    ]
    return [one.session.stats.acceptance_rate for one in found]


def test_one_stretch_makes_room_for_the_real_work_of_both(clock: Clock) -> None:
    quick, slow = (measured(working_pair(clock, draft=draft), FLAT) for draft in (0.002, 0.030))
    assert quick.stretch == pytest.approx(emulation.MARGIN * 0.020)
    assert slow.stretch == pytest.approx(emulation.MARGIN * 0.030 / 0.25)
    assert slow.rows["pearl"].speed == pytest.approx(quick.rows["pearl"].speed)


def test_a_draft_without_a_curve_takes_the_time_that_it_computes(clock: Clock) -> None:
    computing = curve_of("real", {"source": "a test", "target": {1: 1.0}})
    found = measured(working_pair(clock, draft=0.25 * emulation.MARGIN * 0.020), computing)
    assert "pearl" not in predicted_speeds(found)
    assert found.rows["vanilla_sd"].speed == pytest.approx(
        measured(working_pair(clock), FLAT).rows["vanilla_sd"].speed
    )
    assert found.rows["pearl"].speed > 3


def test_late_passes_void_a_run(clock: Clock, tmp_path: Path) -> None:
    pair, slow = working_pair(clock), iter(range(10**9))
    price = pair.models["target"].price
    # nothing is late in the trials; later one pass in fifty is
    pair.models["target"].price = lambda row, held: (
        price(row, held) * (2 if next(slow) > 150 and row.slot == 0 and held % 25 == 0 else 1)
    )
    found = measured(pair, FLAT)
    assert 0.01 < max(row.late for row in found.rows.values()) < 0.2
    assert "ended behind their deadline" in found.void
    assert found.ratios == ()
    assert all(row.speed is None and not row.times for row in found.rows.values())
    assert beside_prediction(found) == []
    assert "| void: " in gains_table({"it": found})
    assert read_run(found.write(tmp_path / "run.json")) == found


def test_a_text_that_the_machine_disturbed_is_decoded_again(clock: Clock) -> None:
    pair, count = working_pair(clock), iter(range(10**9))
    price = pair.models["target"].price
    # the machine stands still once, behind the trials
    pair.models["target"].price = lambda row, held: (
        price(row, held) + (3.0 if next(count) == 300 else 0.0)
    )
    found, calm = measured(pair, FLAT), measured(working_pair(clock), FLAT)
    assert found.void is None
    assert sum(row.again for row in found.rows.values()) == 1
    assert (found.late, found.stretch) == (0, pytest.approx(calm.stretch))
    speeds, calm_speeds = ([row.speed for row in run.rows.values()] for run in (found, calm))
    assert speeds == pytest.approx(calm_speeds)


def test_late_passes_of_the_trials_do_not_count(clock: Clock) -> None:
    pair, count = working_pair(clock), iter(range(10**9))
    # slower from the second trial on, which the stretch follows
    pair.models["target"].price = lambda row, held: 0.020 if next(count) < 90 else 0.030
    found = measured(pair, FLAT)
    assert found.stretch == pytest.approx(emulation.MARGIN * 0.030)
    assert found.void is None
    assert found.late == 0


def test_a_run_is_written_and_read(clock: Clock, tmp_path: Path) -> None:
    found = measured(working_pair(clock), FLAT, source="three words")
    assert read_run(found.write(tmp_path / "deeper" / "run.json")) == found
    assert "| spide over pearl |" in gains_table({"it": found})
    assert found.prompts == "three words"
    (tmp_path / "other.json").write_text('{"version": 2}')
    with pytest.raises(DraftwellError) as refused:
        read_run(tmp_path / "other.json")
    assert refused.value.code == "bad_emulated_run"


def test_padding_is_refused(clock: Clock) -> None:
    pair = working_pair(clock)
    pair.padded_to = 7
    with pytest.raises(DraftwellError) as refused:
        measured(pair, FLAT)
    assert refused.value.code == "not_emulated"


def test_tokens_are_those_of_the_engine_without_emulation() -> None:
    """On threads and a real clock, with a draft that is often wrong."""
    pair, some = llama_pair(slots=1), PROMPTS[:2]
    settings = BenchSettings(max_tokens=12, warmup=False)
    resources = emulation.count_acceptance(pair, some, settings)
    assert sum(resources.artifacts["acceptance_table"].total) > 5
    alone = emulation.measure(pair, resources, CHOICES[:2], some, settings)
    plain = [run.tokens for run in alone["autoregressive"].typical]
    assert alone["vanilla_sd"].stats.acceptance_rate != 1.0
    assert [run.tokens for run in alone["vanilla_sd"].typical] == plain
    curve = curve_of("short", {"source": "a test", "target": {1: 4e-4}, "draft": {1: 1e-4}})
    devices = Devices(curve, stretch=1.0)
    resources = emulation.with_profile(resources, pair, curve, 0.25)
    sampling = pair.sampling(max_tokens=12)
    for choice, placement in [(one, "own") for one in CHOICES] + [(CHOICES[2], "shared")]:
        one = emulation.EmulatedContender(devices, pair, resources, choice, "one", placement)
        found = [one.generate(ids_of(pair, prompt), sampling) for prompt in some]
        assert [each.tokens for each in found] == plain, choice.name
        # the prompt was read before: no pass has more tokens than a round
        assert len(one.passes) >= sum(each.stats.target_calls for each in found)
    assert {each.role for each in devices.passes} == {"target", "draft"}


def test_models_wait_at_once_on_threads_of_their_own() -> None:
    curve = curve_of("wait", {"source": "a test", "target": {1: 0.02}, "draft": {1: 0.02}})
    devices, models = Devices(curve, stretch=1.0), agreeing_models()
    waiting = devices.emulated(pair_of(models["target"], models["draft"])).models
    slots = {role: model.open() for role, model in waiting.items()}
    started = time.perf_counter()
    threads = [
        threading.Thread(target=model.forward, args=([Forward(role, slots[role], (3,))],))
        for role, model in waiting.items()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.perf_counter() - started >= 0.02
    assert {one.role for one in devices.passes} == {"target", "draft"}
    assert all(one.took >= 0.02 and one.worked < 0.02 for one in devices.passes)


def test_sharing_a_device_takes_the_sum() -> None:
    passes = (0.25, {1: 1.0})
    once = formulas.overlapped_seconds(8, 0.0, passes, lambda _: 4)
    assert once == 8.0
    # the last tokens leave room for fewer drafts
    assert formulas.overlapped_seconds(8, 0.0, passes, lambda _: 4, in_turn=True) == pytest.approx(
        8 + 0.25 * (4 * 5 + 3 + 2 + 1)
    )


def test_strategies_without_a_formula_have_no_prediction() -> None:
    lookup = build_strategy("prompt_lookup")
    profile = profile_of(FLAT, Provenance(pair="tiny", fingerprint="none"))
    assert predicted_time(lookup, profile, 9, 0.5, in_turn=False) is None
