"""The papers' values as we copied them, against each other and against the catalogue of pairs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from draftwell.components.bench.runner import core_plan
from draftwell.components.papers import csd, duodecoding, pyramidsd, spide
from draftwell.components.papers.catalogue import PAPERS
from draftwell.components.papers.cells import FULL, PLAIN, PLAIN_SHARE, choice_of
from draftwell.components.papers.committed import committed_cells
from draftwell.components.papers.formulas import token_acceptance
from draftwell.components.papers.page import closing
from draftwell.components.papers.tables import EQUAL_PLAIN
from draftwell.registry.pairs import find_pair
from draftwell.serving.runtime.strategies import find_strategy
from tests.support.paths import REPO


def test_spides_acceptance_is_the_inverse_of_its_mean_accepted_tokens() -> None:
    """Not MAT / (1 + MAT), which holds for drafts without end: 8.25 tokens of γ 11 are .95, not
    .89."""
    found = [round(spide.acceptance_of(spide.TABLE_1, theirs), 2) for theirs in range(6)]
    assert found == [0.68, 0.75, 0.86, 0.95, 0.92, 0.90]
    assert [round(spide.acceptance_of(spide.TABLE_2, theirs), 2) for theirs in range(6)] == [
        0.70,
        0.95,
        0.81,
        0.91,
        0.97,
        0.84,
    ]


def test_our_pairs_stand_next_to_those_of_nearest_acceptance() -> None:
    found = {
        pair: spide.THEIR_PAIRS[spide.nearest(acceptance)]
        for pair, acceptance in spide.OURS.items()
    }
    assert found == {
        "smollm2-135m": "Vicuna 68M & 13B",
        "smollm2-135m-near-copy-24": "Vicuna 68M & 13B",
        "smollm2-135m-near-copy-27": "Pythia 160M & 12B",
        "smollm2-135m-near-copy-29": "DeepSeek 1.3B & 33B",
        "smollm2-135m-near-copy-int8": "TinyLlama 1.1B & CodeLlama 34B",
    }
    for table in spide.tables(FULL):
        assert table.theirs.startswith(found[table.cell.pair])


@pytest.mark.parametrize("pair", [pair for pair in spide.OURS if "near-copy" in pair])
def test_the_pairs_file_names_the_papers_pair_that_it_stands_next_to(pair: str) -> None:
    assert spide.THEIR_PAIRS[spide.nearest(spide.OURS[pair])] in (find_pair(pair).paper or "")


def test_csds_rows_have_the_values_of_a_universal_memory_as_ours_is_one() -> None:
    rows = {
        (table.cell.data, row.what): row.paper
        for table in csd.tables(FULL)
        for row in table.rows
        if row.role == "CSD"
    }
    assert rows["code", "CSD: speed over plain"] == 2.45
    assert rows["code", "CSD: accepted / drafted tokens"] == 0.711
    assert rows["maths", "CSD: speed over plain"] == 1.80


def test_how_rejections_concentrate_is_counted_in_the_shipped_memory() -> None:
    """Figure 2(a): the share of the most frequent fifth of the pairs; pairs that were seen once do
    not ship, and are below that fifth."""
    import json

    import pyarrow as pa

    folder = (
        REPO
        / "registry"
        / "pairs"
        / "smollm2_135m"
        / "artifacts"
        / "bfloat16"
        / "correction_memory"
    )
    counted = json.loads((folder / "artifact.json").read_text())["provenance"]["metrics"]
    counts = pa.ipc.open_file(str(folder / "memory.arrow")).read_all().column("count").to_pylist()
    fifth = round(counted["patterns"] / 5)
    share = (sum(counts) + fifth - len(counts)) / counted["rejections"]
    assert f"{share:.0%}" == "57%"
    assert len(counts) <= fifth
    assert "57 % of the 62,481 rejections" in closing(PAPERS["csd"], {})


def test_spides_own_baseline_is_below_leviathans_formula() -> None:
    shares = [
        [spide.own_formula(values, theirs) for theirs in range(6)]
        for values in (spide.TABLE_1, spide.TABLE_2)
    ]
    assert [[round(min(one), 2), round(max(one), 2)] for one in shares] == [
        [0.67, 0.87],
        [0.63, 0.78],
    ]
    assert (
        "| DeepSeek 1.3B & 33B, HumanEval | 0.95 | 0.96 | 0.78 | 0.97 | 1.30 | 1.62 |"
        in closing(PAPERS["spide"], {})
    )


def test_the_one_pair_whose_acceptance_is_two_things_is_the_one_that_misses_its_formula() -> None:
    """What the page says of the row that it leaves out."""
    text = closing(PAPERS["spide"], {})
    assert (
        "0.95 to 1.13 of its formula in 11 of 12 rows (in the other one acceptance is .95 "
        "by SD's MAT and .87 by SPIDE's"
    ) in text
    assert "| Vicuna 160M & 33B, GSM8K | 0.95 | 0.87 | 0.63 | 0.63 | 1.67 | 1.66 |" in text


def test_the_papers_gain_is_summed_up_for_the_pairs_that_stand_beside_measured_ones() -> None:
    assert spide.summary({}) == ""
    kept = committed_cells([table.cell for table in spide.tables(FULL)])
    text = spide.summary(kept)
    assert "the formulas give 0.98 to 1.31 times SD" in text
    assert (
        "the paper reports 1.35 to 1.81. Its SPIDE reaches 0.95 to 1.08 of what they say, "
        "its SD 0.67 to 0.82."
    ) in text


def test_a_time_to_the_first_token_before_which_nobody_drafts_is_not_the_papers() -> None:
    rows = [row for table in duodecoding.tables(FULL) for row in table.rows if row.metric == "ttft"]
    assert [(row.against, row.comparable) for row in rows] == 2 * [
        (duodecoding.FIRST, False),
        ("SpS", False),
        (PLAIN, False),
        (PLAIN, False),
    ]
    assert all(duodecoding.FIRST_TOKEN in table.notes for table in duodecoding.tables(FULL))


@pytest.mark.parametrize("pair", [pair for pair in spide.OURS if "near-copy" in pair])
def test_our_acceptance_is_that_of_the_pairs_file(pair: str) -> None:
    """The comment of each near copy's file says in how many places its first choice was the
    target's."""
    comment = (Path(find_pair(pair).folder) / f"{pair}.yaml").read_text()
    known = re.search(r"in (\d+) % of them", comment)
    assert known is not None
    assert spide.OURS[pair] == int(known[1]) / 100


def test_csds_rate_is_of_drafted_tokens() -> None:
    """Its HumanEval rates at γ 6 and γ 15 are one chance per token; as rates per judged token they
    would be two."""
    short, long = token_acceptance(0.597 * 6, 6), token_acceptance(0.399 * 15, 15)
    assert short == pytest.approx(long, abs=0.03)
    rows = [
        row
        for table in csd.tables(FULL)
        for row in table.rows
        if "drafted" in row.what and row.paper is not None
    ]
    assert len(rows) == 7
    assert {row.metric for row in rows} == {"efficiency"}
    assert [
        round(table.acceptance, 2) for table in csd.tables(FULL) if table.acceptance is not None
    ] == [0.85, 0.90, 0.78]


def test_a_speed_over_plain_is_over_plain_decoding_with_the_same_cores() -> None:
    """On equal cores the engine's target has one of two: over plain decoding with both, such a row
    would say nothing of the paper's."""
    for paper in PAPERS.values():
        for table in [table for table in paper.tables(FULL) if table.cell.replay is None]:
            split = {
                role
                for role, specs in table.cell.contenders.items()
                if any(splits(choice_of(spec).name) for spec in specs)
            }
            over = {
                against: {
                    row.role
                    for row in table.rows
                    if row.against == against and row.metric == "speed" and row.paper is not None
                }
                for against in (PLAIN, PLAIN_SHARE)
            }
            assert not over[PLAIN] & split, table.name
            assert over[PLAIN_SHARE] <= split, table.name
            assert (EQUAL_PLAIN in table.notes) == bool(over[PLAIN_SHARE]), table.name


def splits(name: str) -> bool:
    strategy, split = core_plan(name)
    return split is True or find_strategy(strategy).overlaps


def test_every_lossy_contender_has_its_quality_next_to_its_speed() -> None:
    """A speed that comes with other tokens than the target's says nothing by itself; the papers
    have no such figure."""
    for paper in PAPERS.values():
        for table in paper.tables(FULL):
            lossy = {
                role
                for role, specs in table.cell.contenders.items()
                if not find_strategy(core_plan(choice_of(specs[0]).name)[0]).lossless
            } | set(table.cell.verifiers)
            rows = [row for row in table.rows if row.metric == "argmax"]
            assert {row.role for row in rows} == lossy, table.name
            assert all(
                row.paper is None and row.neutral == 0.0 and row.against == PLAIN for row in rows
            )


def test_every_contender_of_a_cell_has_a_row() -> None:
    """What is measured is shown: fuzzy SD was once measured for nothing."""
    for paper in PAPERS.values():
        for table in paper.tables(FULL):
            shown = {
                role
                for row in table.rows
                for role in (row.role, row.against)
                if role and ":" not in role
            } - {PLAIN, PLAIN_SHARE}
            assert set(table.cell.roles) == shown, table.name


def test_counts_are_judged_at_the_papers_draft_length() -> None:
    """Target calls and MAT over SD's depend on SD's γ: at another one they are not the paper's."""
    for table in PAPERS["spide"].tables(FULL):
        gamma = spide.TABLE_17[spide.THEIR_PAIRS.index(table.theirs.partition(", ")[0])]
        judged = {
            row.against
            for row in table.rows
            if row.metric in ("calls", "mat") and row.comparable and row.paper is not None
        }
        assert judged == (
            set() if table.cell.replay is None else {f"vanilla_sd:num_speculative_tokens={gamma}"}
        ), table.name


def test_headlines_are_rows_of_their_papers() -> None:
    for paper in PAPERS.values():
        rows = {row.what for table in paper.tables(FULL) for row in table.rows}
        assert paper.headlines
        assert {headline.row for headline in paper.headlines} <= rows, paper.name


def test_pyramids_speeds_are_of_table_2() -> None:
    words = pyramidsd.BY_QUALIFIER
    near_copies, shipped = (
        {
            row.what: round(row.paper, 2)
            for row in table.rows
            if row.paper and row.what.endswith(words)
        }
        for table in pyramidsd.tables(FULL)
    )
    assert (
        near_copies
        == shipped
        == {
            "FSD: fastest speed over SD, qualifier drafts": 1.28,
            "PSD_A: fastest speed over SD, qualifier drafts": 1.44,
            "PSD_F: fastest speed over SD, qualifier drafts": 1.91,
            "PSD_A: fastest speed over FSD, qualifier drafts": 1.13,
        }
    )


def test_near_copies_are_judged_by_the_papers_divergence_and_thresholds() -> None:
    """The paper's τ mean `fsd_js`, and its fastest PSD_A and fuzzy SD are among what is tried."""
    choices = {str(choice) for choice in pyramidsd.tables(FULL)[0].cell.choices()}
    lossy = [choice for choice in choices if not choice.startswith("vanilla_sd")]
    assert len(lossy) == 14
    assert all("divergence=fsd_js" in choice for choice in lossy)
    assert (
        "pyramid_assisted(divergence=fsd_js, num_draft_tokens=5, "
        "num_speculative_tokens=20, tau_target=0.5)"
    ) in choices
    assert (
        "fuzzy_sd(divergence=fsd_js, drafter=qualifier, num_speculative_tokens=15, tau=0.5)"
        in choices
    )
    assert all(not row.comparable for row in pyramidsd.tables(FULL)[1].rows if row.paper), (
        "the shipped pair's divergence is another"
    )


def test_static_sequences_and_budgets_have_the_papers_ratios() -> None:
    """Tables 2 and 3, code: budgets are varied with one sequence, and compared with the measured
    budget's."""
    rows = {
        row.what: round(row.paper or 0.0, 3)
        for table in duodecoding.tables(FULL)
        for row in table.rows
        if row.role.startswith(("always", "one sequence"))
    }
    assert rows == {
        "always 1 sequence, γ 24: speed over a dynamic number's": 0.995,
        "always 2 sequences, γ 24: speed over a dynamic number's": 0.94,
        "always 3 sequences, γ 24: speed over a dynamic number's": 0.9,
        "one sequence, 2 tokens shorter: speed over the measured length's": 0.982,
        "one sequence, 1 token shorter: speed over the measured length's": 0.999,
        "one sequence, 1 token longer: speed over the measured length's": 0.988,
        "one sequence, 2 tokens longer: speed over the measured length's": 0.978,
    }
    assert sum(duodecoding.TABLE_4.values()) == pytest.approx(1.0)


def test_mt_benchs_averages_are_of_the_pairs_own_tables() -> None:
    """SPIDE is the fastest on all, and calls the target less often than PEARL."""
    for i in range(len(spide.THEIR_PAIRS)):
        assert (
            max(values[i][0] for values in spide.MT_BENCH.values()) == spide.MT_BENCH["SPIDE"][i][0]
        )
        assert spide.MT_BENCH["SPIDE"][i][1] < spide.MT_BENCH["PEARL"][i][1]
    found = {
        table.cell.pair: table.title.partition(",")[0]
        for table in spide.counted(FULL)
        if table.cell.data == "chat"
    }
    assert found == {"smollm2-135m-near-copy-29": "Table 14", "smollm2-135m": "Table 4"}


@pytest.mark.parametrize(
    ("paper", "words"),
    [
        (
            "spide",
            (
                "contradicts itself",
                "GSM8K half",
                "Qwen3 1.7B & 32B",
                "Figures 6 and 7",
                "Figures 3 and 5",
                "averages",
                "64 tokens",
            ),
        ),
        ("sprinter", ("GPT2-Small & GPT2-XL", "λ .4", "LM1B")),
        ("csd", ("MATH500", "Qwen-2.5", "IFEval", "64 tokens")),
        ("pyramidsd", ("as a whole grid", "64 tokens", "2048", "zeros pad the draft")),
        ("duodecoding", ("Llama-2 7B", "five tasks", "64 tokens")),
    ],
)
def test_what_is_not_run_and_what_is_done_otherwise_is_listed(
    paper: str, words: tuple[str, ...]
) -> None:
    text = closing(PAPERS[paper], {})
    assert [word for word in words if word not in text] == []
