"""Verifiers that are trained for a cell: SPRINTER's Table 4."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from components.papers import runner
from components.papers.asides import tried
from components.papers.cell_file import CellFile
from components.papers.cells import FULL, PLAIN, QUICK, Cell, Scale, sized
from components.papers.comparison import results
from components.papers.page import render
from components.papers.prompts import choose
from components.papers.sprinter import tables
from components.papers.tables import Paper, PaperTable, Row
from components.papers.trained import contender
from components.prompts.overlap import hash_of
from serving.artifacts.base import Provenance
from serving.artifacts.verifier import Verifier
from serving.runtime.strategies import StrategyResources
from tests.support.models.tiny import llama_pair

TINY = Scale("tiny", prompts=3, max_tokens=8, repeats=1, gammas=(1,), gammas_all=(1,), taus=(0.7,))
CELL = sized(TINY, name="tiny-transfer", pair="tiny", data="maths", temperature=1.0,
             contenders={"SD": ("vanilla_sd:num_speculative_tokens=1",)},
             verifiers={"here": "maths-train", "elsewhere": "continuation-train"}, training_prompts=4)
TEXTS = {"gsm8k_test.jsonl.gz": ("the man in the inn", "ten men", "an onion", "the end"),
         "gsm8k_train_2000.jsonl.gz": ("ten men", "one man", "ten onions", "an inn", "no one"),
         "wikitext2_train_continuation.jsonl.gz": ("in the end", "then a man", "the tin man", "the onion")}


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sets")
    for name, texts in TEXTS.items():
        (folder / name).write_bytes(gzip.compress("".join(json.dumps({"prompt": text}) + "\n" for text in texts).encode()))
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, sets: Path) -> runner.Run:
    found = runner.Run(tmp_path_factory.mktemp("cells"), data=sets)
    assert runner.run_cells([CELL], found, lambda cells: (llama_pair(), StrategyResources())) == {}
    return found


@pytest.fixture(scope="module")
def file(run: runner.Run) -> CellFile:
    return runner.measured_cells([CELL], run)["tiny-transfer"]


def test_no_prompt_is_both_learnt_from_and_decoded(run: runner.Run) -> None:
    """Though one is in both files."""
    planned = run.planned(CELL)
    assert [prompt.prompt for prompt in planned.learnt["here"].prompts] == ["ten men", "one man", "ten onions", "an inn"]
    assert [prompt.prompt for prompt in planned.chosen.prompts] == ["the man in the inn", "an onion", "the end"]


def test_shipped_prompts_are_divided() -> None:
    learnt = choose("maths-train", 64, None)
    assert len(learnt.prompts) == 6
    left = choose("maths", 64, None, without={hash_of(prompt) for prompt in learnt.prompts})
    assert not {prompt.id for prompt in left.prompts} & {prompt.id for prompt in learnt.prompts}
    assert len(left.prompts) == len(choose("maths", 64, None).prompts) - 6


def test_a_cell_is_another_one_with_other_training_prompts(run: runner.Run, sets: Path, tmp_path: Path) -> None:
    for name in TEXTS:
        (tmp_path / name).write_bytes((sets / name).read_bytes())
    path = run.planned(CELL).path
    assert runner.Run(run.folder, data=tmp_path).planned(CELL).path == path
    (tmp_path / "gsm8k_train_2000.jsonl.gz").write_bytes(gzip.compress(b"".join(b'{"prompt": "%d men"}\n' % i for i in range(4))))
    assert runner.Run(run.folder, data=tmp_path).planned(CELL).path != path


def test_each_contender_asks_its_own_verifier() -> None:
    made = Provenance(pair="tiny", fingerprint="f" * 64)
    first, second = (Verifier(torch.tensor([0.0] * 4), bias, ("scalars",), 0.5, 1.2, made) for bias in (-9.0, 9.0))
    pair, used = llama_pair(), StrategyResources({"verifier": first}, frozenset({1}))
    rejecting, accepting = (contender(pair, used, name, verifier) for name, verifier in (("first", first), ("second", second)))
    ids, sampling = pair.encode(TEXTS["gsm8k_test.jsonl.gz"][0]), pair.sampling(max_tokens=8, temperature=1.0, seed=0)
    calls = [one.generate(ids, sampling).stats.target_calls for one in (rejecting, accepting)]
    assert calls[0] > calls[1], "one that rejects everything asks the target after every token"
    assert rejecting.resources.special_tokens == frozenset({1})


def test_the_file_has_a_contender_and_an_auc_for_each(file: CellFile) -> None:
    assert list(file.report.strategies) == ["autoregressive", "vanilla_sd", "here", "elsewhere"]
    assert file.report.strategies["here"].strategy == file.report.strategies["elsewhere"].strategy == "sprinter"
    assert list(file.aucs) == ["here", "elsewhere"]
    assert set(file.aucs["here"]) == set(file.aucs["elsewhere"]) == set(file.roc)
    assert all(file.aucs["here"][ratio] == roc.auc for ratio, roc in file.roc.items())
    assert file.aucs["here"] != file.aucs["elsewhere"], "they were trained on different texts"
    assert "here: GSM8K (train), 4 prompts; elsewhere: WikiText-2 (training texts), 4 prompts" in file.source


def test_another_cell_takes_the_traces_that_are_there(run: runner.Run, file: CellFile) -> None:
    traces = sorted((run.folder / "traces").iterdir())
    assert len(traces) == 2
    before = [path.stat().st_mtime_ns for trace in traces for path in sorted(trace.rglob("*.parquet"))]
    turned = Cell.model_validate({**CELL.model_dump(), "name": "tiny-turned", "max_tokens": 6, "contenders": {"SD": ("vanilla_sd",)}})
    assert runner.run_cells([turned], run, lambda cells: (llama_pair(), StrategyResources())) == {}
    assert before == [path.stat().st_mtime_ns for trace in traces for path in sorted(trace.rglob("*.parquet"))]
    assert before
    assert sorted((run.folder / "traces").iterdir()) == traces


def test_it_is_shown(file: CellFile) -> None:
    rows = (Row("elsewhere: speed over here", 0.98, "speed", "elsewhere", "here"),
            Row("here: speed over plain", 1.5, "speed", "here", PLAIN))
    table = PaperTable("tiny-4", "Table 4: tiny", "there", "here", CELL, rows, "Because.", aucs={"1.2": 0.9})
    shown = results(table, file)
    assert [one.ours is not None for one in shown] == [True, True, True]
    assert shown[0].settings == "τ 0.5; here: τ 0.5"
    assert "| here | τ 0.5 |" in tried(file)
    assert "| elsewhere | τ 0.5 |" in tried(file)
    text = render([Paper("tiny", "Tiny paper", lambda scale: (table,))], TINY, {"tiny-transfer": file})
    assert "| AUC | λ 1" in text
    assert "| the draft's confidence |" in text
    assert "one verifier, trained for λ 1.2" not in text


def test_a_role_has_one_meaning_and_other_cells_stay_as_they_are() -> None:
    with pytest.raises(ValidationError, match="SD: a role has contenders or a verifier, not both"):
        Cell.model_validate({**CELL.model_dump(), "verifiers": {"SD": "maths-train"}})
    settings = Cell.model_validate({**CELL.model_dump(), "verifiers": {}}).settings()
    assert not {"verifiers", "training_prompts"} & set(settings)


@pytest.mark.parametrize("scale", [FULL, QUICK])
def test_the_tables_mirror_each_other(scale: Scale) -> None:
    """Each is decoded with a verifier of its own kind of text first, and the other's second; both train the same two."""
    wiki, maths = (table.cell for table in tables(scale)[1:])
    assert list(wiki.verifiers.values()) == ["continuation-train", "maths-train"]
    assert list(maths.verifiers.items()) == list(wiki.verifiers.items())[::-1]
    alike = {"name": "", "data": "", "verifiers": {}}
    assert wiki.model_copy(update=alike) == maths.model_copy(update=alike)
