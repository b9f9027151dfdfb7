"""The table of docs/gpu.md: answers of the parts' reports, and what is open."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from draftwell.components.bench.gpu.card import Card
from draftwell.components.bench.gpu.results import GpuResults, PartResult
from draftwell.components.bench.gpu.table import BEGIN, END, ROWS, gpu_table, write_page
from tests.support.errors import raises_code
from tests.support.paths import REPO

CARD = Card(
    name="Fake 1",
    device_class="cuda-fake-1",
    gigabytes=80,
    bandwidth=3000,
    cuda=None,
    torch="2.11.0",
)


def measured(**reports: Any) -> PartResult:
    return PartResult(
        state="measured",
        code="c",
        commit="abcdef0123",
        at="2026-11-29T08:00:00+00:00",
        reports=reports,
    )


def bench(**strategies: float) -> dict[str, Any]:
    return {
        "strategies": {
            name: {"speedup": one, "decode_tokens_per_second": 200.0}
            for name, one in {"autoregressive": 1.0, **strategies}.items()
        }
    }


def answer(part: str, result: PartResult) -> str:
    """The answer in the row of a part."""
    table = gpu_table([GpuResults(pair="tiny", card=CARD, parts={part: result})])
    row = [one.part for one in ROWS].index(part)
    return table.splitlines()[2 + row].split(" | ")[-1].removesuffix(" |")


CHECKED = {
    "vanilla_sd": {"identical": 3, "near_ties": 0, "wrong": []},
    "suffix": {"identical": 2, "near_ties": 1, "wrong": []},
    "hybrid": {"identical": 2, "near_ties": 0, "wrong": ["p3"]},
}
GATED = {"checks": [{"name": "speedup", "passed": True}, {"name": "size", "passed": False}]}
SERVED = {
    "rows": [
        {"clients": 1, "tokens_per_second": 100.4, "failed": 0},
        {"clients": 8, "tokens_per_second": 700, "failed": 2},
    ]
}


@pytest.mark.parametrize(
    ("part", "reports", "words"),
    [
        (
            "float32",
            {"bench": {"cpu_check": {"strategies": CHECKED}}},
            "2 of 3, 1 near-tie; not hybrid",
        ),
        (
            "bfloat16",
            {"exactness": {"eagle3": {"alone": [None, 4], "beside": [None, None]}}},
            "1 of 4",
        ),
        # 7e9 parameters of 2 bytes, 200 times a second, of 3,000 GB/s
        (
            "plain-7b",
            {"bench": bench() | {"padded_to": 7_000_000_000}},
            "200 tokens/s, 5.00 ms a step, 93% of the bandwidth",
        ),
        (
            "plain-135m",
            {"bench": bench(), "size": {"parameters": 135_000_000}},
            "200 tokens/s, 5.00 ms a step, 2% of the bandwidth",
        ),
        ("greedy-7b", {"bench": bench(suffix=1.1, eagle3=1.84)}, "eagle3 1.84, suffix 1.10"),
        (
            "together-32",
            {
                "bench": {
                    "configs": {
                        "autoregressive": {"together": 10500.0},
                        "eagle3": {"together": 10290.0},
                    }
                }
            },
            "10,500 tokens/s; eagle3 0.98",
        ),
        (
            "tuning",
            {"tuning": {"strategy": "eagle3", "reason": "it is faster"}},
            "eagle3: it is faster",
        ),
        ("gate", {"gate": GATED}, "1 of 2 checks passed; not size"),
        ("server", {"server": SERVED}, "1: 100, 8: 700 (2 failed)"),
    ],
)
def test_a_part_is_answered_in_words(part: str, reports: dict[str, Any], words: str) -> None:
    assert answer(part, measured(**reports)) == f"{words} (2026-11-29 abcdef0)"


def test_what_was_not_measured_is_open_with_its_reason() -> None:
    late = measured().model_copy(update={"state": "stopped", "why": "not done after 60 s"})
    assert answer("gate", late) == "open: not done after 60 s"
    for table in (gpu_table([]), gpu_table([GpuResults(pair="tiny", card=CARD)])):
        assert table.count("| open |") == len(ROWS)


def test_a_column_for_each_card() -> None:
    other = CARD.model_copy(update={"name": "Fake 2"})
    table = gpu_table([GpuResults(pair="tiny", card=card) for card in (CARD, other)])
    assert table.startswith("| what | wanted | tiny, Fake 1 | tiny, Fake 2 |\n")
    assert "Fake 2: 80 GB, copies 3,000 GB/s" in table


def test_the_table_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    page = tmp_path / "gpu.md"
    page.write_text(f"before\n{BEGIN}old\n{END}after\n")
    write_page(page, [])
    write_page(page, [])
    text = page.read_text()
    assert text.startswith(f"before\n{BEGIN}\n| what |")
    assert text.endswith(f"\n{END}after\n")
    assert "old" not in text
    page.write_text("no table here")
    with raises_code("no_place_for_table", str(page)):
        write_page(page, [])


def test_the_page_of_the_project_has_its_place() -> None:
    text = (REPO / "docs" / "gpu.md").read_text(encoding="utf-8")
    assert text.index(BEGIN) < text.index(END)
