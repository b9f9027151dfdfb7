"""SPRINTER's Eq. 5 and 6 on counted tokens."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from draftwell.components.bench.schema import BenchEntry, PromptRow
from draftwell.components.papers.flops import counts_of, flops_table
from draftwell.components.papers.formulas import Flops

FLOPS = Flops("two models", draft=1.0, target=10.0)


def entry(strategy: str, efficiency: float, *rows: tuple[int, int, int, int]) -> BenchEntry:
    """Of texts of (tokens behind the first, target calls, accepted, judged)."""
    made = [
        PromptRow(
            prompt_id=str(i),
            seconds=1.0,
            tokens=tokens + 1,
            target_calls=calls,
            accepted=accepted,
            judged=judged,
        )
        for i, (tokens, calls, accepted, judged) in enumerate(rows)
    ]
    return BenchEntry(strategy=strategy, draft_efficiency=efficiency, per_prompt=tuple(made))


SD = entry("vanilla_sd", 12 / 32, (20, 8, 12, 24))
SPRINTER = entry("sprinter", 0.8, (20, 2, 16, 18), (10, 0, 10, 10))


def test_equation_5_charges_both_models_every_draft() -> None:
    """20 tokens in 8 rounds of 4 drafts, of which 12 stay: the target reads the drafts, judged or
    not, and one token more a round."""
    assert counts_of(SD) == pytest.approx((32 / 20, 8 / 20, 32 / 20, 40 / 20))


def test_equation_6_charges_a_token_a_call_though_the_target_reads_the_text_and_what_it_rejects() -> (  # noqa: E501
    None
):
    """A text that it is never asked about it does not read at all."""
    drafted = 26 / 0.8
    assert counts_of(SPRINTER) == pytest.approx((drafted / 30, 2 / 30, 2 / 30, 22 / 30))


def test_the_table_is_over_sd() -> None:
    roles = {"SD": SD, "SPRINTER": SPRINTER}
    measured = SimpleNamespace(cell=SimpleNamespace(contenders=roles), entry=roles.__getitem__)
    rows = [
        line.split("|")[1:-1]
        for line in flops_table(SimpleNamespace(measured=lambda: measured), FLOPS).splitlines()[2:]
    ]
    by_equation, in_full = (32.5 + 20) / 30 / 17.6, (32.5 + 220) / 30 / 21.6
    assert [[cell.strip() for cell in row] for row in rows] == [
        ["SD", "1.60", "0.40", "2.00", "1.00", "1.00"],
        ["SPRINTER", "1.08", "0.07", "0.73", f"{by_equation:.2f}", f"{in_full:.2f}"],
    ]
