"""Verifiers that are trained for a cell: SPRINTER's Table 4."""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from draftwell.components.bench.runner import StrategyContender
from draftwell.components.collect.collect import collect_traces
from draftwell.components.collect.settings import CollectionSettings
from draftwell.components.papers import runner, verifiers
from draftwell.components.papers.cell_file import CellFile
from draftwell.components.papers.cells import FULL, QUICK, Cell, Scale
from draftwell.components.papers.plan import Run
from draftwell.components.papers.prompts import choose
from draftwell.components.papers.tables import papers_named
from draftwell.components.prompts.overlap import hash_of
from draftwell.components.train.examples import read_examples
from draftwell.components.train.verifier import train_verifier
from draftwell.serving.artifacts.verifier import Verifier
from draftwell.serving.runtime.strategies import StrategyResources
from tests.support.models.tiny import llama_pair
from tests.support.papers import changed, compared, paper_of, tiny_cell, write_sets

pytestmark = pytest.mark.slow

TINY = Scale("tiny", prompts=3, max_tokens=8, repeats=1)
CELL = tiny_cell(
    TINY,
    "tiny-transfer",
    pair="tiny",
    data="maths",
    temperature=1.0,
    contenders={"SD": ("vanilla_sd:num_speculative_tokens=1",)},
    verifiers={"here": "maths-train", "elsewhere": "continuation-train"},
    training_prompts=4,
    training_tokens=48,
)
TEXTS = {
    "gsm8k_test.jsonl.gz": ("the man in the inn", "ten men", "no one else", "an onion", "the end"),
    "gsm8k_train_2000.jsonl.gz": ("ten men", "one man", "ten onions", "an inn", "no one"),
    "wikitext2_train_continuation.jsonl.gz": (
        "in the end",
        "then a man",
        "the tin man",
        "no one else",
    ),
}


def opened(cells: Sequence[Cell]) -> Any:
    return llama_pair(), StrategyResources()


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sets(tmp_path_factory.mktemp("sets"), TEXTS)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, sets: Path) -> Run:
    found = Run(tmp_path_factory.mktemp("cells"), data=sets)
    assert runner.run_cells([CELL], found, opened) == {}
    return found


@pytest.fixture(scope="module")
def file(run: Run) -> CellFile:
    return runner.measured_cells([CELL], run)["tiny-transfer"]


def test_no_prompt_is_both_learnt_from_and_decoded(run: Run) -> None:
    """Though two are in other files, too."""
    planned = run.planned(CELL)
    assert [prompt.prompt for prompt in planned.training["here"].prompts] == [
        "ten men",
        "one man",
        "ten onions",
        "an inn",
    ]
    assert [prompt.prompt for prompt in planned.training["elsewhere"].prompts] == [
        "in the end",
        "then a man",
        "the tin man",
        "no one else",
    ]
    assert [prompt.prompt for prompt in planned.chosen.prompts] == [
        "the man in the inn",
        "an onion",
        "the end",
    ]


def test_shipped_prompts_are_divided() -> None:
    learnt = choose("maths-train", 64, None)
    assert len(learnt.prompts) == 6
    left = choose("maths", 64, None, without={hash_of(prompt) for prompt in learnt.prompts})
    assert not {prompt.id for prompt in left.prompts} & {prompt.id for prompt in learnt.prompts}
    assert len(left.prompts) == len(choose("maths", 64, None).prompts) - 6


def test_a_cell_is_another_one_with_other_training_prompts(
    run: Run, sets: Path, tmp_path: Path
) -> None:
    path = run.planned(CELL).path
    for other in list(TEXTS)[1:]:
        for name in TEXTS:
            (tmp_path / name).write_bytes((sets / name).read_bytes())
        assert Run(run.folder, data=tmp_path).planned(CELL).path == path
        (tmp_path / other).write_bytes(
            gzip.compress(b"".join(b'{"prompt": "%d men"}\n' % i for i in range(4)))
        )
        assert Run(run.folder, data=tmp_path).planned(CELL).path != path
    fewer = changed(CELL, training_prompts=3)
    assert run.planned(fewer).path != path


def test_they_learn_from_three_kinds_of_text_and_are_tested_on_the_targets(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All drawn at the cell's temperature; what is tested on are the prompts that are decoded, not
    some that are held out."""
    collected, tested = list[tuple[list[str], CollectionSettings]](), list[list[str]]()

    def collect(pair: Any, prompts: Any, folder: Path, settings: CollectionSettings) -> Any:
        collected.append(([prompt.prompt for prompt in prompts], settings))
        return collect_traces(pair, prompts, folder, settings)

    def train(*given: Any, test: Any) -> Any:
        tested.append(sorted(set(read_examples(test).prompt.tolist())))
        return train_verifier(*given, test=test)

    monkeypatch.setattr(verifiers, "collect_traces", collect)
    monkeypatch.setattr(verifiers, "train_verifier", train)
    planned = run.planned(CELL)
    found, _ = verifiers.trained_verifiers(
        CELL,
        llama_pair(),
        {role: one.prompts for role, one in planned.training.items()},
        planned.chosen.prompts,
        tmp_path,
    )
    assert [texts[0] for texts, _ in collected] == ["the man in the inn", "ten men", "in the end"]
    assert [settings.prefix_kinds for _, settings in collected] == [
        ("target",),
        *2 * [("draft", "mixed", "target")],
    ]
    assert [settings.max_tokens for _, settings in collected] == [64, 48, 48]
    assert {settings.temperature for _, settings in collected} == {1.0}
    assert tested == 2 * [sorted(prompt.id for prompt in planned.chosen.prompts)]
    assert found["here"].bias != found["elsewhere"].bias
    assert {one.ratio for one in found.values()} == {1.2}


def test_the_bench_gets_a_contender_for_each_role(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the verifier that was trained for it, not the first one twice, and nothing else of its
    own."""
    made, used = dict[str, Verifier](), dict[str, Any]()

    def train(*given: Any) -> Any:
        found = verifiers.trained_verifiers(*given)
        made.update(found[0])
        return found

    class Noted(StrategyContender):
        def __init__(self, pair: Any, resources: Any, choice: Any, label: str):
            used[label] = resources
            super().__init__(pair, resources, choice, label)

    monkeypatch.setattr(runner, "trained_verifiers", train)
    monkeypatch.setattr(runner, "StrategyContender", Noted)
    cell = changed(CELL, name="tiny-again", max_tokens=4)
    given = llama_pair(), StrategyResources({}, frozenset({1}))
    assert runner.run_cells([cell], run, lambda cells: given) == {}
    assert list(used) == ["here", "elsewhere"]
    for role, resources in used.items():
        assert resources.artifacts["verifier"] is made[role]
        assert resources.special_tokens == frozenset({1})


def test_the_file_has_a_contender_and_an_auc_for_each(file: CellFile) -> None:
    assert list(file.report.strategies) == ["autoregressive", "vanilla_sd", "here", "elsewhere"]
    assert (
        file.report.strategies["here"].strategy
        == file.report.strategies["elsewhere"].strategy
        == "sprinter"
    )
    assert set(file.aucs) == {"here", "elsewhere", "confidence"}
    assert set(file.aucs["here"]) == set(file.aucs["elsewhere"]) == set(file.aucs["confidence"])
    assert file.aucs["here"] != file.aucs["elsewhere"], "they were trained on different texts"
    assert (
        "here: GSM8K (train), 4 prompts; elsewhere: WikiText-2 (training texts), 4 prompts"
        in file.source
    )


def test_another_cell_takes_the_traces_that_are_there(run: Run, file: CellFile) -> None:
    traces = sorted((run.folder / "traces").iterdir())
    assert len(traces) == 3, "of each verifier, and one that both are tested on"
    before = [
        path.stat().st_mtime_ns for trace in traces for path in sorted(trace.rglob("*.parquet"))
    ]
    turned = changed(CELL, name="tiny-turned", max_tokens=6, contenders={"SD": ("vanilla_sd",)})
    assert runner.run_cells([turned], run, opened) == {}
    assert before == [
        path.stat().st_mtime_ns for trace in traces for path in sorted(trace.rglob("*.parquet"))
    ]
    assert before
    assert sorted((run.folder / "traces").iterdir()) == traces
    warmer = changed(turned, temperature=1.5)
    assert runner.run_cells([warmer], run, opened) == {}
    assert len(list((run.folder / "traces").iterdir())) == 6, "texts of another temperature"


def test_it_is_shown(file: CellFile) -> None:
    rows = (
        {"what": "a", "metric": "speed", "role": "elsewhere", "over": "here"},
        {"what": "b", "metric": "auc", "role": "elsewhere", "at": "1.2", "neutral": None},
        {"what": "c", "metric": "auc", "role": "elsewhere", "at": "9", "neutral": None},
    )
    speed, ranked, unknown = compared(paper_of(rows, "tiny-transfer"), file)
    assert speed.settings == "τ 0.5; here: τ 0.5"
    assert speed.lost is not None
    assert ranked.ours is not None
    assert tuple(ranked.ours) == file.aucs["elsewhere"]["1.2"]
    assert unknown.ours is None


def test_a_role_has_one_meaning_and_other_cells_stay_as_they_are() -> None:
    with pytest.raises(ValidationError, match="SD: a role has contenders or a verifier, not both"):
        changed(CELL, verifiers={"SD": "maths-train"})
    settings = changed(CELL, verifiers={}, training_prompts=0, training_tokens=64).settings()
    assert not {"verifiers", "training_prompts", "training_tokens"} & set(settings)
    full = changed(CELL, training_tokens=64).settings()
    assert "training_tokens" not in full, "the kept cells are from before it could be set"


def test_their_pair_has_a_slot_for_every_text() -> None:
    plain = changed(CELL, verifiers={})
    assert (CELL.collects, plain.collects) == (True, False)
    assert runner.needs(CELL) != runner.needs(plain)


@pytest.mark.parametrize("scale", [FULL, QUICK])
def test_the_tables_mirror_each_other(scale: Scale) -> None:
    """Each is decoded with a verifier of its own kind of text first, and the other's second; both
    train the same two."""
    (paper,) = papers_named("sprinter")
    _, wiki, maths, *_ = paper.measured_in(scale).values()
    assert list(wiki.verifiers.values()) == ["continuation-train", "maths-train"]
    assert list(maths.verifiers.items()) == list(wiki.verifiers.items())[::-1]
    alike = {"name": "", "data": "", "verifiers": {}}
    assert wiki.model_copy(update=alike) == maths.model_copy(update=alike)
