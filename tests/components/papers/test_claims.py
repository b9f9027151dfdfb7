"""The papers' values as we copied them, against each other and against the catalogue of pairs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import mean

import pyarrow as pa
import pytest

from draftwell.components.bench.runner import core_plan
from draftwell.components.formulas import token_acceptance
from draftwell.components.papers.cells import FULL, PLAIN, QUICK, Cell, Scale, choice_of
from draftwell.components.papers.gain import gains
from draftwell.components.papers.tables import Paper, Placed, papers_named
from draftwell.components.regimes.points import published_points
from draftwell.registry.pairs import find_pair
from draftwell.serving.errors import DraftwellError
from draftwell.serving.runtime.strategies import build_strategy, find_strategy
from tests.support.papers import paper_of
from tests.support.paths import REPO

PAPERS = {paper.name: paper for paper in papers_named()}
SPIDE = PAPERS["spide"]
PAIRS = ("vicuna", "vicuna160", "pythia", "deepseek", "tinyllama", "qwen")
ACCEPTANCE = {
    "smollm2-135m-near-copy-29": 0.91,
    "smollm2-135m": 0.5,
    "smollm2-135m-near-copy-27": 0.78,
    "smollm2-135m-near-copy-24": 0.64,
    "smollm2-135m-near-copy-int8": 0.99,
}
"""How often a draft's first choice is the target's: near copies by their files' comments."""


def placed(paper: Paper) -> list[Placed]:
    return [one for _, rows in paper.placed for one in rows]


def alpha(theirs: str, data: str) -> float:
    mat, gamma = SPIDE.value(f"{data}.SD.{theirs}.mat"), SPIDE.value(f"gamma.{theirs}")
    return token_acceptance(mat or 0.0, int(gamma or 0))


def test_spides_acceptance_is_the_inverse_of_its_mean_accepted_tokens() -> None:
    """Not MAT / (1 + MAT), which holds for drafts without end."""
    assert [round(alpha(theirs, "code"), 2) for theirs in PAIRS] == [
        *(0.68, 0.75, 0.86, 0.95, 0.92, 0.90)
    ]
    assert [round(alpha(theirs, "maths"), 2) for theirs in PAIRS] == [
        *(0.70, 0.95, 0.81, 0.91, 0.97, 0.84)
    ]


def test_our_pairs_stand_next_to_those_of_nearest_acceptance() -> None:
    """On both data sets in sum; a near copy's file names the paper's pair, and its acceptance."""
    for one in next(table for table in SPIDE.tables if "replayed" in table.title).each:
        pair = SPIDE.cells[one["cell"]]["pair"]
        nearest = min(
            PAIRS,
            key=lambda theirs: sum(
                abs(alpha(theirs, data) - ACCEPTANCE[pair]) for data in ("code", "maths")
            ),
        )
        assert one["theirs"] == nearest, pair
        if "near-copy" in pair:
            comment = (Path(find_pair(pair).folder) / f"{pair}.yaml").read_text()
            known = re.search(r"in (\d+) % of them", comment)
            assert known is not None
            assert ACCEPTANCE[pair] == int(known[1]) / 100


def test_replays_have_the_papers_settings() -> None:
    """s is the cell's ratio of costs; γ and τ are those of Tables 17 and 18; SPIDE is fastest on
    MT-bench, with fewer calls than PEARL."""
    for one in next(table for table in SPIDE.tables if "replayed" in table.title).each:
        theirs = one["theirs"]
        assert SPIDE.cells[one["cell"]]["replay"] == SPIDE.value(f"s.{theirs}")
        assert one["gamma"] == SPIDE.value(f"gamma.{theirs}")
        assert one["tau"] == SPIDE.value(f"tau.{one['data']}.{theirs}")
    methods = ("SD", "SVIP", "D&V", "PEARL", "SPIDE")
    for theirs in PAIRS:
        speeds = [SPIDE.value(f"chat.{method}.{theirs}.speed") for method in methods]
        assert speeds.index(max(speeds)) == 4
        calls = [SPIDE.value(f"chat.{method}.{theirs}.calls") or 0 for method in methods]
        assert calls[4] < calls[3]


def test_the_averages_of_section_4_2_follow_from_tables_1_and_2() -> None:
    def average(expression: str) -> float:
        return mean(
            SPIDE.value(expression.format(data=data, theirs=theirs)) or 0.0
            for data in ("code", "maths")
            for theirs in PAIRS
        )

    calls, pearl = (average(f"{{data}}.{name}.{{theirs}}.calls") for name in ("SPIDE", "PEARL"))
    found = (
        average("{data}.SPIDE.{theirs}.speed"),
        average("{data}.SPIDE.{theirs}.speed / {data}.SD.{theirs}.speed"),
        calls,
        1 - (calls - 1) / (pearl - 1),
    )
    assert found == pytest.approx((3.25, 1.677, 1.082, 0.837), abs=1e-3)


def test_the_papers_gain_is_summed_up_as_the_formulas_give_it() -> None:
    """The spans in the claim's reason."""
    formula, share, _, paper = zip(*(figures for _, figures in gains(SPIDE).values()), strict=True)
    reached = [p * s / f for p, s, f in zip(paper, share, formula, strict=True)]
    for values in (formula, share, reached):
        assert f"{min(values):.2f} to {max(values):.2f}" in SPIDE.claims["over_sd"].why


def test_rates_of_csd_are_of_drafted_tokens() -> None:
    """Its HumanEval rates at γ 6 and γ 15 are one chance per token; as rates per judged token they
    would be two."""
    short, long = token_acceptance(0.597 * 6, 6), token_acceptance(0.399 * 15, 15)
    assert short == pytest.approx(long, abs=0.03)
    alphas = {one.cell: one.alpha for one in placed(PAPERS["csd"]) if one.alpha}
    assert [round(value, 2) for value in alphas.values()] == [0.85, 0.90, 0.78]


def test_csds_cost_follows_from_its_tables() -> None:
    costs = [point.pair.c for point in published_points() if point.source.startswith("CSD, ")]
    assert len(costs) == 2
    assert all(cost == pytest.approx(PAPERS["csd"].value("pass_cost"), abs=0.02) for cost in costs)
    speeds = [one for one in placed(PAPERS["csd"]) if one.row.metric == "speed"]
    assert all(one.cost == 0.25 for one in speeds)


def test_how_rejections_concentrate_is_counted_in_the_shipped_memory() -> None:
    """Figure 2(a): the share of the most frequent fifth of the pairs; pairs that were seen once do
    not ship, and are below that fifth."""
    folder = REPO / "registry/pairs/smollm2_135m/artifacts/bfloat16/correction_memory"
    counted = json.loads((folder / "artifact.json").read_text())["provenance"]["metrics"]
    counts = pa.ipc.open_file(str(folder / "memory.arrow")).read_all().column("count").to_pylist()
    fifth = round(counted["patterns"] / 5)
    share = (sum(counts) + fifth - len(counts)) / counted["rejections"]
    assert f"{share:.0%}" == "57%"
    assert len(counts) <= fifth
    assert "57 % of the 62,481 rejections" in " ".join(PAPERS["csd"].elsewhere)


def test_shares_and_ratios_are_those_of_their_tables() -> None:
    papers = {
        (paper.name, one.row.what, one.label): one.paper
        for paper in PAPERS.values()
        for one in placed(paper)
        if one.paper is not None
    }
    duo = PAPERS["duodecoding"].published["rounds"].values
    assert sum(duo.values()) == pytest.approx(1.0)
    for key, value in {
        ("csd", "CSD over SD", "HumanEval"): 2.45 / 1.90,
        ("csd", "CSD: accepted / drafted tokens", "GSM8K"): 0.745,
        ("pyramidsd", "PSD_A over SD, qualifier drafts", "near copies"): 93.71 / 65.01,
        ("sprinter", "SPRINTER over SD", "WikiText-2, trained on GSM8K"): 1.64 * 0.56 / 0.57,
        ("sprinter", "SPRINTER over SD", "GSM8K, trained on WikiText-2"): 1.83 * 0.46 / 0.51,
        ("duodecoding", "one sequence, 2 tokens shorter than measured", "HumanEval"): 87.47 / 89.06,
    }.items():
        assert papers[key] == pytest.approx(value), key


def test_a_speed_over_plain_is_over_plain_decoding_with_the_same_cores() -> None:
    """On equal cores the engine's target has one of two: over plain decoding with both, such a row
    would say nothing of the paper's."""
    for paper in PAPERS.values():
        cells = paper.measured_in(FULL)
        for one in placed(paper):
            if one.row.over == PLAIN and one.row.metric in ("speed", "request"):
                specs = cells[one.cell].contenders.get(one.row.role, ())
                assert not any(splits(choice_of(spec).name) for spec in specs), one.row


def splits(name: str) -> bool:
    strategy, split = core_plan(name)
    return split is True or find_strategy(strategy).overlaps


def test_every_contender_of_a_cell_has_a_row_and_every_claim_too() -> None:
    """What is measured is shown: fuzzy SD was once measured for nothing."""
    for paper in PAPERS.values():
        shown: dict[str, set[str]] = {}
        for one in placed(paper):
            shown.setdefault(one.cell, set()).update((one.row.role, one.row.over))
        for name, cell in paper.measured_in(FULL).items():
            assert {*cell.labels()} - {PLAIN} <= shown[name], name
        assert len(paper.claims) == 2
        assert {one.row.claim for one in placed(paper)} - {""} == set(paper.claims)


def test_the_headline_has_every_row_of_its_comparison() -> None:
    """SPRINTER's verifiers that were trained for a cell are in it, other thresholds are not but for
    those of the counted cells."""
    rows = [one for one in placed(PAPERS["sprinter"]) if one.row.claim == "speed"]
    assert len(rows) == 7
    assert {one.cell for one in rows} == set(PAPERS["sprinter"].cells)
    for one in placed(PAPERS["sprinter"]):
        if "τ 0." in one.row.what and one.row.metric == "speed":
            assert one.paper is None, one.row.what


def test_counts_are_judged_at_the_papers_draft_length() -> None:
    """Target calls and MAT over SD's depend on SD's γ: at another one they are not the paper's."""
    for one in placed(SPIDE):
        if one.row.metric in ("calls", "mat") and one.paper is not None:
            assert one.row.over.startswith("vanilla_sd:num_speculative_tokens="), one.row


@pytest.mark.parametrize("scale", [QUICK, FULL], ids=lambda scale: scale.name)
def test_rows_fit_their_cells(scale: Scale) -> None:
    """Specs are strategies with valid parameters; in a full run roles and specs of rows exist; a
    quick run has one setting of each role that is measured."""
    for paper in PAPERS.values():
        cells = paper.measured_in(scale)
        for cell in cells.values():
            for choice in cell.choices():
                build_strategy(core_plan(choice.name)[0], dict(choice.parameters))
        if scale is FULL:
            for one in placed(paper):
                check_roles(one, cells[one.cell])
        else:
            measured = [cell for cell in cells.values() if cell.replay is None]
            assert max(len(cell.choices()) for cell in measured) <= 15, "20 minutes for all"
            assert {cell.prompts for cell in measured} == {2}


def check_roles(one: Placed, cell: Cell) -> None:
    for role in filter(None, (one.row.role, one.row.over)):
        if one.row.metric != "auc" and role not in cell.labels():
            assert choice_of(role) in cell.choices(), one.row


def test_what_replay_counts_has_no_place_in_another_padding() -> None:
    from dataclasses import replace

    cells = SPIDE.measured_in(replace(FULL, pad_target=7e9))
    assert not any("counts" in name for name in cells)
    assert {cell.pad_target for cell in cells.values()} == {7e9}


def test_a_mistake_in_a_papers_file_is_one_line() -> None:
    row = {"what": "a", "metric": "speed", "role": "SD"}
    with pytest.raises(DraftwellError, match="no reason lost"):
        _ = paper_of([row | {"unlike": "lost"}]).placed
    with pytest.raises(DraftwellError, match="metric"):
        _ = paper_of([row | {"metric": "sped"}]).placed
    with pytest.raises(DraftwellError, match="owns"):
        paper_of([row], owns=["SPIDE"])
    with pytest.raises(DraftwellError, match="choose from spide, sprinter"):
        papers_named("eagle")


def test_values_are_paths_products_and_quotients() -> None:
    paper = paper_of([])
    assert paper.value("tiny.a / tiny.b * 2") == pytest.approx(2.5)
    assert paper.value("") is None
    assert SPIDE.value("code.SPIDE.deepseek.mat") == 24.83
    assert SPIDE.source("code.SD.qwen.calls") == "Table 1, section 4.2"
