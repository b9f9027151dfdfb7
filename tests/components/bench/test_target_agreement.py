"""Agreement with the target in numbers worked out by hand, and the report that holds every figure
of quality."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from draftwell.components.bench.answers import checks as task_checks
from draftwell.components.bench.answers.accuracy import checked, paired_difference, task_accuracy
from draftwell.components.bench.answers.sandbox import SandboxUnavailable
from draftwell.components.bench.bench import run_bench
from draftwell.components.bench.metrics import BenchMetrics
from draftwell.components.bench.report.tables import bench_markdown
from draftwell.components.bench.runner import measure
from draftwell.components.bench.schema import BenchReport
from draftwell.components.bench.settings import BenchSettings
from draftwell.components.bench.target_agreement import (
    TargetAgreement,
    agreement,
    agreements,
)
from draftwell.components.prompts.prompt import Prompt
from draftwell.serving.runtime.pair import LoadedPair
from draftwell.serving.runtime.strategies import StrategyChoice
from tests.support.bench_reports import ENTRY, REPORT
from tests.support.models.resources import table_resources
from tests.support.models.tiny import VOCAB, table_pair

PROMPT = [5, 6]


def greedy(table: torch.Tensor, last: int, length: int) -> list[int]:
    """What a table of order 1 says behind a token."""
    output = []
    for _ in range(length):
        last = int(table[last].argmax())
        output.append(last)
    return output


def test_greedy_outputs_of_the_target_diverge_by_nothing() -> None:
    pair = table_pair()
    output = greedy(pair.models["target"].table, PROMPT[-1], 6)
    assert agreement(pair, PROMPT, output) == TargetAgreement(6, 6, 0.0)
    assert agreement(pair, PROMPT, []) == TargetAgreement(0, 0, 0.0)


def test_at_temperature_zero_it_is_the_excess_surprisal_on_own_prefixes() -> None:
    pair = table_pair()
    table = pair.models["target"].table
    output = greedy(table, PROMPT[-1], 3)
    output[1] = (output[1] + 1) % VOCAB  # from here on the prefixes are the output's own
    output.append(7)
    log_probs = table.log_softmax(-1)
    behind = [PROMPT[-1], *output[:-1]]
    expected = sum(
        float(log_probs[a].max() - log_probs[a, b]) for a, b in zip(behind, output, strict=True)
    )
    found = agreement(pair, PROMPT, output)
    assert found.divergence == pytest.approx(expected, abs=1e-5)
    assert found.divergence > 0
    assert (
        found.matches
        == sum(int(table[a].argmax()) == b for a, b in zip(behind, output, strict=True))
        < 4
    )


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_of_samples_it_is_zero_in_expectation_for_the_target_and_the_divergence_plus_entropies_for_others(  # noqa: E501
    temperature: float,
) -> None:
    pair = table_pair()
    logits = pair.models["target"].table[PROMPT[-1]]
    target = (logits / temperature).softmax(-1)
    each = torch.tensor(
        [agreement(pair, PROMPT, [token], temperature).divergence for token in range(VOCAB)]
    )
    assert float((target * each).sum()) == pytest.approx(0, abs=1e-5)
    other = pair.models["draft"].table[PROMPT[-1]].softmax(-1)
    divergence = float((other * (other / target).log()).sum())
    entropies = float(torch.special.entr(other).sum() - torch.special.entr(target).sum())
    assert float((other * each).sum()) == pytest.approx(divergence + entropies, abs=1e-4)
    # a reader of the distribution at temperature 1 would call a lossless strategy lossy
    if temperature != 1:
        wrong = torch.tensor(
            [agreement(pair, PROMPT, [token], 1.0).divergence for token in range(VOCAB)]
        )
        assert abs(float((target * wrong).sum())) > 0.05


def test_texts_add_up_by_their_tokens() -> None:
    pair = table_pair()
    outputs = [[3, 4, 5], [6], []]
    parts = [agreement(pair, PROMPT, output) for output in outputs]
    total = sum(agreements(pair, [PROMPT] * 3, outputs), TargetAgreement(0, 0, 0.0))
    assert total.tokens == 4
    assert total.kl == pytest.approx(sum(part.divergence for part in parts) / 4)
    assert total.share == sum(part.matches for part in parts) / 4
    assert (TargetAgreement(0, 0, 0.0).kl, TargetAgreement(0, 0, 0.0).share) == (None, None)


# Token i is read as the letter chr(97 + i), so 3 says "d" and 4 says "e".
LETTER = [
    Prompt(f"p{i}", "letters", ["abc"], fields={"answer_key": "A", "choices": ["d", "e"]})
    for i in range(4)
]
PLAIN = Prompt("q", "chat", ["abc"], "d e")


def judged(
    pair: LoadedPair, prompts: list[Prompt], outputs: list[list[int]], reference: list[list[int]]
) -> dict[str, Any]:
    """What a bench says of a lossy strategy that wrote these outputs, where plain decoding wrote
    the reference."""
    measured = measure(
        pair,
        table_resources(vocab=VOCAB),
        [StrategyChoice("autoregressive"), StrategyChoice("csd")],
        prompts,
        BenchSettings(max_tokens=1, warmup=False),
    )
    for name, texts in (("autoregressive", reference), ("csd", outputs)):
        measured[name].runs = [
            [replace(run, tokens=tokens) for run in runs]
            for runs, tokens in zip(measured[name].runs, texts, strict=True)
        ]
    return BenchMetrics(pair, prompts, measured).quality(measured["csd"])


def test_every_figure_is_in_one_place() -> None:
    pair = table_pair()
    prompts, outputs = [*LETTER, PLAIN], [[3], [3], [4], [3], [3, 4]]
    found = judged(pair, prompts, outputs, [[3], [4], [4], [4], [4]])
    sums = sum(
        agreements(pair, [pair.encode_prompt("abc")] * 5, outputs), TargetAgreement(0, 0, 0.0)
    )
    assert (found["target_argmax_share"], found["kl"]) == (sums.share, sums.kl)
    assert found["rouge_l"] is not None
    assert set(found["tasks"]) == {"letters"}, "nothing tells whether a chat is right"
    letters = found["tasks"]["letters"]
    assert (letters["accuracy"], letters["count"], letters["note"]) == (0.75, 4, None)
    assert letters["difference"] == 0.5
    assert letters["low"] < letters["difference"] < letters["high"]
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_what_cannot_be_had_is_none() -> None:
    found = judged(table_pair(), [PLAIN, LETTER[0]], [[], []], [[], []])
    assert (found["target_argmax_share"], found["kl"]) == (None, None)
    prompts = [PLAIN, LETTER[0]]
    alone = task_accuracy(prompts, checked(prompts, ["", ""]))
    assert found["tasks"]["letters"]["accuracy"] == 0.0
    assert alone["letters"] == {
        "accuracy": 0.0,
        "count": 1,
        "difference": None,
        "low": None,
        "high": None,
        "note": None,
    }
    assert judged(table_pair(), [LETTER[0]], [[3]], [[3]])["rouge_l"] is None


def test_a_machine_without_a_sandbox_says_so_and_claims_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(code: str, *, seconds: float) -> None:
        raise SandboxUnavailable("not here")

    monkeypatch.setattr(task_checks, "run_python", refuse)
    prompts = [Prompt("c", "code", ["abc"], fields={"test_list": ["assert f() == 1"]}), LETTER[0]]
    answers = checked(prompts, ["def f(): return 1", "d"])
    assert answers == ["not here", True]
    tasks = task_accuracy(prompts, answers, answers)
    assert tasks["code"] == {
        "accuracy": None,
        "count": 1,
        "difference": None,
        "low": None,
        "high": None,
        "note": "not here",
    }
    assert tasks["letters"]["accuracy"] == 1.0


def test_an_interval_is_never_a_point_and_shrinks_with_prompts() -> None:
    wrong = [False] * 8
    difference, low, high = paired_difference(wrong, wrong)
    assert difference == 0
    assert low < -0.1
    assert high > 0.1, "eight wrong answers on both sides decide nothing"
    _, narrow, _ = paired_difference(wrong * 50, wrong * 50)
    assert low < narrow < 0


def test_a_difference_is_paired_and_turns_round_with_its_sides() -> None:
    ours, theirs = [True, True, True, False, False, True], [True, False, False, False, True, True]
    difference, low, high = paired_difference(ours, theirs)
    assert difference == pytest.approx(1 / 6)
    # by hand: half a prompt more in each cell gives b = 2.5, c = 1.5, n = 8
    reach = 1.6448536 * math.sqrt(4 - 1 / 8) / 8
    assert (low, high) == (pytest.approx(1 / 8 - reach), pytest.approx(1 / 8 + reach))
    assert paired_difference(theirs, ours) == (
        pytest.approx(-difference),
        pytest.approx(-high),
        pytest.approx(-low),
    )
    same = [True, False] * 20
    assert paired_difference(same, same)[2] < 0.1, "equal answers are nearer than equal rates"


def test_the_bench_says_how_far_lossy_strategies_leave_the_target() -> None:
    prompts = [
        Prompt(f"p{i}", "letters", [text], fields={"answer_key": "A", "choices": ["d", "e"]})
        for i, text in enumerate(["abcab cabinet", "hello hello", "zebra"])
    ]
    configs = [
        StrategyChoice("vanilla_sd"),
        StrategyChoice("csd", {"use_memory": False, "tau": 1e-6}),
    ]
    report = run_bench(
        table_pair(), configs, prompts, table_resources(vocab=VOCAB), BenchSettings(max_tokens=24)
    ).to_json()
    csd, exact = report["strategies"]["csd"], report["strategies"]["vanilla_sd"]
    assert csd["target_argmax_share"] < 1
    assert csd["kl"] > 0
    assert csd["tasks"]["letters"]["count"] == 3
    assert csd["tasks"]["letters"]["difference"] is not None
    assert (exact["kl"], exact["tasks"]) == (None, {})
    text = bench_markdown(BenchReport.model_validate(report))
    assert f"| {csd['kl']:.3f} |" in text
    assert "### Right answers" in text


def test_tables_of_older_reports_still_stand() -> None:
    report = {**REPORT, "machine": {**REPORT["machine"], "commit": None}, "headlines": []}
    text = bench_markdown(BenchReport.model_validate(report))
    assert "### Right answers" not in text
    task = {
        "accuracy": None,
        "count": 2,
        "difference": None,
        "low": None,
        "high": None,
        "note": "no sandbox",
    }
    csd = {**ENTRY, "lossless": False, "near_ties": 0, "tasks": {"code": task}}
    text = bench_markdown(
        BenchReport.model_validate({**report, "strategies": {"csd": csd}, "peers": {}})
    )
    rows = text.partition("### Right answers")[2].splitlines()
    rows = [row for row in rows if row.startswith("|")]
    assert len({row.count("|") for row in rows}) == 1
    assert rows[-1] == "| csd | code | 2 | – | – | no sandbox |"
