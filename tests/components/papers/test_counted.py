"""Cells whose contenders decode many at once on the bare target, and whose passes are counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from draftwell.components.bench.bench import run_bench
from draftwell.components.bench.settings import BenchSettings
from draftwell.components.bench.target_agreement import target_logits
from draftwell.components.collect.decoding import read_text, run_all
from draftwell.components.papers import counted, runner
from draftwell.components.papers.calibrated import read_memory
from draftwell.components.papers.cell_file import CellFile
from draftwell.components.papers.cells import QUICK, Cell, Scale
from draftwell.components.papers.committed import compact
from draftwell.components.papers.page import regime_words, values_words, verdict_words
from draftwell.components.papers.plan import Run
from draftwell.components.papers.prompts import choose
from draftwell.components.papers.verdicts import Verdict
from draftwell.components.prompts.prompt import Prompt, ids_of
from draftwell.serving.artifacts.correction_memory import CorrectionMemory
from draftwell.serving.runtime.commands import Role
from draftwell.serving.runtime.strategies import (
    StrategyChoice,
    StrategyResources,
    build_strategy,
)
from tests.support.models.tiny import llama_pair, table_pair
from tests.support.papers import changed, compared, measured_cell, paper_of, tiny_cell, write_sets

TINY = Scale("tiny", prompts=3, max_tokens=12, repeats=1)
CELL = tiny_cell(
    TINY,
    "tiny-counted",
    pair="tiny",
    data="code",
    counted={"draft": 0.25},
    contenders={
        "SD": ("vanilla_sd:num_speculative_tokens=3",),
        "Lossy SD": ("lossy_sd:tau=0.01:num_speculative_tokens=3",),
    },
)
BOTH: tuple[Role, Role] = ("draft", "target")
SD, LOSSY = "vanilla_sd", "lossy_sd"
WORDS = ("the man in the inn", "ten men", "an onion", "the moon", "a mine", "ten inns", "one")


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    files = {"humaneval.jsonl": WORDS[:4], "mbpp_calib.jsonl": WORDS[4:]}
    return write_sets(tmp_path_factory.mktemp("sets"), files)


def open_pair(cells: Sequence[Cell]) -> Any:
    return llama_pair(), StrategyResources()


@pytest.fixture(scope="module")
def counts(tmp_path_factory: pytest.TempPathFactory, sets: Path) -> CellFile:
    return measured_cell(CELL, Run(tmp_path_factory.mktemp("cells"), data=sets), open_pair)


def test_counts_are_those_of_a_bench_of_one_request_at_a_time(counts: CellFile, sets: Path) -> None:
    real = run_bench(
        llama_pair(),
        CELL.choices(),
        choose("code", 3, sets).prompts,
        StrategyResources(),
        BenchSettings(max_tokens=12),
        cost_ratios=False,
    )
    assert counts.report.strategies.keys() == real.strategies.keys()
    for label, entry in real.strategies.items():
        mine = counts.report.strategies[label]
        assert mine.draft_efficiency == entry.draft_efficiency
        for one, other in zip(mine.per_prompt, entry.per_prompt, strict=True):
            assert (one.tokens, one.target_calls, one.accepted, one.judged) == (
                other.tokens,
                other.target_calls,
                other.accepted,
                other.judged,
            ), (label, one.prompt_id)
            if other.target_argmax is not None:
                assert one.target_argmax == other.target_argmax
    assert counts.cell.kind == "counted"


def test_seconds_are_passes_at_the_papers_costs(counts: CellFile) -> None:
    plain, sd = (counts.report.strategies[label].per_prompt for label in ("autoregressive", SD))
    assert [row.seconds for row in plain] == [row.tokens for row in plain]
    for row in sd:
        drafted = (row.seconds - 1 - row.target_calls) / 0.25
        assert drafted == pytest.approx(round(drafted))
        assert row.target_calls < drafted <= 3 * row.target_calls


@pytest.mark.parametrize(("parameters", "cost"), [({}, 0.125), ({"drafter": "qualifier"}, 0.375)])
def test_a_drafted_pass_costs_what_its_drafter_does(
    parameters: dict[str, Any], cost: float
) -> None:
    text = counted.Text(tokens=(1, 2), target_calls=2, draft_calls=4, argmax=2, log_likelihood=-1.0)
    cell = changed(CELL, counted={"draft": 0.125, "qualifier": 0.375})
    prompts = [Prompt("a", "code", ["the man"], reference="one")]
    choice = StrategyChoice(SD, parameters)
    entry = counted.counted_entry(cell, choice, prompts, [text], ["one man"])
    assert entry.per_prompt[0].seconds == 1 + 2 + 4 * cost


def test_the_likelihood_is_what_one_pass_over_the_text_says(sets: Path) -> None:
    pair = llama_pair()
    strategy = build_strategy(LOSSY, {"tau": 0.01}, StrategyResources())
    prompts = choose("code", 3, sets).prompts
    sampling = pair.sampling(max_tokens=12, logprobs=1)
    requests = {prompt.id: (ids_of(pair, prompt), sampling) for prompt in prompts}
    found = dict(counted.finished_texts(pair.engine(), requests, strategy))
    for key, (ids, _) in requests.items():
        text = found[key]
        rows = target_logits(pair, ids, text.tokens[:-1], keep=len(text.tokens)).float()
        chosen = rows.log_softmax(-1)[range(len(rows)), list(text.tokens)]
        assert text.log_likelihood == pytest.approx(float(chosen.sum()), abs=1e-3)
        assert text.argmax == int((rows.argmax(-1) == torch.tensor(text.tokens)).sum())


def test_a_pass_that_only_rates_is_not_counted() -> None:
    """The draft's tail that SPRINTER trusts is read for its likelihood alone."""
    pair = table_pair()
    resources = StrategyResources({"verifier": trusting()})
    strategy = build_strategy("sprinter", {"tau": 0.0, "max_run": 20}, resources)
    sampling = pair.sampling(max_tokens=10, stop_token_ids=frozenset(), seed=3)
    [plain] = run_all(pair.engine(), [([1, 2], sampling)], [strategy], 1)
    rated = pair.sampling(max_tokens=10, stop_token_ids=frozenset(), seed=3, logprobs=1)
    [(_, text)] = counted.finished_texts(pair.engine(), {"a": ([1, 2], rated)}, strategy)
    assert list(text.tokens) == plain.output
    assert text.target_calls == plain.session.stats.target_calls


def trusting() -> Any:
    from draftwell.components.train.operating_points import confidence_rule
    from tests.support.models.resources import ORIGIN

    return confidence_rule(ORIGIN)


def test_a_run_that_was_cut_short_decodes_only_what_is_missing(
    sets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the cell has more prompts by then."""
    decoded: list[str] = []
    real = counted.text_of

    def noted(job: Any, **options: Any) -> Any:
        decoded.append(job.session.text.ids)
        if len(decoded) == 5:
            raise RuntimeError("cut")
        return real(job, **options)

    monkeypatch.setattr(counted, "text_of", noted)
    run = Run(tmp_path, data=sets)
    assert runner.run_cells([CELL], run, open_pair) == {"tiny-counted": "RuntimeError: cut"}
    file = measured_cell(CELL, run, open_pair)
    assert len(decoded) == 5 + 3 * 3 - 4
    more = measured_cell(changed(CELL, prompts=4), run, open_pair)
    assert len(decoded) == 5 + 3 * 3 - 4 + 3
    for label, entry in file.report.strategies.items():
        assert more.report.strategies[label].per_prompt[:3] == entry.per_prompt


def test_plain_texts_are_shared_by_cells_of_one_target(sets: Path, tmp_path: Path) -> None:
    run = Run(tmp_path, data=sets)
    measured_cell(CELL, run, open_pair)
    other = changed(CELL, name="other", contenders={"SD": ("vanilla_sd:num_speculative_tokens=2",)})
    measured_cell(other, run, open_pair)
    assert len([*(tmp_path / "counts").glob("autoregressive-*")]) == 1
    assert len([*(tmp_path / "counts").glob("vanilla_sd-*")]) == 2


def test_a_memory_is_counted_on_the_cells_own_set(sets: Path, tmp_path: Path) -> None:
    """Of both models' first choices along the references, and CSD decodes with it."""
    pair = llama_pair(noise=0.3)
    prompt = Prompt("a", "code", ["the man"], reference="in the inn the men")
    memory = read_memory(pair, [prompt, prompt], tmp_path)
    ids = [*ids_of(pair, prompt), *pair.encode(prompt.reference or "", special=False)]
    start = len(ids_of(pair, prompt)) - 1
    first = [
        [
            int(read_text(pair.models[role], role, ids[: end + 1], 1).logits.argmax())
            for role in BOTH
        ]
        for end in range(start, len(ids))
    ]
    differ = [(draft, target) for draft, target in first if draft != target]
    assert differ
    assert sum(memory.counts.values()) == 2 * len(differ)
    assert all(memory.count(*one) == 2 * differ.count(one) for one in differ)
    cell = changed(CELL, memory="code-train", contenders={"CSD": ("csd:min_count=1:tau=0.0001",)})
    file = measured_cell(cell, Run(tmp_path / "run", data=sets), open_pair)
    assert "csd" in file.report.strategies
    assert "MBPP" in file.source


def test_a_lossy_speed_is_held_to_the_likelihood(counts: CellFile) -> None:
    """Whose interval over prompts decides whether quality is kept."""
    rows = (
        {"what": "a", "paper": "tiny.b", "metric": "speed", "role": "Lossy SD", "over": "SD"},
        {"what": "b", "metric": "log_likelihood", "role": "Lossy SD", "over": "plain"},
    )
    paper = paper_of(rows, "tiny-counted")
    speed, likelihood = compared(paper, counts)
    assert likelihood.verdict in (Verdict.KEPT, Verdict.LOST, Verdict.UNKNOWN)
    assert not speed.provisional
    assert speed.worse == likelihood.ours
    entries = counts.report.strategies
    mine, plain = (
        sum(row.log_likelihood or 0 for row in entries[label].per_prompt)
        / sum(row.tokens for row in entries[label].per_prompt)
        for label in (LOSSY, "autoregressive")
    )
    assert likelihood.ours is not None
    assert likelihood.ours.value == pytest.approx(mine - plain)
    assert values_words([likelihood]).endswith("] nats a token")
    assert values_words([speed]).endswith("]")
    assert "c 0.25 (assumed)" in regime_words("counted", {"tiny-counted": counts})


@pytest.mark.parametrize(("value", "words"), [("tiny.b", ""), ("tiny.b / tiny.b", "(no diff")])
def test_no_difference_that_is_reproduced_is_called_so(
    counts: CellFile, value: str, words: str
) -> None:
    row = {"what": "a", "paper": value, "metric": "speed", "role": "SD", "over": "plain"}
    [speed] = compared(paper_of((row,), "tiny-counted"), counts)
    said = verdict_words([replace(speed, verdict=Verdict.REPRODUCED)])
    assert said.removeprefix("reproduced ").startswith(words or "1")


def test_kept_files_have_likelihoods_and_older_cells_keep_their_settings(counts: CellFile) -> None:
    assert '"log_likelihood":' in compact(counts)
    plain = tiny_cell(TINY, "tiny-code", pair="tiny", data="code", contenders={"SD": (SD,)})
    assert not {"counted", "memory", "run_length"} & plain.settings().keys()
    assert CELL.settings()["counted"] == {"draft": 0.25}
    quick = tiny_cell(
        QUICK,
        "quick",
        pair="tiny",
        data="code",
        counted={},
        prompts=200,
        max_tokens=256,
        contenders={"SD": (SD,)},
    )
    assert (quick.prompts, quick.max_tokens) == (QUICK.prompts, QUICK.max_tokens)


@pytest.mark.parametrize(
    "wrong",
    [
        {"counted": None, "memory": "code-train"},
        {"verifiers": {"SPRINTER": "maths-train"}},
        {"replay": 3},
        {"pad_target": 2e6},
    ],
)
def test_settings_that_do_not_go_together_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="counted"):
        changed(CELL, **wrong)


@pytest.mark.slow
def test_a_verifier_and_the_confidence_meet_at_one_run_length(tmp_path: Path) -> None:
    """Slow: a verifier is trained. Both are SPRINTER with thresholds of their own, chosen on texts
    that nothing was trained on."""
    words = [f"{one} {other}" for one in WORDS for other in WORDS[:4]]
    files = {"humaneval.jsonl": WORDS[:3], "mbpp_calib.jsonl": words}
    sets = write_sets(tmp_path, files)
    cell = changed(
        CELL,
        temperature=1.0,
        verifiers={"SPRINTER": "code-train"},
        run_length=3.0,
        training_prompts=24,
        training_tokens=12,
        contenders={"SD": (SD,)},
    )
    file = measured_cell(cell, Run(tmp_path / "run", data=sets), lambda cells: noisy())
    entries = file.report.strategies
    assert {"SPRINTER", "confidence"} < entries.keys()
    assert [entries[name].strategy for name in ("SPRINTER", "confidence")] == ["sprinter"] * 2
    for name, point in file.points.items():
        assert entries[name].parameters["tau"] == str(point.threshold)
        assert point.gain[1] <= point.gain[0] <= point.gain[2]
    assert file.points["confidence"].gain == (0.0, 0.0, 0.0)
    assert CorrectionMemory.kind not in file.points


def noisy() -> Any:
    return llama_pair(noise=0.3), StrategyResources()
