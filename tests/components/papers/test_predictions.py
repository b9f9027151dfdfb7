"""What formulas predict, next to what a made report measured."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from draftwell.components.bench.schema import BenchEntry, PromptRow
from draftwell.components.papers import formulas
from draftwell.components.papers.cell_file import Costs
from draftwell.components.papers.predictions import (
    decoding_speed,
    sd_row,
    spide_rows,
)

VERIFY = {1: 0.1, 8: 0.1}
COSTS = Costs(t_draft=0.01, t_verify=VERIFY, t_rest=0.0)


def entry(prefill: float, per_token: float, tokens: int = 11, **values: object) -> BenchEntry:
    """One prompt, read in `prefill` seconds and decoded at a steady pace behind its first token."""
    seconds = prefill + (tokens - 1) * per_token
    row = PromptRow(prompt_id="a", seconds=seconds, tokens=tokens, ttft_ms=prefill * 1e3)
    return BenchEntry.model_validate(
        {"decode_tokens_per_second": 1 / per_token, "speedup": 1.0, "per_prompt": (row,), **values}
    )


def test_measured_over_predicted_leaves_the_prompts_reading_out() -> None:
    """With an engine that reaches the formula exactly the share is 100 %, however long the prompt
    took."""
    alpha, gamma = 0.8, 4
    predicted = formulas.sd_speedup(alpha, gamma, VERIFY[1], COSTS.t_draft, VERIFY)
    plain = entry(5.0, 0.1)
    sd = entry(
        5.0,
        0.1 / predicted,
        acceptance_rate=alpha,
        parameters={"num_speculative_tokens": gamma},
        strategy="vanilla_sd",
    )
    row = sd_row("vanilla_sd", sd, plain, COSTS)
    assert row is not None
    assert (row.share, row.measured) == pytest.approx((1.0, predicted))


def test_leviathans_formula_is_over_plain_decoding_with_all_cores() -> None:
    """As the measured speed next to it is: on one of two cores the target's pass takes longer, and
    so does the best that SD can do."""
    alpha, gamma = 0.8, 4
    costs = Costs(t_draft=0.01, t_verify=VERIFY, t_rest=0.0, alone=(0.02, {1: 0.2, 8: 0.2}))
    ideal = formulas.leviathan_speedup(alpha, gamma, 0.1)
    values = {
        "acceptance_rate": alpha,
        "parameters": {"num_speculative_tokens": gamma},
        "strategy": "vanilla_sd",
    }
    rows = [
        sd_row("vanilla_sd", entry(5.0, 0.05, split_cores=split, **values), entry(5.0, 0.1), costs)
        for split in (False, True)
    ]
    assert [row and row.ideal for row in rows] == pytest.approx([ideal, ideal / 2])


def test_a_draft_whose_passes_nobody_measured_is_not_predicted() -> None:
    values = {"acceptance_rate": 0.8, "strategy": "vanilla_sd"}
    by = {
        drafter: entry(5.0, 0.05, parameters={"drafter": drafter}, **values)
        for drafter in ("draft", "qualifier")
    }
    assert [sd_row("vanilla_sd", sd, entry(5.0, 0.1), COSTS) is None for sd in by.values()] == [
        False,
        True,
    ]


def test_spide_is_predicted_text_by_text() -> None:
    """With its own acceptance and length each: two texts of .2 and .95 are not two of their
    mean."""
    costs = Costs(
        t_draft=0.01,
        t_verify=VERIFY,
        t_rest=0.0,
        alone=(0.01, VERIFY),
        busy=(0.02, {1: 0.11, 8: 0.15}),
    )
    kept, tokens = {"SD": (4, 18), "SPIDE": (3, 19)}, (31, 61)

    def decoded(role: str, **values: object) -> BenchEntry:
        rows = tuple(
            PromptRow(
                prompt_id=str(i),
                seconds=1.0,
                tokens=tokens[i],
                ttft_ms=1.0,
                accepted=kept[role][i],
                judged=20,
            )
            for i in (0, 1)
        )
        return BenchEntry.model_validate(
            {
                "decode_tokens_per_second": 1.0,
                "speedup": 1.0,
                "acceptance_rate": 0.55,
                **values,
                "per_prompt": rows,
            }
        )

    entries = {
        "SD": decoded("SD", strategy="vanilla_sd", parameters={"num_speculative_tokens": 4}),
        "SPIDE": decoded("SPIDE", strategy="spide", parameters={"tau": "0.7"}),
        "serial": decoded(
            "SPIDE", strategy="spide", parameters={"tau": "0.7", "parallel": "false"}
        ),
    }
    measured = SimpleNamespace(labels={"SD": ["SD"]}, entry=entries.__getitem__)
    file = SimpleNamespace(measured=lambda: measured, report=SimpleNamespace(strategies=entries))
    slow = sum(
        formulas.sd_seconds(left, alpha, 4, costs.alone) for left, alpha in ((30, 0.2), (60, 0.9))
    )
    fast = sum(
        formulas.spide_seconds(left, alpha, 0.7, costs.alone, costs.busy)
        for left, alpha in ((30, 0.15), (60, 0.95))
    )
    (row,) = spide_rows(file, costs)
    assert (row.engine, row.over, row.measured) == ("SPIDE", "SD", 1.0)
    assert row.predicted == pytest.approx(slow / fast)
    assert row.predicted != pytest.approx(
        formulas.sd_seconds(90, 0.55, 4, costs.alone)
        / formulas.spide_seconds(90, 0.55, 0.7, costs.alone, costs.busy),
        rel=0.02,
    )


def test_speed_of_decoding_is_unknown_where_nothing_was_decoded() -> None:
    plain = entry(5.0, 0.1)
    assert decoding_speed(plain, plain) == pytest.approx(1.0)
    assert (
        decoding_speed(plain.model_copy(update={"decode_tokens_per_second": None}), plain) is None
    )
