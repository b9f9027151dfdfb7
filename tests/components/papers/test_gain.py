"""SPIDE's gain over SD, from ours to the paper's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from components.bench.schema import BenchEntry, PromptRow
from components.papers import formulas
from components.papers.cell_file import Costs
from components.papers.gain import by_papers_conditions, gain_steps, run_lengths
from components.papers.tables import PublishedPair

PAPER = PublishedPair(alpha=0.9, gamma=6, tau=0.6, ratio=8, sd_share=0.8, gain=1.5)
ALONE, BUSY = (0.01, {1: 0.1, 8: 0.16}), (0.02, {1: 0.12, 8: 0.2})


def decoded(**values: object) -> BenchEntry:
    rows = tuple(PromptRow(prompt_id=str(i), seconds=1.0, tokens=31, ttft_ms=1.0, accepted=accepted, judged=20)
                 for i, accepted in enumerate((12, 16)))
    return BenchEntry.model_validate({"speedup": 1.0, "acceptance_rate": 0.7, "per_prompt": rows, **values})


def made(costs: Costs | None) -> Any:
    """A cell with one SD and two SPIDEs, of which the second is the faster."""
    entries = {"sd": decoded(strategy="vanilla_sd", parameters={"num_speculative_tokens": 4}, decode_tokens_per_second=10.0),
               "slow": decoded(strategy="spide", parameters={"tau": "0.9"}, decode_tokens_per_second=8.0),
               "fast": decoded(strategy="spide", parameters={"tau": "0.5"}, decode_tokens_per_second=11.0)}
    labels = {"SD": "sd", "SPIDE": "fast"}
    measured = SimpleNamespace(labels={"SD": ["sd"], "SPIDE": ["slow", "fast"]}, entries=entries, label=labels.__getitem__,
                               entry=lambda role: entries[labels[role]])
    return SimpleNamespace(costs=costs, measured=lambda: measured, report=SimpleNamespace(strategies=entries))


def test_each_step_changes_one_thing() -> None:
    """Contention first, then the price of a pass over several tokens, then the paper's pair, then its SD."""
    costs = Costs(t_draft=0.01, t_verify=ALONE[1], t_rest=0.005, alone=ALONE, busy=BUSY)
    values = [value for _, value in gain_steps(made(costs), PAPER)]

    def gain(alone: formulas.Passes, busy: formulas.Passes, rest: float) -> float:
        alphas = (0.6, 0.8)
        return (sum(formulas.sd_seconds(30, alpha, 4, alone, rest) for alpha in alphas)
                / sum(formulas.spide_seconds(30, alpha, 0.5, alone, busy, rest) for alpha in alphas))

    flat = (0.01, {1: 0.1})
    theirs = by_papers_conditions(PAPER)
    assert values == pytest.approx([1.1, gain(ALONE, BUSY, 0.005), gain(ALONE, ALONE, 0.005), gain(flat, flat, 0.0), theirs,
                                    theirs / 0.8, 1.5])
    assert values[2] > values[1], "two models that slow each other gain less"


def test_without_timed_passes_there_are_no_steps() -> None:
    assert gain_steps(made(None), PAPER) == []
    assert gain_steps(made(Costs(t_draft=0.01, t_verify=ALONE[1], t_rest=0.0)), PAPER) == []


def test_the_papers_target_takes_as_long_over_any_number_of_tokens() -> None:
    """And s draft passes fit into its pass, not s + 1."""
    passes = 1.0, {1: 8.25, 32: 8.25}
    wanted = formulas.sd_seconds(256, 0.9, 6, passes) / formulas.spide_seconds(256, 0.9, 0.6, passes, passes)
    assert by_papers_conditions(PAPER) == pytest.approx(wanted)


def test_runs_that_nothing_cuts_short_are_longer_than_sds() -> None:
    """Against sums: a run of any length over one of at most γ tokens."""
    alpha, gamma = 0.8, 5
    endless = sum(alpha ** i for i in range(1, 500))
    assert run_lengths(alpha, gamma) == pytest.approx(endless / sum(alpha ** i for i in range(1, gamma + 1)))
