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
from draftwell.components.bench.schema import BenchEntry, PromptRow
from draftwell.components.papers import runner
from draftwell.components.papers.asides import asides, over_by_seed, sequence_words
from draftwell.components.papers.cell_file import CellFile, Costs, cell_of, read_cell
from draftwell.components.papers.cells import (
    FULL,
    PLAIN,
    PLAIN_SHARE,
    QUICK,
    Cell,
    Scale,
    choice_of,
    sized,
)
from draftwell.components.papers.comparison import remark_on, results
from draftwell.components.papers.estimates import Estimate
from draftwell.components.papers.made_of import MadeOf
from draftwell.components.papers.page import POINTS, render
from draftwell.components.papers.plots import draw_points, draw_table
from draftwell.components.papers.points import measured_points, published_points
from draftwell.components.papers.tables import Paper, PaperTable, Row
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
    measured_cell,
    page_of,
    paper_of,
    with_costs,
    with_entry,
    write_sets,
)

TINY = Scale(
    "tiny", prompts=3, max_tokens=8, repeats=1, gammas=(1, 3), gammas_all=(1,), taus=(0.7,)
)
CELL = sized(
    TINY,
    name="tiny-code",
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


def table_of(cell: Cell) -> PaperTable:
    rows = (
        Row("SD: speed over plain", 1.5, "speed", "SD", PLAIN),
        Row("SPIDE: target calls over SD's", 1.1, "calls", "SPIDE", "SD"),
        Row("SPIDE: MAT over SD's", 1.4, "mat", "SPIDE", "SD"),
        Row("SD: acceptance", 0.6, "acceptance", "SD", neutral=None),
    )
    return PaperTable(
        "tiny-1", "Table 1: tiny", "there", "here", cell, rows, "Because.", acceptance=0.6
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
    run = runner.Run(folder, data=sets)
    return folder, measured_cell(CELL, run, opened)


def opened(cells: Sequence[Cell]) -> Any:
    return llama_pair(), resources()


def refuse(cells: Sequence[Cell]) -> Any:
    raise AssertionError("nothing was to be measured")


def test_a_second_run_measures_nothing(measured: tuple[Path, CellFile], sets: Path) -> None:
    folder, _ = measured
    said: list[str] = []
    assert runner.run_cells([CELL], runner.Run(folder, data=sets), refuse, say=said.append) == {}
    assert said == ["[1/1] tiny-code: measured before"]


@pytest.mark.parametrize(
    "settings", [{"max_tokens": 9}, {"prompts": 2}, {"seed": 1}, {"pad_target": None}]
)
def test_other_settings_are_another_cell(
    measured: tuple[Path, CellFile], sets: Path, settings: dict[str, Any]
) -> None:
    folder, _ = measured
    other = changed(CELL, **settings)
    assert runner.measured_cells([other], runner.Run(folder, data=sets)) == {}


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
    run = runner.Run(tmp_path, data=sets)
    file = measured_cell(cell, run, opened)
    assert all(each[1:] == [0, 1, 2, 3, 4, 5] for each in seeds.values()), "behind the warm-up"
    assert file.report.prompt_ids == ("line-1", "line-2") * 3
    assert "Each prompt was decoded with 3 seeds" in asides(file)
    assert "prompts: line-1, line-2." in asides(file)


def test_what_says_nothing_of_the_papers_conditions_gets_no_verdict(
    measured: tuple[Path, CellFile],
) -> None:
    """A draft that costs more than twice the paper's, or less than half; and plain decoding by
    passes that were others in the texts."""
    _, file = measured
    slow = with_entry(file, "autoregressive", decode_tokens_per_second=10.0)
    rows = (
        Row("SD: speed over plain, equal cores", 1.5, "speed", "SD", PLAIN_SHARE),
        Row("SD: speed over plain", 1.5, "speed", "SD", PLAIN),
        Row("SD: acceptance", 0.5, "acceptance", "SD", neutral=None),
    )

    def compared(draft: float, target: float, cost: float | None) -> list[bool]:
        times = with_costs(
            slow, t_draft=draft, t_verify={1: target}, t_rest=0.0, alone=(draft, {1: target})
        )
        table = PaperTable("tiny", "Table", "", "", CELL, rows, "", cost=cost)
        return [one.verdict != Verdict.NOT_COMPARABLE for one in results(table, times)]

    assert compared(0.019, 0.1, 0.1) == compared(0.0051, 0.1, 0.1) == [True, True, True]
    assert compared(0.021, 0.1, 0.1) == compared(0.0049, 0.1, 0.1) == [False, False, True], (
        "speeds alone"
    )
    assert compared(0.021, 0.1, None) == [True, True, True]
    assert compared(0.01, 0.125, 0.1) == [False, True, True], (
        "plain decoding was faster than its passes"
    )


def test_a_value_that_fails_because_it_is_larger_says_so() -> None:
    row = Row("CSD: speed over SD", 1.03, "speed", "CSD", "SD")
    assert remark_on(row, Estimate(1.59, 1.44, 1.76), Verdict.NOT_REPRODUCED) == "ours is larger"
    assert remark_on(row, Estimate(0.9, 0.85, 0.95), Verdict.NOT_REPRODUCED) == ""
    assert remark_on(row, Estimate(1.59, 1.44, 1.76), Verdict.DIRECTION) == ""
    assert (
        remark_on(
            Row("a loss", 0.8, "speed", "CSD", "SD"),
            Estimate(1.2, 1.1, 1.3),
            Verdict.NOT_REPRODUCED,
        )
        == ""
    ), "another side"


def test_plain_decoding_on_equal_cores_takes_its_pass_with_the_other_model_idle(
    measured: tuple[Path, CellFile],
) -> None:
    """Not with all cores, and not beside a busy draft model; the time outside passes is added."""
    _, file = measured
    found = with_costs(
        file,
        t_verify={1: 0.3},
        t_rest=0.01,
        alone=(0.001, {1: 0.5, 8: 0.7}),
        busy=(0.002, {1: 0.9, 8: 1.1}),
    ).measured()
    row = Row("SD: speed over plain, equal cores", 1.5, "speed", "SD", PLAIN_SHARE)
    ours, pace = found.estimate(row), found.entry("SD").decode_tokens_per_second
    assert ours is not None
    assert pace is not None
    assert ours.value == pytest.approx(0.51 * pace)
    assert (found.whole(row), found.settings(row)) == (
        None,
        "γ " + str(found.entry("SD").parameters["num_speculative_tokens"]),
    )
    assert file.model_copy(update={"costs": None}).measured().estimate(row) is None


def test_passes_are_timed_between_the_texts_of_a_cell(tmp_path: Path, sets: Path) -> None:
    """The profile's, made for this test, are neither of this machine nor of this minute."""
    run = runner.Run(tmp_path, data=sets, times=2)
    file = measured_cell(CELL, run, opened)
    made = Costs.of(resources().artifacts["hardware_profile"])  # type: ignore[arg-type]
    assert file.costs is not None
    assert file.costs.alone is not None
    assert made.alone is not None
    assert (file.passes_timed, file.costs.t_rest) == (2, made.t_rest)
    assert list(file.costs.t_verify) == list(file.costs.alone[1]) == [1, 8]
    assert file.costs.t_verify[1] != made.t_verify[1]
    assert file.costs.alone[1][8] != made.alone[1][8]
    assert file.chosen_by == made, "what strategies choose by stays known"
    page = page_of(TINY, table_of(CELL), file)
    assert "Passes were timed 2 times between the texts:" in page


def test_what_duodecoding_drafts_is_told_by_the_times_that_it_chose_by(
    measured: tuple[Path, CellFile],
) -> None:
    """By the profile's the target reads eight tokens in the time of one, by those between the texts
    four."""
    _, file = measured
    label, entry = next(iter(file.report.strategies.items()))
    rows = tuple(row.model_copy(update={"sequences": {1: (1, 1)}}) for row in entry.per_prompt)
    counted = with_entry(file, label, strategy="duo_decoding", parameters={}, per_prompt=rows)
    chosen, timed = (
        with_costs(counted, busy=(0.1, {1: 1.0, 4: 1.1, 8: eight, 16: 9.0})) for eight in (1.2, 1.3)
    )
    assert "at most 8 tokens here" in sequence_words(
        timed.model_copy(update={"chosen_by": chosen.costs})
    )
    assert "at most 4 tokens here" in sequence_words(timed)


def test_rejections_are_of_replays() -> None:
    with pytest.raises(ValidationError, match="set replay"):
        changed(CELL, rejections=True)


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
    run = runner.Run(tmp_path, data=sets)
    file = measured_cell(cell, run, lambda cells: (llama_pair(), used))
    assert set(file.roc) == {"1", "1.2", "1.5"}
    rows = (Row("SPRINTER: speed over plain", 1.5, "speed", "SPRINTER", PLAIN),)
    table = PaperTable(
        "tiny-1",
        "Table 1: tiny",
        "there",
        "here",
        cell,
        rows,
        "Because.",
        aucs={"1.2": 0.9},
        rounds="Figure 4.",
    )
    shown = results(table, file)[-1]
    assert (shown.what, shown.paper, shown.ours and shown.ours.value) == (
        "AUC of the verifier, λ 1.2",
        0.9,
        file.roc["1.2"].auc[0],
    )
    text = page_of(TINY, table, file)
    assert "AUC of the draft's confidence" in text
    assert "Figure 4. Here, the milliseconds of a round" in text


def test_seeds_are_of_samples_and_leave_other_cells_as_they_are() -> None:
    assert "seeds" not in CELL.settings()
    with pytest.raises(ValidationError, match="the same with every seed"):
        changed(CELL, seeds=2)


def test_the_spread_is_of_the_seeds() -> None:
    """Two prompts, two seeds: with the second one everything is twice as fast."""

    def entry(*seconds: float) -> BenchEntry:
        return BenchEntry(
            per_prompt=tuple(
                PromptRow(prompt_id=name, seconds=value, tokens=11)
                for name, value in zip("abab", seconds, strict=True)
            )
        )

    assert over_by_seed(entry(1.0, 1.0, 0.5, 0.5), entry(2.0, 2.0, 2.0, 2.0), 2) == pytest.approx(
        [2.0, 4.0]
    )


def test_what_was_measured_elsewhere_is_measured_again(
    measured: tuple[Path, CellFile], sets: Path
) -> None:
    folder, _ = measured
    assert runner.measured_cells([CELL], runner.Run(folder, "float32 on cuda", sets)) == {}


def test_other_weights_or_artifacts_are_another_cell(
    measured: tuple[Path, CellFile], sets: Path
) -> None:
    """The file says what was read, and a file of other artifacts, or of another pair's weights, is
    not taken for it."""
    folder, _ = measured
    one, two = MadeOf("f0", {"verifier": "d1"}), MadeOf("f0", {"verifier": "d2"})
    assert (
        runner.measured_cells([CELL], runner.Run(folder, data=sets, made_of=lambda cell: one)) == {}
    )
    keys = {
        CELL.key("", "", made.digests)
        for made in (one, two, MadeOf("f1", {"verifier": "d1"}), MadeOf("f0"))
    }
    assert len(keys) == 4


def test_a_cell_without_any_file_asks_for_no_pair(tmp_path: Path, sets: Path) -> None:
    """Rendering a page must not fetch models of cells that were never measured."""

    def fetch(cell: Cell) -> MadeOf:
        raise AssertionError("the pair was fetched")

    assert runner.measured_cells([CELL], runner.Run(tmp_path, data=sets, made_of=fetch)) == {}


def test_a_broken_file_is_measured_again(
    measured: tuple[Path, CellFile], tmp_path: Path, sets: Path
) -> None:
    folder, _ = measured
    path = next(folder.glob("*.json"))
    (tmp_path / path.name).write_text(path.read_text()[:100])
    run = runner.Run(tmp_path, data=sets)
    assert runner.measured_cells([CELL], run) == {}
    assert runner.run_cells([CELL], run, opened) == {}
    assert list(runner.measured_cells([CELL], run)) == ["tiny-code"]


def test_a_cell_that_fails_is_named_and_the_others_are_measured(tmp_path: Path, sets: Path) -> None:
    broken = CELL.model_copy(update={"name": "broken", "pair": "a-broken-one"})

    def one_is_missing(cells: Sequence[Cell]) -> Any:
        if cells[0].name == "broken":
            raise DraftwellError("no such pair", code="unknown_pair")
        return opened(cells)

    run = runner.Run(tmp_path, data=sets)
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
    loaded, seen = list[str](), list[tuple[str, dict[str, str]]]()

    def breaks(*arguments: Any, **options: Any) -> Any:
        if len(loaded) == 1:
            raise error
        return run_bench(*arguments, **options)

    def noted(together: Sequence[Cell]) -> Any:
        loaded.append(together[0].name)
        return opened(together)

    monkeypatch.setattr(runner, "run_bench", breaks)
    run = runner.Run(tmp_path, data=sets)
    assert runner.run_cells(
        cells, run, noted, after=lambda cell, failed: seen.append((cell.name, dict(failed)))
    ) == {"tiny-a": reason}
    assert seen == [("tiny-a", {"tiny-a": reason}), ("tiny-b", {"tiny-a": reason})]
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
        runner.run_cells(
            [others[0], apart, CELL, others[1]], runner.Run(tmp_path, data=sets), noted
        )
        == {}
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


def test_estimates_are_the_reports_own(measured: tuple[Path, CellFile]) -> None:
    """What the page takes from prompts is what the bench counted in total."""
    _, file = measured
    found, rows = file.measured(), table_of(CELL).rows
    speed, calls, mat, acceptance = (found.estimate(row) for row in rows)
    base, mine = found.entry("SD"), found.entry("SPIDE")
    assert speed is not None
    assert base.decode_tokens_per_second is not None
    plain = found.entry(PLAIN)
    assert plain.decode_tokens_per_second is not None
    assert speed.value == pytest.approx(
        base.decode_tokens_per_second / plain.decode_tokens_per_second
    ), "of decoding alone"
    assert found.whole(rows[0]) == pytest.approx(base.speedup), "with the prompt's reading"
    assert found.whole(rows[1]) is None, "not a speed"
    assert found.settings(rows[1]).endswith(f"SD: γ {base.parameters['num_speculative_tokens']}")
    assert speed.low <= speed.value <= speed.high
    assert calls is not None
    assert calls.value == pytest.approx(
        (mine.target_calls / mine.emitted) / (base.target_calls / base.emitted)
    )
    assert mat is not None
    accepted, corrected = (
        [sum(count(row) for row in entry.per_prompt) for entry in (mine, base)]
        for count in (lambda row: row.accepted, lambda row: row.tokens - row.accepted - 1)
    )
    assert mat.value == pytest.approx(
        (accepted[0] / corrected[0]) / (accepted[1] / corrected[1])
    ), "without the prompts' own tokens"
    assert acceptance is not None
    assert acceptance.value == pytest.approx(base.acceptance_rate)


def test_the_fastest_plays_a_role(measured: tuple[Path, CellFile]) -> None:
    _, file = measured
    found = file.measured()
    others = [
        file.report.strategies[label].decode_tokens_per_second or 0.0
        for label in found.labels["SD"]
    ]
    assert len(others) == 2
    assert found.entry("SD").decode_tokens_per_second == pytest.approx(max(others), rel=1e-6)
    named = found.entry("vanilla_sd@1+1:num_speculative_tokens=1")
    assert named.parameters == {"num_speculative_tokens": "1"}, (
        "a row may name one contender, whether or not it is the fastest"
    )


def test_the_page_has_values_formulas_and_verdicts(
    measured: tuple[Path, CellFile], tmp_path: Path
) -> None:
    _, file = measured
    table = table_of(CELL)
    paper = Paper(
        "tiny",
        "Tiny paper",
        lambda scale: (table,),
        untestable=(("Table 9", "no judge"),),
        open=("Figure 3",),
    )
    picture = draw_table(table, results(table, file), tmp_path / "tiny.png")
    assert picture is not None
    assert picture.stat().st_size > 1000
    text = render([paper], TINY, {"tiny-code": file}, pictures={"tiny-1": Path("images/tiny.png")})
    for words in (
        "### Table 1: tiny",
        "| SD: speed over plain | 1.50 |",
        "Leviathan's formula",
        "vanilla_sd@1+1(num_speculative_tokens=3)",
        "spide@1+1, over SD",
        "Table 9: not testable here: no judge",
        "Figure 3: open",
        "images/tiny.png",
        "share reached",
    ):
        assert words in text, words
    assert text.count(f"| {Verdict.OPEN} |") == 1, "only the overview's column is named so"


def test_a_page_of_nothing_says_that_it_is_open() -> None:
    table = table_of(CELL)
    text = render(
        [paper_of(table)],
        TINY,
        {},
        failed={"tiny-code": "no such pair"},
    )
    assert [result.verdict for result in results(table, None)] == [Verdict.OPEN] * 4
    assert "Not measured: no such pair" in text
    assert "0 cells are measured; 0 are counted" in text
    assert "(a tiny run) took 0 minutes" in text


@pytest.mark.parametrize(
    ("share", "word"), [(1.3, "slower"), (0.7, "faster"), (1.1, ""), (0.9, "")]
)
def test_a_machine_that_changed_since_its_profile_is_named(
    measured: tuple[Path, CellFile], share: float, word: str
) -> None:
    """Plain decoding at `share` times the seconds of the profile: the sentence stands next to the
    predictions."""
    _, file = measured
    assert file.costs is not None
    expected = file.costs.t_verify[1] + file.costs.t_rest
    later = with_entry(file, "autoregressive", decode_tokens_per_second=1 / (share * expected))
    assert (later.drift is None) == (not word)
    text = page_of(TINY, table_of(CELL), later)
    assert (
        f"The machine was {word} in the texts than when passes were timed: plain decoding took"
        in text
    ) == bool(word)
    assert "get no verdict" not in text.partition("### Table")[2], (
        "no row is over plain on equal cores"
    )


def test_a_file_with_fields_of_another_version_is_measured_again(
    measured: tuple[Path, CellFile], tmp_path: Path
) -> None:
    folder, file = measured
    whole = json.loads(next(folder.glob("*.json")).read_text())
    (tmp_path / "a.json").write_text(json.dumps(whole))
    (tmp_path / "b.json").write_text(json.dumps(whole | {"best_memory_rate": 50.0}))
    assert read_cell(tmp_path / "a.json") == file
    assert read_cell(tmp_path / "b.json") is None


def test_acceptance_is_drawn_against_cost(measured: tuple[Path, CellFile], tmp_path: Path) -> None:
    _, file = measured
    paper = paper_of(table_of(CELL))
    points = measured_points([paper], TINY, {"tiny-code": file})
    assert file.costs is not None
    assert points["tiny-code"].c == pytest.approx(0.001 / 0.004)
    assert points["tiny-code"].acceptance == file.measured().entry("SD").acceptance_rate
    assert len(published_points()) == 12
    picture = draw_points(list(points.values()), published_points(), tmp_path / "points.png")
    assert picture is not None
    assert picture.stat().st_size > 1000
    assert draw_points([], published_points(), tmp_path / "none.png") is None
    assert "](points.png)" in render(
        [paper], TINY, {"tiny-code": file}, pictures={POINTS: Path("points.png")}
    )


def test_a_quick_page_says_that_it_decides_little_and_each_paper_names_its_command() -> None:
    paper = paper_of(table_of(CELL))
    quick = render([paper], QUICK, {})
    assert "its verdicts decide little" in quick
    assert (
        "Made by `draftwell reproduce papers --set quick=true --set only=tiny --data data`."
        in quick
    )
    assert "decide little" not in render([paper], FULL, {})


def test_cells_survive_their_file(measured: tuple[Path, CellFile]) -> None:
    folder, file = measured
    assert cell_of(file.cell) == CELL
    assert json.loads(next(folder.glob("*.json")).read_text())["cell"]["name"] == "tiny-code"


@pytest.mark.parametrize("scale", [QUICK, FULL], ids=lambda scale: scale.name)
def test_every_papers_tables_fit_their_cells(scale: Scale) -> None:
    """Roles exist, specs are strategies with valid parameters, cells of one name are one cell, and
    both sizes have the same tables."""
    from draftwell.components.bench.runner import core_plan
    from draftwell.components.papers.catalogue import PAPERS
    from draftwell.serving.runtime.strategies import build_strategy

    for name, paper in PAPERS.items():
        tables = paper.tables(scale)
        assert tables, name
        cells: dict[str, Cell] = {}
        for table in tables:
            assert cells.setdefault(table.cell.name, table.cell) == table.cell
            roles = table.cell.labels()
            named = {row.role for row in table.rows} | {
                row.against for row in table.rows if row.against
            }
            named -= {PLAIN_SHARE}
            assert {choice_of(spec) for spec in named - roles.keys()} <= set(
                table.cell.choices()
            ), table.name
            for choice in table.cell.choices():
                build_strategy(core_plan(choice.name)[0], dict(choice.parameters))
        assert [(table.title, [row.what for row in table.rows]) for table in tables] == [
            (other.title, [row.what for row in other.rows]) for other in paper.tables(FULL)
        ]
        if scale is QUICK:
            measured = [table.cell for table in tables if table.cell.replay is None]
            assert max(len(cell.choices()) for cell in measured) <= 15, "20 minutes for 14 cells"
