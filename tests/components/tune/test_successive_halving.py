"""Successive halving under a scripted clock: who goes, who stays beside, what luck cannot do, and a
kill in the middle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from draftwell.components.prompts.prompt import Prompt
from draftwell.components.report.intervals import TAIL
from draftwell.components.tune.constraints import ConstraintChecker
from draftwell.components.tune.evaluator import Measured
from draftwell.components.tune.evidence import Confirmation, Row, Rung
from draftwell.components.tune.resume import ResumableEvaluator
from draftwell.components.tune.settings import Constraints
from draftwell.components.tune.successive_halving import compare_with_plain, successive_halving
from draftwell.serving.runtime.strategies import PLAIN, StrategyChoice
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


def halve(
    clock: Any,
    choices: Sequence[StrategyChoice],
    prompts: Sequence[Prompt],
    checker: ConstraintChecker | None = None,
    **more: Any,
) -> tuple[list[Rung], Confirmation]:
    """Without constraints, unless a checker is given."""
    return successive_halving(
        clock, choices, prompts, checker or ConstraintChecker(Constraints(), None), **more
    )


def choices_of(confirmation: Confirmation) -> list[StrategyChoice]:
    return [figure.choice for figure in confirmation.figures]


def test_the_slower_half_goes_and_every_rung_has_new_prompts() -> None:
    clock = Clock(by_gamma)
    rungs, confirmation = halve(clock, CONFIGS, PROMPTS, champion=CHAMPION)
    assert [rung.prompts for rung in rungs] == [["p0", "p1"], ["p2", "p3"]]
    assert [gammas(rung.figures) for rung in rungs] == [set(range(1, 9)), {3, 4, 5, 6}]
    assert [gammas(rung.dropped) for rung in rungs] == [{1, 2, 7, 8}, {3, 4}], (
        "of equal ones the first named stay"
    )
    assert gammas(confirmation.figures) == {5, 6}
    figure = rungs[1].figures[-1]
    assert figure.prompts == 4, "what was measured adds up"
    assert all("place" in gone.why for rung in rungs for gone in rung.dropped)


def test_plain_decoding_and_the_champion_are_in_every_measurement() -> None:
    clock = Clock(by_gamma)
    _, confirmation = halve(clock, CONFIGS, PROMPTS, champion=CHAMPION)
    for configs, _, _ in clock.calls:
        assert configs[:2] == [PLAIN, CHAMPION]
        assert configs.count(CHAMPION) == 1
    assert choices_of(confirmation)[:2] == [PLAIN, CHAMPION]
    _, again = halve(Clock(by_gamma), [*CONFIGS, CHAMPION], PROMPTS, champion=CHAMPION)
    assert choices_of(again).count(CHAMPION) == 1, (
        "a challenger that is the champion is measured once"
    )


def test_the_confirmation_is_fresh_on_all_prompts_and_shares_its_tail() -> None:
    clock = Clock(by_gamma)
    _, confirmation = halve(clock, CONFIGS, PROMPTS, champion=CHAMPION)
    configs, prompts, fresh = clock.calls[-1]
    assert (len(configs), prompts, fresh) == (4, [prompt.id for prompt in PROMPTS], True)
    assert not any(fresh for _, _, fresh in clock.calls[:-1]), (
        "in the rungs contenders keep what they have learnt"
    )
    assert confirmation.tail == pytest.approx(TAIL / 3)
    assert all(figure.prompts == len(PROMPTS) for figure in confirmation.figures)


def test_few_prompts_and_few_configs() -> None:
    assert halve(Clock(by_gamma), CONFIGS[:2], PROMPTS)[0] == [], "two need no narrowing"
    rungs, _ = halve(Clock(by_gamma), CONFIGS, PROMPTS[:3])
    assert [rung.prompts for rung in rungs] == [["p0", "p1"], ["p2"]]
    _, alone = halve(Clock(by_gamma), [], PROMPTS[:1])
    assert choices_of(alone) == [PLAIN]


def test_behind_the_last_rung_all_but_two_are_recorded_as_dropped() -> None:
    rungs, confirmation = halve(Clock(by_gamma, noise=0.5), CONFIGS, PROMPTS[:2])
    dropped = gammas(rungs[0].dropped)
    assert len(dropped) == 6
    assert dropped | gammas(confirmation.figures) == set(range(1, 9)), (
        "whoever is not confirmed was dropped"
    )
    places = [gone.why.partition("place ")[2] for gone in rungs[0].dropped]
    assert places == [f"{place} of 8" for place in range(3, 9)]


def test_luck_in_the_rungs_is_not_confirmed() -> None:
    """All are a little slower than plain decoding. Whoever believes the rungs is taken in; the
    confirmation hardly ever is."""
    believed = confirmed = 0
    for seed in range(40):
        rungs, confirmation = halve(
            Clock(lambda config: 1.0 if config == PLAIN else 0.97, noise=0.3, seed=seed),
            CONFIGS,
            PROMPTS[:8],
            seed=seed,
        )
        believed += any(figure.speedup_low >= 1 for figure in rungs[-1].figures[1:])
        confirmed += any(figure.speedup_low >= 1 for figure in confirmation.figures[1:])
    assert believed >= 6
    assert confirmed <= 2


class Objecting(ConstraintChecker):
    """Objects to what a test says, and remembers on how many prompts it was asked."""

    def __init__(self, objection: Callable[[StrategyChoice], str | None]):
        super().__init__(Constraints(), None)
        self.__dict__ |= {"objects": objection, "seen": []}

    def metrics(
        self, choice: StrategyChoice, prompts: Any, measured: Measured, plain: Measured
    ) -> dict[str, Any]:
        assert len(plain.seconds) == len(measured.seconds) == len(prompts)
        self.__dict__["seen"].append(len(prompts))
        return {"objection": self.__dict__["objects"](choice)}


def test_constraints_are_asked_on_what_was_measured_so_far() -> None:
    checker = Objecting(lambda config: None)
    halve(Clock(by_gamma), CONFIGS, PROMPTS, checker)
    assert checker.__dict__["seen"] == [2] * 8 + [4] * 4 + [16] * 3


def test_the_second_place_is_kept_for_one_that_keeps_to_the_constraints() -> None:
    """5 is the fastest, then 4 and 6: as constraints speak against them, 3 is confirmed beside
    5."""
    rungs, confirmation = halve(
        Clock(by_gamma), CONFIGS, PROMPTS, Objecting(lambda one: "?" if gamma(one) > 3 else None)
    )
    assert gammas(confirmation.figures) == {5, 3}
    assert all(
        "place" in gone.why and ("and ?" in gone.why) == (gamma(gone.choice) > 3)
        for rung in rungs
        for gone in rung.dropped
    ), "nobody goes for a constraint alone"
    _, confirmation = halve(Clock(by_gamma), CONFIGS, PROMPTS, Objecting(lambda one: "?"))
    assert gammas(confirmation.figures) == {5, 6}


def test_a_kill_costs_one_rung_at_most(tmp_path: Path) -> None:
    file = tmp_path / "tuning" / "rungs.jsonl"
    whole = halve(Clock(by_gamma), CONFIGS, PROMPTS, champion=CHAMPION)
    for die_at in (1, 2, 3):
        first = Clock(by_gamma, die_at=die_at)
        with pytest.raises(KeyboardInterrupt):
            halve(
                ResumableEvaluator(first, file, {"trace": 1}), CONFIGS, PROMPTS, champion=CHAMPION
            )
        second = Clock(by_gamma)
        found = halve(
            ResumableEvaluator(second, file, {"trace": 1}), CONFIGS, PROMPTS, champion=CHAMPION
        )
        assert found == whole
        assert len(second.calls) == 3 - (die_at - 1), "what was measured is not measured again"
        assert second.calls[0] == first.calls[-1]
        assert [path.name for path in file.parent.iterdir()] == ["rungs.jsonl"]
        file.unlink()


def test_another_question_is_measured_anew(tmp_path: Path) -> None:
    file = tmp_path / "rungs.jsonl"

    def calls(trace: int = 1, **asked: Any) -> int:
        clock = Clock(by_gamma)
        ResumableEvaluator(clock, file, {"trace": trace})(CONFIGS, PROMPTS, **asked)
        return len(clock.calls)

    assert [calls(), calls()] == [1, 0]
    assert [calls(fresh=True), calls(max_tokens=8), calls(trace=2)] == [1, 1, 1]
    file.write_text('{"subject": ')
    assert calls() == 1, "a file that cannot be read is begun again"


def test_figures_are_over_all_tokens() -> None:
    plain, other = (
        Measured([2.0, 4.0], [[1] * 10, [1] * 20], [10, 20]),
        Measured([1.0, 1.0], [[1] * 10, [1] * 20], [4, 8]),
    )
    first, second = compare_with_plain({PLAIN: plain, CHAMPION: other})
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
    rungs, confirmation = halve(clock, [*CONFIGS, default], PROMPTS, default=default)
    assert default.name in {gone.strategy for gone in rungs[0].dropped}
    best = max(confirmation.figures, key=lambda figure: figure.speedup)
    assert best.choice == default
    assert len(confirmation.figures) == 4
    _, again = halve(Clock(by_gamma), CONFIGS[:1], PROMPTS, default=CONFIGS[0])
    assert len(again.figures) == 2, "it is measured once"
