"""Cells: measured once, resumed, measured again where settings differ, and compared on a page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from draftwell.components.bench.bench import run_bench
from draftwell.components.bench.runner import Generation, StrategyContender
from draftwell.components.papers import runner
from draftwell.components.papers.cell_file import CellFile, read_cell
from draftwell.components.papers.cells import QUICK, Cell, Scale
from draftwell.components.papers.csv_files import write_csv
from draftwell.components.papers.estimates import Estimate, estimate
from draftwell.components.papers.page import Shown, paper_page, summary_page
from draftwell.components.papers.plan import MadeOf, Run
from draftwell.components.papers.verdicts import Verdict
from draftwell.serving.artifacts.acceptance_table import AcceptanceTable
from draftwell.serving.artifacts.base import Provenance
from draftwell.serving.artifacts.hardware_profile import (
    HardwareProfile,
    RequestTimes,
    RoundOverheads,
)
from draftwell.serving.artifacts.verifier import Verifier
from draftwell.serving.errors import DraftwellError
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.strategies import StrategyResources
from tests.support.models.tiny import llama_pair
from tests.support.papers import (
    changed,
    compared,
    measured_cell,
    paper_of,
    tiny_cell,
    with_costs,
    with_entry,
    write_sets,
)

TINY = Scale("tiny", prompts=3, max_tokens=8, repeats=1)
CELL = tiny_cell(
    TINY,
    "tiny-code",
    pair="tiny",
    pad_target=2e6,
    data="code",
    contenders={
        "SD": (
            "vanilla_sd@1+1:num_speculative_tokens=1",
            "vanilla_sd@1+1:num_speculative_tokens=3",
        ),
        "SPIDE": ("spide@1+1:tau=0.7",),
    },
)


def resources() -> StrategyResources:
    made = Provenance(pair="tiny", fingerprint="f" * 64)
    times = RequestTimes(
        t_draft={1: 0.001},
        prefill={},
        per_context_token={},
        context=8,
        split_alone=(0.001, {1: 0.004, 8: 0.006}),
        rest=RoundOverheads(round=0.0, token=0.0, figure=0.0),
    )
    profile = HardwareProfile(
        0.001, {1: 0.004, 8: 0.006}, 0.0005, made, (0.002, {1: 0.006, 8: 0.008}), details=times
    )
    return StrategyResources(
        {"acceptance_table": AcceptanceTable.empty(), "hardware_profile": profile}
    )


def row(what: str, metric: str = "speed", role: str = "SPIDE", **more: Any) -> dict[str, Any]:
    return {"what": what, "metric": metric, "role": role, "paper": "tiny.a", **more}


ROWS = (
    row("SD over plain", role="SD", over="plain", claim="fast"),
    row("SPIDE: target calls over SD's", "calls", over="SD"),
    row("SD: accepted / drafted", "efficiency", "SD", neutral=None),
)


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data sets of prompts that fit the tiny pair's context."""
    folder = tmp_path_factory.mktemp("sets")
    texts = ("the man in the inn", "ten men", "an onion", "the end")
    return write_sets(folder, dict.fromkeys(("humaneval.jsonl", "gsm8k_test.jsonl.gz"), texts))


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory, sets: Path) -> tuple[Path, CellFile]:
    folder = tmp_path_factory.mktemp("cells")
    run = Run(folder, data=sets)
    return folder, measured_cell(CELL, run, opened)


def opened(cells: Sequence[Cell]) -> Any:
    return llama_pair(), resources()


def refuse(cells: Sequence[Cell]) -> Any:
    raise AssertionError("nothing was to be measured")


def test_a_second_run_measures_nothing(measured: tuple[Path, CellFile], sets: Path) -> None:
    folder, _ = measured
    said: list[str] = []
    assert runner.run_cells([CELL], Run(folder, data=sets), refuse, say=said.append) == {}
    assert said == ["[1/1] tiny-code: measured before"]


@pytest.mark.parametrize(
    "settings", [{"max_tokens": 9}, {"prompts": 2}, {"seed": 1}, {"pad_target": None}]
)
def test_other_settings_are_another_cell(
    measured: tuple[Path, CellFile], sets: Path, settings: dict[str, Any]
) -> None:
    folder, _ = measured
    other = changed(CELL, **settings)
    assert runner.measured_cells([other], Run(folder, data=sets)) == {}


def test_each_prompt_is_decoded_with_so_many_seeds(
    tmp_path: Path, sets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = changed(CELL, prompts=2, seeds=3, temperature=0.7)
    seeds: dict[str, list[int]] = {}
    generate = StrategyContender.generate

    def noting(self: StrategyContender, ids: Sequence[int], sampling: Sampling) -> Generation:
        seeds.setdefault(self.label, []).append(sampling.seed)
        return generate(self, ids, sampling)

    monkeypatch.setattr(StrategyContender, "generate", noting)
    run = Run(tmp_path, data=sets)
    file = measured_cell(cell, run, opened)
    assert all(each[1:] == [0, 1, 2, 3, 4, 5] for each in seeds.values()), "behind the warm-up"
    assert file.report.prompt_ids == ("line-1", "line-2") * 3
    page = paper_page(Shown([paper_of(ROWS)], TINY, {"tiny-code": file}), paper_of(ROWS), {})
    assert "| 2 × 3 seeds, " in page


def test_a_cell_with_sprinter_has_the_roc_of_its_verifier(tmp_path: Path, sets: Path) -> None:
    cell = changed(CELL, temperature=1.0, contenders={"SPRINTER": ("sprinter:tau=0.5",)})
    verifier = Verifier(
        torch.tensor([1.0, 1.0, 0.0, 0.0]),
        0.0,
        ("scalars",),
        0.5,
        1.2,
        Provenance(pair="tiny", fingerprint="f" * 64),
    )
    used = StrategyResources({**resources().artifacts, "verifier": verifier})
    run = Run(tmp_path, data=sets)
    file = measured_cell(cell, run, lambda cells: (llama_pair(), used))
    assert {role: set(found) for role, found in file.aucs.items()} == {
        role: {"1", "1.2", "1.5"} for role in ("verifier", "confidence")
    }
    rows = (
        row("AUC", "auc", "verifier", at="1.2", neutral=None),
        row("AUC of the confidence", "auc", "confidence", at="1.2", neutral=None),
        row("SPRINTER over plain", role="SPRINTER", over="plain"),
    )
    verifiers, confidence, speed = compared(paper_of(rows), file)
    assert verifiers.ours == Estimate(*file.aucs["verifier"]["1.2"])
    assert confidence.ours == Estimate(*file.aucs["confidence"]["1.2"])
    assert speed.lost is not None, "what a lossy method loses stands beside its speed"


def test_seeds_are_of_samples_and_leave_other_cells_as_they_are() -> None:
    assert "seeds" not in CELL.settings()
    with pytest.raises(ValidationError, match="the same with every seed"):
        changed(CELL, seeds=2)


def test_what_was_measured_elsewhere_is_measured_again(
    measured: tuple[Path, CellFile], sets: Path
) -> None:
    folder, _ = measured
    assert runner.measured_cells([CELL], Run(folder, "float32 on cuda", sets)) == {}


def test_other_weights_or_artifacts_are_another_cell(
    measured: tuple[Path, CellFile], sets: Path
) -> None:
    """The file says what was read, and a file of other artifacts, or of another pair's weights, is
    not taken for it."""
    folder, _ = measured
    one, two = MadeOf("f0", {"verifier": "d1"}), MadeOf("f0", {"verifier": "d2"})
    assert runner.measured_cells([CELL], Run(folder, data=sets, made_of=lambda cell: one)) == {}
    keys = {
        CELL.key("", "", made.digests)
        for made in (one, two, MadeOf("f1", {"verifier": "d1"}), MadeOf("f0"))
    }
    assert len(keys) == 4


def test_a_cell_without_any_file_asks_for_no_pair(tmp_path: Path, sets: Path) -> None:
    """Rendering a page must not fetch models of cells that were never measured."""

    def fetch(cell: Cell) -> MadeOf:
        raise AssertionError("the pair was fetched")

    assert runner.measured_cells([CELL], Run(tmp_path, data=sets, made_of=fetch)) == {}


def test_a_broken_file_is_measured_again(
    measured: tuple[Path, CellFile], tmp_path: Path, sets: Path
) -> None:
    folder, _ = measured
    path = next(folder.glob("*.json"))
    (tmp_path / path.name).write_text(path.read_text()[:100])
    run = Run(tmp_path, data=sets)
    assert runner.measured_cells([CELL], run) == {}
    assert runner.run_cells([CELL], run, opened) == {}
    assert list(runner.measured_cells([CELL], run)) == ["tiny-code"]


def test_a_cell_that_fails_is_named_and_the_others_are_measured(tmp_path: Path, sets: Path) -> None:
    broken = CELL.model_copy(update={"name": "broken", "pair": "a-broken-one"})

    def one_is_missing(cells: Sequence[Cell]) -> Any:
        if cells[0].name == "broken":
            raise DraftwellError("no such pair", code="unknown_pair")
        return opened(cells)

    run = Run(tmp_path, data=sets)
    assert runner.run_cells([broken, CELL], run, one_is_missing) == {"broken": "no such pair"}
    assert list(runner.measured_cells([broken, CELL], run)) == ["tiny-code"]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("no kernel\nat line 3"), "RuntimeError: no kernel"),
        (MemoryError(), "MemoryError"),
        (KeyError("a"), "KeyError: 'a'"),
    ],
)
def test_whatever_happens_in_a_cell_is_its_failure_alone(
    tmp_path: Path, sets: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str
) -> None:
    """Six hours of cells must not end with one; a pair that something unknown happened to is loaded
    again."""
    cells = [CELL.model_copy(update={"name": f"tiny-{name}"}) for name in ("a", "b")]
    loaded, seen = list[str](), list[dict[str, str]]()

    def breaks(*arguments: Any, **options: Any) -> Any:
        if len(loaded) == 1:
            raise error
        return run_bench(*arguments, **options)

    def noted(together: Sequence[Cell]) -> Any:
        loaded.append(together[0].name)
        return opened(together)

    monkeypatch.setattr(runner, "run_bench", breaks)
    run = Run(tmp_path, data=sets)
    assert runner.run_cells(cells, run, noted, after=lambda failed: seen.append(dict(failed))) == {
        "tiny-a": reason
    }
    assert seen == [{"tiny-a": reason}, {"tiny-a": reason}]
    assert len(loaded) == 2
    assert list(runner.measured_cells(cells, run)) == ["tiny-b"]


def test_a_pair_is_loaded_once_for_its_cells(tmp_path: Path, sets: Path) -> None:
    """With what the strategies of all of them need; those that prefer the draft in ONNX Runtime,
    which has times of its own, are apart."""
    loaded: list[list[str]] = []
    others = [
        CELL.model_copy(
            update={"name": f"tiny-{name}", "data": "maths", "contenders": {"one": (name,)}}
        )
        for name in ("svip", "lookahead")
    ]
    apart = CELL.model_copy(
        update={"name": "tiny-duo", "contenders": {"one": ("duo_decoding@1+1",)}}
    )

    def noted(cells: Sequence[Cell]) -> Any:
        loaded.append([cell.name for cell in cells])
        return opened(cells)

    assert (
        runner.run_cells([others[0], apart, CELL, others[1]], Run(tmp_path, data=sets), noted) == {}
    )
    assert loaded == [["tiny-svip", "tiny-code", "tiny-lookahead"], ["tiny-duo"]]


def test_the_most_telling_pair_is_measured_first() -> None:
    """Whatever its name is: a run that ends early has what the page is read for."""
    cells = [
        CELL.model_copy(update={"name": f"{pair}-{data}", "pair": pair})
        for pair, data in (("z", "a"), ("a", "a"), ("z", "b"))
    ]
    assert [cell.name for cell in runner.by_pair(cells)] == ["z-a", "z-b", "a-a"]


def test_a_cell_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the pace of its texts: training a verifier before them may take minutes."""
    said, now = list[str](), [0.0]
    monkeypatch.setattr("draftwell.components.papers.runner.time.monotonic", lambda: now[0])
    pace = runner.Pace("[1/2] tiny", said.append)
    for now[0], done in ((600.0, 1), (630.0, 6), (715.0, 21), (716.0, 22)):
        pace(done, 61, "spide")
    assert said == [
        "[1/2] tiny: 6 of 61 texts, about 6 min left",
        "[1/2] tiny: 21 of 61 texts, about 4 min left",
    ], "not at every text"


def test_the_fastest_plays_a_role(measured: tuple[Path, CellFile]) -> None:
    _, file = measured
    others = [
        file.report.strategies[label].decode_tokens_per_second or 0.0
        for label in file.cell.labels()["SD"]
    ]
    assert len(others) == 2
    assert file.entry("SD").decode_tokens_per_second == pytest.approx(max(others), rel=1e-6)
    named = file.entry("vanilla_sd@1+1:num_speculative_tokens=1")
    assert named.parameters == {"num_speculative_tokens": "1"}, (
        "a row may name one contender, whether or not it is the fastest"
    )


def test_a_file_of_another_version_is_measured_again_but_not_for_a_field_more(
    measured: tuple[Path, CellFile], tmp_path: Path
) -> None:
    folder, file = measured
    whole = json.loads(next(folder.glob("*.json")).read_text())
    (tmp_path / "a.json").write_text(json.dumps(whole | {"passes_timed": 4}))
    (tmp_path / "b.json").write_text(json.dumps(whole | {"version": 1}))
    assert read_cell(tmp_path / "a.json") == file
    assert read_cell(tmp_path / "b.json") is None


def test_cells_survive_their_file(measured: tuple[Path, CellFile]) -> None:
    folder, file = measured
    assert file.cell == CELL
    assert json.loads(next(folder.glob("*.json")).read_text())["cell"]["name"] == "tiny-code"


def test_what_says_nothing_of_the_papers_conditions_gets_no_verdict(
    measured: tuple[Path, CellFile],
) -> None:
    """A draft that costs more than twice the paper's c, 0.1, or less than half; of speeds alone."""
    _, file = measured
    paper = paper_of(ROWS, table={"cost": "0.1"})

    def reasons(draft: float) -> list[str]:
        rows = compared(paper, with_costs(file, t_draft=draft, t_verify={1: 0.1}))
        return [one.reason for one in rows if one.verdict == Verdict.NOT_COMPARABLE]

    assert [reasons(draft) for draft in (0.0049, 0.0051, 0.019, 0.021)] == [
        *(["cost"], [], [], ["cost"])
    ]
    other = compared(paper_of([ROWS[1] | {"unlike": "other"}]), file)[0]
    assert other.words == "not comparable (other)"


def test_a_verdict_says_what_qualifies_it(measured: tuple[Path, CellFile]) -> None:
    """Memory moves every ratio of times on a CPU, over SD too; no count, and nothing on a GPU. A
    lossy method has "speed only" unless nothing is lost; a profile that is not monotone is named
    where the two models overlap."""
    _, file = measured
    rows = (*ROWS, row("SPIDE over SD", over="SD"))
    paper = paper_of(rows)
    assert [one.provisional for one in compared(paper, file)] == [True, False, False, True]
    machine = file.report.machine.model_copy(update={"cuda": True})
    on_gpu = file.model_copy(update={"report": file.report.model_copy(update={"machine": machine})})
    assert not any(one.provisional for one in compared(paper, on_gpu))
    uneven = compared(paper, with_costs(file, busy=(0.1, {1: 0.2, 2: 0.1, 8: 0.3})))
    assert [bool(one.uneven) for one in uneven] == [False, True, False, True]
    assert uneven[3].confidence == "low"
    label = file.label("SPIDE")
    texts = file.report.strategies[label].per_prompt
    plain = [one.model_copy(update={"target_argmax": one.tokens}) for one in texts]
    whole = with_entry(file, "autoregressive", per_prompt=tuple(plain))
    for kept, words in ((1.0, ""), (0.5, "speed only: ")):
        rows_of = [
            one.model_copy(update={"target_argmax": round(kept * one.tokens)}) for one in texts
        ]
        lossy = with_entry(whole, label, lossless=False, per_prompt=tuple(rows_of))
        assert compared(paper, lossy)[3].words.startswith(words or str(Verdict.NOT_REPRODUCED)[:0])
        assert ("speed only" in compared(paper, lossy)[3].words) == bool(words)


def test_estimates_are_the_reports_own(measured: tuple[Path, CellFile]) -> None:
    """What the page takes from prompts is what the bench counted in total."""
    _, file = measured
    base, mine = file.entry("SD"), file.entry("SPIDE")
    speed, whole = (estimate(metric, base, file.entry("plain")) for metric in ("speed", "request"))
    plain = file.entry("plain").decode_tokens_per_second
    assert speed is not None
    assert whole is not None
    assert base.decode_tokens_per_second is not None
    assert plain is not None
    assert speed.value == pytest.approx(base.decode_tokens_per_second / plain), "of decoding alone"
    assert whole.value == pytest.approx(base.speedup), "with the prompt's reading"
    calls = estimate("calls", mine, base)
    assert calls is not None
    assert calls.value == pytest.approx(
        (mine.target_calls / mine.emitted) / (base.target_calls / base.emitted)
    )
    assert file.settings("SPIDE", "SD").endswith(
        f"SD: γ {base.parameters['num_speculative_tokens']}"
    )
    assert not file.has("spide@1+1:tau=0.2"), "a quick run lacks settings that rows name"


def test_pages_have_values_and_csv_files_have_all(
    measured: tuple[Path, CellFile], tmp_path: Path
) -> None:
    _, file = measured
    paper = paper_of(ROWS, open=["Figure 3"])
    shown = Shown([paper], TINY, {"tiny-code": file})
    text = paper_page(shown, paper, {"Table 1: tiny": Path("a.png")})
    for words in ("## Table 1: tiny", "| tiny | SD over plain | 1.50 |", "- Figure 3", "(a.png)"):
        assert words in text, words
    summary = summary_page(shown)
    assert "| tiny: it is fast | 1.50 | none | measured: " in summary
    assert "- **tiny, it is fast.** Because." in summary
    made = {path.stem: path.read_text() for path in write_csv(shown, tmp_path)}
    assert made["contenders"].count("\n") == 1 + 4, "plain decoding, two SD, one SPIDE"
    assert made["rows"].count("\n") == 1 + len(ROWS)


def test_pages_of_nothing_say_that_it_is_open() -> None:
    paper = paper_of(ROWS)
    shown = Shown([paper], QUICK, {}, {"tiny-code": "no such pair"})
    text = paper_page(shown, paper, {})
    assert "Not measured: tiny-code: no such pair." in text
    assert text.count("| open |") == len(ROWS)
    assert "its verdicts decide little" in text
    assert "`draftwell reproduce papers --data data --set quick=true --set only=tiny`" in text
    assert "| tiny: it is fast | 1.50 | none | open |" in summary_page(shown)
