"""The prior weight of an acceptance table, on planted counts: it is what predicts tasks that were
not counted."""

from __future__ import annotations

import numpy as np
import pytest

from draftwell.components.calibrate.acceptance_table import build_acceptance_table
from draftwell.components.calibrate.prior_weight import (
    WEIGHTS,
    estimate_prior_weight,
    left_out_losses,
)
from draftwell.components.prompts.prompt import Prompt
from draftwell.serving.artifacts.acceptance_table import MIDPOINTS, AcceptanceTable
from draftwell.serving.artifacts.base import Provenance
from tests.support.collecting import collect_traces
from tests.support.models.tiny import table_pair

ORIGIN = Provenance(pair="tiny", fingerprint="f" * 64)
MOST = WEIGHTS[-1]


def planted(
    rates: np.ndarray, *, prompts: int = 8, tokens: int = 64, seed: int = 0
) -> tuple[np.ndarray, ...]:
    """Tokens of as many tasks as there are rates, all with C = .55, of which each task keeps its
    own share.

    Returns:
        `[n]` task, prompt, confidence and whether it was kept.
    """
    task, prompt = (
        np.repeat(np.arange(len(rates) * prompts) // per, tokens).astype(str).astype(object)
        for per in (prompts, 1)
    )
    kept = np.random.default_rng(seed).random(len(task)) < np.repeat(rates, prompts * tokens)
    return task, prompt, np.full(len(task), 0.55), kept.astype(float)


def test_counts_that_all_tasks_share_weigh_most() -> None:
    """The target keeps .85 where the draft says .55, in every task alike: a heavy prior would be
    wrong."""
    tokens = planted(np.full(12, 0.85))
    found = estimate_prior_weight(*tokens)
    assert found.basis == "12 tasks left out in turn"
    assert found.tokens < MOST
    alpha = (tokens[3].sum() + found.tokens * 0.55) / (len(tokens[3]) + found.tokens)
    assert alpha == pytest.approx(0.85, abs=0.02)


def test_counts_of_tasks_that_differ_weigh_little() -> None:
    """Rates from .15 to .95 about the draft's own .55: 6,144 tokens, that a prior of 10 tokens
    cannot resist, are twelve tasks."""
    assert estimate_prior_weight(*planted(np.linspace(0.15, 0.95, 12))).tokens == MOST


def test_tokens_of_one_task_are_not_taken_for_independent() -> None:
    """The same tokens, each of a task of its own: then the counts look certain. A likelihood over
    tokens or prompts would take that."""
    task, prompt, confidence, kept = planted(np.array([0.2, 0.2, 0.9, 0.9, 0.9, 0.9]))
    shuffled = np.random.default_rng(1).permutation(len(task))
    assert (
        estimate_prior_weight(task[shuffled], prompt, confidence, kept).tokens
        < estimate_prior_weight(task, prompt, confidence, kept).tokens
    )


def test_few_tasks_leave_the_largest_weight() -> None:
    """Four tasks that agree by chance are no proof, however many prompts they have."""
    task, prompt, confidence, kept = planted(np.full(4, 0.85), prompts=40)
    assert estimate_prior_weight(task, prompt, confidence, kept).tokens == MOST
    found = estimate_prior_weight(np.full(len(task), "chat", object), prompt, confidence, kept)
    assert (found.tokens, found.basis) == (MOST, "too few tasks (1): the largest")


def test_prompts_are_left_out_where_none_names_a_task() -> None:
    task, prompt, confidence, kept = planted(np.full(12, 0.85))
    nameless = np.full(len(task), None, object)
    found = estimate_prior_weight(nameless, prompt, confidence, kept)
    assert found.basis == "96 prompts left out in turn"
    assert found.tokens < MOST
    mixed = np.where(task == "3", None, task)
    assert (
        estimate_prior_weight(mixed, prompt, confidence, kept).basis == "19 tasks left out in turn"
    ), "11 tasks, 8 prompts without one"


def test_the_losses_are_those_of_tables_without_the_group() -> None:
    """Against tables built one by one."""
    generator = np.random.default_rng(2)
    groups, confidence, kept = (
        generator.integers(0, 5, 300),
        generator.random(300),
        (generator.random(300) < 0.6).astype(float),
    )
    losses = left_out_losses(groups, confidence, kept)
    assert losses.shape == (5, len(WEIGHTS))
    for group in range(5):
        others = groups != group
        for place, weight in enumerate(WEIGHTS):
            table = AcceptanceTable.empty().with_counts([0] * 20, [0] * 20)
            table.prior_weight = weight
            for c, k in zip(confidence[others], kept[others], strict=True):
                table.update(c, bool(k))
            alpha = np.array([table.alpha(c) for c in confidence[~others]])
            expected = -np.log(np.where(kept[~others] > 0, alpha, 1 - alpha)).sum()
            assert losses[group, place] == pytest.approx(expected)


def test_a_question_asked_many_times_is_one_prompt(tmp_path) -> None:
    """Eight ids of one text: left out one by one, the seven others would tell its answer by
    heart."""
    same = [Prompt(f"p{i}", None, ["abcab cabinet"]) for i in range(8)]
    table = build_acceptance_table(
        collect_traces(table_pair(), same, tmp_path / "t", max_tokens=48, rollout=2), ORIGIN
    )
    assert table.provenance.parameters["prior_weight_from"] == "too few prompts (1): the largest"
    assert (table.prior_weight, table.provenance.metrics["prior_weight"]) == (MOST, MOST)


def test_a_calibrated_table_keeps_its_weight(tmp_path) -> None:
    """On disk, in a copy, and where a request asks for alpha."""
    prompts = [Prompt(f"p{i}", f"task{i % 6}", [f"{chr(97 + i)}bc {i}"]) for i in range(12)]
    table = build_acceptance_table(
        collect_traces(table_pair(), prompts, tmp_path / "t", max_tokens=24, rollout=2), ORIGIN
    )
    assert table.provenance.parameters["prior_weight_from"] == "6 tasks left out in turn"
    table.save(tmp_path / "table")
    back = AcceptanceTable.load(tmp_path / "table").copy()
    assert back.prior_weight == table.prior_weight
    bin_ = max(range(20), key=lambda b: table.total[b])
    middle = MIDPOINTS[bin_]
    expected = (table.accepted[bin_] + table.prior_weight * middle) / (
        table.total[bin_] + table.prior_weight
    )
    assert back.alpha(middle) == pytest.approx(expected)
