"""SPIDE's gain over SD, from ours to the paper's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from draftwell.components.bench.schema import BenchEntry, PromptRow
from draftwell.components.papers import formulas
from draftwell.components.papers.cell_file import Costs
from draftwell.components.papers.gain import (
    PublishedPair,
    by_papers_conditions,
    gain_steps,
    gain_table,
    published_pair,
)
from draftwell.components.papers.tables import papers_named

PAPER = PublishedPair(alpha=0.9, gamma=6, tau=0.6, ratio=8, sd_share=0.8, gain=1.5)
ALONE, BUSY, ALL = (0.01, {1: 0.1, 8: 0.16}), (0.02, {1: 0.12, 8: 0.2}), {1: 0.06, 8: 0.07}
TEXTS = {
    "sd": ((31, 12, 20), (41, 16, 20)),
    "slow": ((21, 6, 20), (61, 18, 20)),
    "fast": ((26, 10, 20), (51, 18, 20)),
}
"""Label → tokens, accepted and judged tokens of each text."""


def decoded(label: str, **values: object) -> BenchEntry:
    rows = tuple(
        PromptRow(
            prompt_id=str(i),
            seconds=1.0,
            tokens=tokens,
            ttft_ms=1.0,
            accepted=accepted,
            judged=judged,
        )
        for i, (tokens, accepted, judged) in enumerate(TEXTS[label])
    )
    return BenchEntry.model_validate(
        {"speedup": 1.0, "acceptance_rate": 0.7, "per_prompt": rows, **values}
    )


def made(costs: Costs | None) -> Any:
    """A cell with one SD and two SPIDEs, of which the second is the faster."""
    entries = {
        "sd": decoded(
            "sd",
            strategy="vanilla_sd",
            parameters={"num_speculative_tokens": 4},
            decode_tokens_per_second=10.0,
        ),
        "slow": decoded(
            "slow", strategy="spide", parameters={"tau": "0.9"}, decode_tokens_per_second=8.0
        ),
        "fast": decoded(
            "fast", strategy="spide", parameters={"tau": "0.5"}, decode_tokens_per_second=11.0
        ),
    }
    labels = {"SD": "sd", "SPIDE": "fast"}
    measured = SimpleNamespace(
        labels={"SD": ["sd"], "SPIDE": ["slow", "fast"]},
        entries=entries,
        label=labels.__getitem__,
        entry=lambda role: entries[labels[role]],
    )
    return SimpleNamespace(
        costs=costs, measured=lambda: measured, report=SimpleNamespace(strategies=entries)
    )


def test_steps_put_one_condition_after_the_other_in() -> None:
    """Contention, the price of a pass over several tokens, of what is outside passes, acceptance,
    and then the paper's pair and its SD."""
    costs = Costs(t_draft=0.005, t_verify=ALL, t_rest=0.005, alone=ALONE, busy=BUSY)
    values = gain_steps(made(costs), PAPER)

    def gain(
        alone: formulas.Passes,
        busy: formulas.Passes,
        rest: float,
        accepted: tuple[float, ...] = (0.6, 0.8, 0.5, 0.9),
    ) -> float:
        sd, spide = (
            zip((30, 40), accepted[:2], strict=True),
            zip((25, 50), accepted[2:], strict=True),
        )
        return sum(
            formulas.sd_seconds(tokens, alpha, 4, alone, rest) for tokens, alpha in sd
        ) / sum(
            formulas.spide_seconds(tokens, alpha, 0.5, alone, busy, rest) for tokens, alpha in spide
        )

    flat = (0.01, {1: 0.1})
    theirs = by_papers_conditions(PAPER)
    assert values == pytest.approx(
        [
            1.1,
            gain(ALONE, BUSY, 0.005),
            gain(ALONE, ALONE, 0.005),
            gain(flat, flat, 0.005),
            gain(flat, flat, 0.0),
            gain(flat, flat, 0.0, (0.9,) * 4),
            theirs,
            theirs / 0.8,
            1.5,
        ]
    )
    assert values[2] > values[1], "two models that slow each other gain less"


def test_without_timed_passes_there_are_no_steps() -> None:
    assert gain_steps(made(None), PAPER) == []
    assert gain_steps(made(Costs(t_draft=0.01, t_verify=ALONE[1], t_rest=0.0)), PAPER) == []


def test_the_papers_target_takes_as_long_over_any_number_of_tokens() -> None:
    """And s draft passes fit into its pass, not one less by rounding."""
    passes, roomy = (1.0, {1: 8.0, 32: 8.0}), (1.0, {1: 8.0 + 1e-9, 32: 8.0 + 1e-9})
    wanted = formulas.sd_seconds(256, 0.9, 6, passes) / formulas.spide_seconds(
        256, 0.9, 0.6, roomy, roomy
    )
    assert by_papers_conditions(PAPER) == pytest.approx(wanted)


def test_a_papers_pair_is_taken_from_its_tables() -> None:
    """DeepSeek on HumanEval: 8.25 accepted tokens at γ 11 are .95 a token, not 8.25 / 9.25."""
    (paper,) = papers_named("spide")
    pair = published_pair(paper, "deepseek", "code")
    assert pair._replace(alpha=round(pair.alpha, 2)) == pytest.approx(
        (0.95, 11, 0.7, 7, pair.sd_share, 4.52 / 2.79)
    )
    assert round(pair.sd_share, 2) == 0.78
    assert gain_table(paper, {}) == ""
