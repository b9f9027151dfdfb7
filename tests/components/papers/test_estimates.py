"""Values with intervals from made reports."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from draftwell.components.bench.schema import BenchEntry, PromptRow
from draftwell.components.papers.cell_file import CellFile
from draftwell.components.papers.cells import Cell
from draftwell.components.papers.estimates import (
    Estimate,
    efficiency,
    estimate,
    pace,
    speed,
)
from draftwell.components.papers.results import first_choices

SEQUENCES = ("one_kept", "one_lost", "several_kept", "several_lost")


def test_draft_efficiency_is_the_reports_with_an_interval_over_prompts() -> None:
    """Accepted over drafted, not over judged: 12 of 24 drafted here, of which only 16 were
    judged."""
    rows = tuple(
        PromptRow(
            prompt_id=name,
            seconds=1.0,
            tokens=accepted + 2,
            target_calls=2,
            accepted=accepted,
            judged=8,
        )
        for name, accepted in (("a", 8), ("b", 4))
    )
    found = efficiency(BenchEntry(draft_efficiency=0.5, acceptance_rate=0.75, per_prompt=rows))
    assert found is not None
    assert found.value == 0.5
    assert [found.low, found.high] == pytest.approx([1 / 3, 2 / 3])
    assert efficiency(BenchEntry(draft_efficiency=None, per_prompt=rows)) is None


def test_draft_efficiency_over_another_entrys_is_a_ratio() -> None:
    rows = [
        PromptRow(
            prompt_id=f"p{i}", seconds=1.0, tokens=8, target_calls=4, accepted=2 + i, judged=8
        )
        for i in range(4)
    ]
    half = [row.model_copy(update={"accepted": row.accepted / 2}) for row in rows]
    mine, base = (
        BenchEntry(draft_efficiency=0.7, per_prompt=rows),
        BenchEntry(draft_efficiency=0.35, per_prompt=half),
    )
    found = efficiency(mine, base)
    assert found is not None
    assert list(found) == pytest.approx([2.0, 2.0, 2.0]), (
        "twice as many on each prompt: prompts are compared with themselves"
    )
    fewer = [row.model_copy(update={"accepted": 1}) for row in rows]
    spread = efficiency(mine, BenchEntry(draft_efficiency=0.2, per_prompt=fewer))
    assert spread is not None
    assert spread.low < spread.value < spread.high
    assert efficiency(mine, BenchEntry(draft_efficiency=0.0, per_prompt=fewer)) is None


def test_quality_is_the_share_of_the_targets_first_choices_less_plains() -> None:
    """Plain decoding's share is below 1 where it samples: a lossy strategy is compared with it, not
    with 1."""

    def entry(*matches: int) -> BenchEntry:
        rows = [
            PromptRow(prompt_id=str(i), seconds=1.0, tokens=10, target_argmax=count)
            for i, count in enumerate(matches)
        ]
        return BenchEntry(per_prompt=tuple(rows))

    found = estimate("argmax", entry(6, 4, 5), entry(8, 8, 8))
    assert found is not None
    # three times one prompt is rarer than 5 %
    assert [*found] == pytest.approx([-0.3, -11 / 30, -7 / 30])
    unknown = BenchEntry(per_prompt=(PromptRow(prompt_id="0", seconds=1.0, tokens=10),))
    assert estimate("argmax", unknown, entry(8)) is None


@pytest.mark.parametrize(("temperature", "less"), [(0.0, 0.8), (1.0, 0.5)])
def test_first_choices_of_sampled_texts_are_less_those_of_all_lossless_texts(
    temperature: float, less: float
) -> None:
    """Plain decoding's text is one draw: here a lucky one, by which vanilla SD would lose, too."""

    def entry(matches: int, *, lossless: bool = True) -> BenchEntry:
        rows = [
            PromptRow(prompt_id=str(i), seconds=1.0, tokens=10, target_argmax=matches)
            for i in range(3)
        ]
        return BenchEntry(per_prompt=tuple(rows), lossless=lossless)

    contenders = {"SD": ("vanilla_sd",), "lossy": ("mentored",)}
    cell = Cell(
        name="made",
        pair="made",
        data="code",
        contenders=contenders,
        prompts=3,
        max_tokens=10,
        temperature=temperature,
    )
    entries = {
        "autoregressive": entry(8),
        "vanilla_sd": entry(2),
        "mentored": entry(5, lossless=False),
    }
    found = first_choices(
        CellFile.model_construct(cell=cell, report=SimpleNamespace(strategies=entries)), "lossy"
    )
    assert found is not None
    assert found.value == pytest.approx(0.5 - less)


def test_speeds_leave_the_prompts_reading_out() -> None:
    """Twice as fast behind the first token, which took the same second: 1.5 times with it, 2
    without."""

    def entry(*rows: tuple[float, int]) -> BenchEntry:
        return BenchEntry(
            per_prompt=tuple(
                PromptRow(prompt_id=str(i), seconds=seconds, tokens=tokens, ttft_ms=1000.0)
                for i, (seconds, tokens) in enumerate(rows)
            )
        )

    plain, fast = entry((3.0, 11), (3.0, 11)), entry((2.0, 11), (2.0, 11))
    found = speed(fast, plain)
    assert found is not None
    assert [*found] == pytest.approx([2.0, 2.0, 2.0])
    assert [*(speed(fast, plain, whole=True) or ())] == pytest.approx([1.5, 1.5, 1.5])
    cut = speed(entry((2.0, 11), (1.0, 1)), plain)
    assert cut is not None
    assert cut.value == pytest.approx(2.0), (
        "a prompt that ends with its first token decodes nothing"
    )
    ended = entry((1.0, 1), (1.0, 1))
    assert speed(ended, plain) is None
    assert pace(ended.per_prompt) == 1.0


def test_texts_of_one_prompt_are_drawn_together() -> None:
    """Two prompts, five seeds each: taken for ten prompts, their interval would be two thirds as
    wide."""

    def entry(seeds: int, *, apart: bool) -> BenchEntry:
        rows = [
            PromptRow(
                prompt_id=f"{name}{seed if apart else ''}",
                seconds=seconds,
                tokens=11,
                target_calls=calls,
                accepted=5,
                judged=10,
            )
            for seed in range(seeds)
            for name, seconds, calls in (("a", 1.0, 5), ("b", 3.0, 9))
        ]
        return BenchEntry(per_prompt=tuple(rows))

    def width(
        measure: Callable[[BenchEntry, BenchEntry], Estimate | None], seeds: int, *, apart: bool
    ) -> float:
        plain = [
            PromptRow(prompt_id=row.prompt_id, seconds=4.0, tokens=11, target_calls=11)
            for row in entry(seeds, apart=apart).per_prompt
        ]
        found = measure(entry(seeds, apart=apart), BenchEntry(per_prompt=tuple(plain)))
        assert found is not None
        return found.high - found.low

    for measure in (speed, lambda mine, base: estimate("calls", mine, base)):
        once, together, apart = (
            width(measure, 1, apart=False),
            width(measure, 5, apart=False),
            width(measure, 5, apart=True),
        )
        assert together == pytest.approx(once)
        assert apart < 0.7 * once


def test_accepted_tokens_are_counted_for_each_token_behind_a_draft() -> None:
    """Three rounds of three accepted tokens and one of the target's: MAT is 3, whatever else the
    prompt's reading brought."""
    rows = tuple(
        PromptRow(prompt_id=name, seconds=1.0, tokens=13, target_calls=4, accepted=9, judged=9)
        for name in "ab"
    )
    found = [
        estimate("mat", BenchEntry(strategy=name, per_prompt=rows))
        for name in ("vanilla_sd", "pearl")
    ]
    assert [one and one.value for one in found] == pytest.approx([3.0, 2.25]), (
        "PEARL drafts before its first token, too"
    )


def test_overlap_is_compared_prompt_by_prompt() -> None:
    """A tie counts as won, as in the paper's win-tie rates; prompts without a reference are left
    out."""

    def entry(*points: float | None) -> BenchEntry:
        return BenchEntry(
            per_prompt=tuple(
                PromptRow(prompt_id=str(i), rouge_l=value) for i, value in enumerate(points)
            )
        )

    mine, base = entry(20.0, 30.0, 10.0, None), entry(20.0, 10.0, 16.0, 50.0)
    less, won = (estimate(metric, mine, base) for metric in ("rouge_l", "wins"))
    assert less is not None
    assert won is not None
    assert (less.value, won.value) == (pytest.approx(14 / 3), pytest.approx(2 / 3))
    assert less.low < 0 < less.high
    assert estimate("wins", mine, entry(None, None, None, None)) is None


def test_shares_of_rounds_by_sequences_are_of_all_rounds_that_judged_one() -> None:
    """Table 4's four shares: of ten rounds four had one sequence, of which three kept it."""
    rows = (
        PromptRow(prompt_id="a", sequences={1: (2, 1), 2: (0, 1)}),
        PromptRow(prompt_id="b", sequences={1: (1, 0), 3: (2, 3)}),
        PromptRow(prompt_id="c"),
    )
    entry = BenchEntry(strategy="duo_decoding", per_prompt=rows)
    found = {metric: estimate(metric, entry) for metric in SEQUENCES}
    assert {metric: round(one.value, 2) for metric, one in found.items() if one} == {
        "one_kept": 0.3,
        "one_lost": 0.1,
        "several_kept": 0.2,
        "several_lost": 0.4,
    }
    assert estimate("several_kept", BenchEntry(per_prompt=rows[2:])) is None


def test_rouge_over_another_contenders_is_of_the_same_prompts() -> None:
    """A ratio of means, not a mean of ratios; prompts without a reference have no part in it."""

    def entry(*points: float | None) -> BenchEntry:
        return BenchEntry(
            per_prompt=tuple(
                PromptRow(prompt_id=str(i), seconds=1.0, tokens=8, rouge_l=one)
                for i, one in enumerate(points)
            )
        )

    found = estimate("rouge_l_ratio", entry(10.0, 30.0, None, 5.0), entry(40.0, 20.0, None, None))
    assert found is not None
    assert (found.value, found.low, found.high) == pytest.approx((40 / 60, 10 / 40, 30 / 20))
    assert estimate("rouge_l_ratio", entry(None), entry(None)) is None
    assert estimate("rouge_l_ratio", entry(1.0), entry(0.0)) is None
