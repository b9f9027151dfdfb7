"""Successive halving under a scripted clock: who goes, who stays beside, what luck cannot do, and a
kill in the middle."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from draftwell.components.bench.engines.figures import TAIL
from draftwell.components.prompts.prompt import Prompt
from draftwell.components.tune.constraints import ConstraintViolation
from draftwell.components.tune.evaluator import Measured, measure_all
from draftwell.components.tune.evidence import Row
from draftwell.components.tune.resume import ResumableEvaluator
from draftwell.components.tune.successive_halving import (
    HalvingResult,
    compare_with_plain,
    successive_halving,
)
from draftwell.serving.runtime.strategies import PLAIN, StrategyChoice
from tests.support.errors import raises_code
from tests.support.loop.scripted_clock import Clock, gamma

PROMPTS = [Prompt(f"p{i}", None, [f"prompt {i}"]) for i in range(16)]
CONFIGS = [
    StrategyChoice("vanilla_sd", {"num_speculative_tokens": g}) for g in (8, 3, 6, 1, 4, 7, 2, 5)
]
CHAMPION = StrategyChoice("prompt_lookup", {"prompt_lookup_num_tokens": 5})


def by_gamma(config: StrategyChoice) -> float:
    """gamma 5 is the best, the others fall off to both sides; plain decoding is 1."""
    return 1.5 - 0.1 * abs(gamma(config) - 5) if config.name == "vanilla_sd" else 1.0


def gammas(figures: Sequence[Row]) -> set[int]:
    return {f.parameters["num_speculative_tokens"] for f in figures if f.strategy == "vanilla_sd"}


def test_the_slower_half_goes_and_every_rung_has_new_prompts() -> None:
    clock = Clock(by_gamma)
    halved = successive_halving(clock, CONFIGS, PROMPTS, champion=CHAMPION)
    assert [rung.prompts for rung in halved.rungs] == [["p0", "p1"], ["p2", "p3"]]
    assert [gammas(rung.figures) for rung in halved.rungs] == [set(range(1, 9)), {3, 4, 5, 6}]
    assert [gammas(rung.dropped) for rung in halved.rungs] == [{1, 2, 7, 8}, {3, 4}], (
        "of equal ones the first named stay"
    )
    assert gammas(halved.confirmation) == {5, 6}
    figure = halved.rungs[1].figures[-1]
    assert figure.prompts == 4, "what was measured adds up"
    assert all("place" in gone.why for rung in halved.rungs for gone in rung.dropped)


def test_plain_decoding_and_the_champion_are_in_every_measurement() -> None:
    clock = Clock(by_gamma)
    halved = successive_halving(clock, CONFIGS, PROMPTS, champion=CHAMPION)
    for configs, _, _ in clock.calls:
        assert configs[:2] == [PLAIN, CHAMPION]
        assert configs.count(CHAMPION) == 1
    assert [config for config, _ in halved.confirmed][:2] == [PLAIN, CHAMPION]
    again = successive_halving(Clock(by_gamma), [*CONFIGS, CHAMPION], PROMPTS, champion=CHAMPION)
    assert [config for config, _ in again.confirmed].count(CHAMPION) == 1, (
        "a challenger that is the champion is measured once"
    )


def test_the_confirmation_is_fresh_on_all_prompts_and_shares_its_tail() -> None:
    clock = Clock(by_gamma)
    halved = successive_halving(clock, CONFIGS, PROMPTS, champion=CHAMPION)
    configs, prompts, fresh = clock.calls[-1]
    assert (len(configs), prompts, fresh) == (4, [prompt.id for prompt in PROMPTS], True)
    assert not any(fresh for _, _, fresh in clock.calls[:-1]), (
        "in the rungs contenders keep what they have learnt"
    )
    assert halved.tail == pytest.approx(TAIL / 3)
    assert all(figure.prompts == len(PROMPTS) for figure in halved.confirmation)


def test_few_prompts_and_few_configs() -> None:
    assert successive_halving(Clock(by_gamma), CONFIGS[:2], PROMPTS).rungs == [], (
        "two need no narrowing"
    )
    short = successive_halving(Clock(by_gamma), CONFIGS, PROMPTS[:3])
    assert [rung.prompts for rung in short.rungs] == [["p0", "p1"], ["p2"]]
    alone = successive_halving(Clock(by_gamma), [], PROMPTS[:1])
    assert [config for config, _ in alone.confirmed] == [PLAIN]


def test_behind_the_last_rung_all_but_two_are_recorded_as_dropped() -> None:
    noisy = successive_halving(Clock(by_gamma, noise=0.5), CONFIGS, PROMPTS[:2])
    clear = successive_halving(Clock(by_gamma), CONFIGS, PROMPTS[:2])
    for halved in (noisy, clear):
        dropped = gammas(halved.rungs[0].dropped)
        assert len(dropped) == 6
        assert dropped | gammas(halved.confirmation) == set(range(1, 9)), (
            "whoever is not confirmed was dropped"
        )


def sure(halved: HalvingResult) -> bool:
    return any(figure.speedup_low >= 1 for figure in halved.confirmation[1:])


def test_luck_in_the_rungs_is_not_confirmed() -> None:
    """All are a little slower than plain decoding. Whoever believes the rungs is taken in; the
    confirmation hardly ever is."""
    believed = confirmed = 0
    for seed in range(40):
        halved = successive_halving(
            Clock(lambda config: 1.0 if config == PLAIN else 0.97, noise=0.3, seed=seed),
            CONFIGS,
            PROMPTS[:8],
            seed=seed,
        )
        believed += any(figure.speedup_low >= 1 for figure in halved.rungs[-1].figures[1:])
        confirmed += sure(halved)
    assert believed >= 6
    assert confirmed <= 2


def test_a_constraint_is_asked_on_what_was_measured_so_far() -> None:
    seen: list[tuple[int, int]] = []

    def violates(
        config: StrategyChoice, prompts: Any, measured: Measured, plain: Measured
    ) -> ConstraintViolation | None:
        seen.append((len(prompts), len(measured.seconds)))
        assert len(plain.seconds) == len(prompts)
        return ConstraintViolation("too odd", sure=True) if gamma(config) % 2 else None

    halved = successive_halving(Clock(by_gamma), CONFIGS, PROMPTS, violates=violates)
    assert set(seen) == {(2, 2)}
    assert gammas([gone for gone in halved.rungs[0].dropped if gone.why == "too odd"]) == {
        1,
        3,
        5,
        7,
    }
    assert gammas(halved.confirmation) == {4, 6}


def test_who_is_in_doubt_stays_but_leaves_a_place_to_one_who_is_not() -> None:
    """5 is the fastest, then 4 and 6: in doubt as they are, 3 is confirmed beside 5."""
    halved = successive_halving(
        Clock(by_gamma),
        CONFIGS,
        PROMPTS,
        violates=lambda config, *more: (
            ConstraintViolation("?", sure=False) if gamma(config) > 3 else None
        ),
    )
    assert gammas(halved.confirmation) == {5, 3}
    assert all(
        "place" in gone.why and ("perhaps ?" in gone.why) == (gamma(gone.choice) > 3)
        for rung in halved.rungs
        for gone in rung.dropped
    ), "nobody goes for a doubt alone"
    all_in_doubt = successive_halving(
        Clock(by_gamma),
        CONFIGS,
        PROMPTS,
        violates=lambda *arguments: ConstraintViolation("?", sure=False),
    )
    assert gammas(all_in_doubt.confirmation) == {5, 6}


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 0.0, -1.0])
def test_seconds_that_are_no_time_are_refused(bad: float, tmp_path: Path) -> None:
    def evaluate(configs: Any, prompts: Any, **more: Any) -> list[Measured]:
        return [
            Measured([bad] * len(prompts), [[1]] * len(prompts), [1] * len(prompts))
            for _ in configs
        ]

    with raises_code("measurement_not_finite", "autoregressive") as error:
        successive_halving(
            ResumableEvaluator(evaluate, tmp_path / "rungs.jsonl", {}), CONFIGS, PROMPTS
        )
    assert "\n" not in str(error.value)
    assert not (tmp_path / "rungs.jsonl").exists(), "nothing that is no number is remembered"


def test_a_result_too_few_is_refused() -> None:
    with raises_code("measurement_incomplete", "8 configurations", "16 prompts"):
        measure_all(lambda configs, prompts, **more: [], CONFIGS, PROMPTS)
    with raises_code("measurement_not_finite"):
        measure_all(
            lambda configs, prompts, **more: [Measured([1.0], [[]], [1])], CONFIGS[:1], PROMPTS[:1]
        )


def test_a_kill_costs_one_rung_at_most(tmp_path: Path) -> None:
    file = tmp_path / "tuning" / "rungs.jsonl"
    whole = successive_halving(Clock(by_gamma), CONFIGS, PROMPTS, champion=CHAMPION)
    for die_at in (1, 2, 3):
        first = Clock(by_gamma, die_at=die_at)
        with pytest.raises(KeyboardInterrupt):
            successive_halving(
                ResumableEvaluator(first, file, {"trace": 1}), CONFIGS, PROMPTS, champion=CHAMPION
            )
        second = Clock(by_gamma)
        halved = successive_halving(
            ResumableEvaluator(second, file, {"trace": 1}), CONFIGS, PROMPTS, champion=CHAMPION
        )
        assert halved == whole
        assert len(second.calls) == 3 - (die_at - 1), "what was measured is not measured again"
        assert second.calls[0] == first.calls[-1]
        assert [path.name for path in file.parent.iterdir()] == ["rungs.jsonl"]
        file.unlink()


def test_another_question_is_measured_anew(tmp_path: Path) -> None:
    file = tmp_path / "rungs.jsonl"
    ResumableEvaluator(Clock(by_gamma), file, {"trace": 1})(CONFIGS, PROMPTS)
    same = Clock(by_gamma)
    ResumableEvaluator(same, file, {"trace": 1})(CONFIGS, PROMPTS)
    assert same.calls == []
    questions: list[tuple[dict[str, int], dict[str, Any]]] = [
        ({"trace": 1}, {"fresh": True}),
        ({"trace": 1}, {"max_tokens": 8}),
        ({"trace": 2}, {}),
    ]
    for subject, asked in questions:
        clock = Clock(by_gamma)
        ResumableEvaluator(clock, file, subject)(CONFIGS, PROMPTS, **asked)
        assert len(clock.calls) == 1
    file.write_text('{"subject": ')
    clock = Clock(by_gamma)
    ResumableEvaluator(clock, file, {"trace": 1})(CONFIGS, PROMPTS)
    assert len(clock.calls) == 1, "a file that cannot be read is begun again"


def test_figures_are_over_all_tokens() -> None:
    plain, other = (
        Measured([2.0, 4.0], [[1] * 10, [1] * 20], [10, 20]),
        Measured([1.0, 1.0], [[1] * 10, [1] * 20], [4, 8]),
    )
    first, second = compare_with_plain([(PLAIN, plain), (CHAMPION, other)])
    assert first.speedup == 1.0
    assert second.speedup == pytest.approx(3.0)
    assert second.target_calls_per_token == pytest.approx(0.4)
    assert second.seconds_per_token == pytest.approx(2 / 30)
    assert second.speedup_low <= second.speedup <= second.speedup_high
    assert (plain + other).tokens == [10, 20, 10, 20]


def test_the_default_is_confirmed_whatever_a_rung_said() -> None:
    """Two prompts under a busy clock dropped it; over all of them it is the fastest."""
    default = StrategyChoice("hybrid", {})
    clock = Clock(
        lambda config: (
            (3.0 if len(clock.calls) > 2 else 0.5) if config == default else by_gamma(config)
        )
    )
    halved = successive_halving(clock, [*CONFIGS, default], PROMPTS, default=default)
    assert default.name in {gone.strategy for gone in halved.rungs[0].dropped}
    best = max(halved.confirmation, key=lambda figure: figure.speedup or 0.0)
    assert best.choice == default
    assert len(halved.confirmation) == 4
    again = successive_halving(Clock(by_gamma), CONFIGS[:1], PROMPTS, default=CONFIGS[0])
    assert len(again.confirmed) == 2, "it is measured once"
