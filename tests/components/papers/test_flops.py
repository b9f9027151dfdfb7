"""SPRINTER's Eq. 5 and 6 on counted tokens."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from components.bench.schema import BenchEntry, PromptRow
from components.papers.flops import counts_of, equations, flops_table, in_full
from components.papers.formulas import Flops

FLOPS = Flops("two models", draft=1.0, target=10.0)


def entry(strategy: str, tokens: int, calls: int, accepted: int, efficiency: float) -> BenchEntry:
    rows = (PromptRow(prompt_id="a", seconds=1.0, tokens=tokens + 1, target_calls=calls, accepted=accepted),)
    return BenchEntry(strategy=strategy, draft_efficiency=efficiency, per_prompt=rows)


def test_equation_5_charges_both_models_every_draft() -> None:
    """20 tokens in 8 rounds of 4 drafts, of which 12 stay: the target reads the drafts, and one token more a round."""
    counts = counts_of(entry("vanilla_sd", 20, 8, 12, 12 / 32), trusts=False)
    assert counts == pytest.approx((32 / 20, 8 / 20, 40 / 20))
    assert equations(counts, FLOPS, trusts=False) == pytest.approx(32 * 11 / 20)
    assert in_full(counts, FLOPS) == pytest.approx((32 + 40 * 10) / 20)


def test_equation_6_charges_the_target_a_token_a_call_though_it_reads_the_text() -> None:
    counts = counts_of(entry("sprinter", 20, 2, 18, 0.9), trusts=True)
    assert equations(counts, FLOPS, trusts=True) == pytest.approx((20 + 2 * 10) / 20)
    assert in_full(counts, FLOPS) == pytest.approx((20 + 20 * 10) / 20), "every token of the text once"


def test_the_table_is_over_sd() -> None:
    roles = {"SD": entry("vanilla_sd", 20, 8, 12, 12 / 32), "SPRINTER": entry("sprinter", 20, 2, 18, 0.9)}
    measured = SimpleNamespace(cell=SimpleNamespace(contenders=roles), entry=roles.__getitem__)
    rows = [line.split("|")[1:-1] for line in flops_table(SimpleNamespace(measured=lambda: measured), FLOPS).splitlines()[2:]]
    assert [[cell.strip() for cell in row] for row in rows] == [
        ["SD", "1.60", "0.40", "2.00", "1.00", "1.00"],
        ["SPRINTER", "1.00", "0.10", "1.00", f"{2.0 / 17.6:.2f}", f"{11.0 / 21.6:.2f}"]]
