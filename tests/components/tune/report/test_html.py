"""The HTML report of a tuning: whole, self-contained, escaped, and with every figure of the
choice."""

from __future__ import annotations

import html
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from draftwell.components.calibrate.plots import rejection_tail
from draftwell.components.report.drawing import note_artifact
from draftwell.components.tune.evidence import TuningEvidence
from draftwell.components.tune.report.html import CAPTIONS, tuning_html, write_tuning_report
from draftwell.components.tune.report.tables import SHOWN_TRIALS, choice_figures, tuning_tables
from draftwell.serving.runtime.strategies import StrategyChoice
from tests.support.errors import raises_code
from tests.support.loop.tuning_evidence import LOSSLESS, LOSSY, PLAIN, trial

VOID = {"meta", "img", "br", "link", "input", "hr"}


class Page(HTMLParser):
    """Reads a page strictly: tags must nest, and what is read is kept."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [
            value or ""
            for name, value in attrs
            if name in ("src", "href", "srcset", "data", "action", "poster")
        ]
        assert not [name for name, _ in attrs if name.startswith("on")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def page_of(evidence: dict[str, Any]) -> Page:
    read = TuningEvidence.read(evidence)
    return Page(tuning_html(read, [], pair="tiny"))


@pytest.mark.parametrize("evidence", [LOSSLESS, LOSSY], ids=["lossless", "lossy"])
def test_a_report_is_whole_and_needs_nothing_else(tmp_path: Path, evidence: dict[str, Any]) -> None:
    rejection_tail([5, 2, 1], tmp_path / "rejections.png")
    note_artifact(tmp_path / "rejections.png", "a" * 64)
    file = write_tuning_report(TuningEvidence.read(evidence), tmp_path, pair="tiny")
    assert file == tmp_path / "tuning.html"
    text = file.read_text()
    page = Page(text)
    assert page.open == []
    assert text.lstrip().lower().startswith("<!doctype html>")
    assert page.addresses
    assert [
        address
        for address in page.addresses
        if not address.startswith(("data:image/png;base64,iVBOR", "#"))
    ] == []
    assert page.tags.count("img") == len(list(tmp_path.glob("tuning_*.png"))) + (
        "artifacts" in evidence
    )
    assert "script" not in page.tags
    assert "link" not in page.tags
    assert not re.search(r"https?:|url\(|@import", re.sub(r"base64,[\w+/=]+", "", text))
    assert "prefers-color-scheme: dark" in text
    assert len(text) < 3_000_000


def test_pictures_are_of_the_artifacts_that_were_tuned_with(tmp_path: Path) -> None:
    """A verifier that was trained since, a picture without a stamp, one that was drawn anew, and no
    picture at all."""
    evidence = {
        **LOSSLESS,
        "artifacts": {
            "acceptance_table": "a" * 64,
            "verifier": "b" * 64,
            "correction_memory": "c" * 64,
        },
    }
    for name, digest in (
        ("roc", "d" * 64),
        ("acceptance_by_confidence", "a" * 64),
        ("reliability", ""),
    ):
        rejection_tail([5, 2, 1], tmp_path / f"{name}.png")
        if digest:
            note_artifact(tmp_path / f"{name}.png", digest)
    (tmp_path / "rejections.png").write_bytes(b"no picture")

    def captions() -> set[str]:
        text = html.unescape(
            write_tuning_report(TuningEvidence.read(evidence), tmp_path).read_text()
        )
        return {
            stem
            for stem, caption in CAPTIONS.items()
            if caption in text and not stem.startswith("tuning_")
        }

    assert captions() == {"acceptance_by_confidence"}
    note_artifact(tmp_path / "roc.png", "b" * 64)
    assert captions() == {"acceptance_by_confidence", "roc"}
    rejection_tail([4], tmp_path / "roc.png")
    assert captions() == {"acceptance_by_confidence"}


@pytest.mark.parametrize(
    ("evidence", "values"),
    [
        (
            LOSSLESS,
            [
                "spide(parallel=True, tau=0.4)",
                "1.57 [1.52, 1.64]",
                "47.6",
                "21.00",
                "20.00",
                "4.8%",
                "0.500",
                "0.94",
            ],
        ),
        (
            LOSSY,
            [
                "csd(num_speculative_tokens=6, tau=0.05)",
                "1.89 [1.84, 1.96]",
                "57.1",
                "17.50",
                "7.0%",
                "0.80",
            ],
        ),
    ],
)
def test_every_figure_of_the_choice_appears(evidence: dict[str, Any], values: list[str]) -> None:
    shown = choice_figures(TuningEvidence.read(evidence))
    text = page_of(evidence).text
    assert set(values[1:]) <= set(shown.values())
    for value in [*values, evidence["reason"]]:
        assert value in text


def test_what_was_tried_measured_dropped_and_left_out_is_there() -> None:
    text = page_of(LOSSLESS).text
    for words in (
        "place 2 of 2",
        "it is lossy, and only lossless strategies are allowed",
        "Tried (10)",
        "7" * 64,
        "cpu-test",
        "max_quality_loss 0.1",
        "vanilla_sd(num_speculative_tokens=1)",
        "leaves out 5.0%",
    ):
        assert words in text
    assert text.count("spide(parallel=True, tau=0.4) ← chosen") == text.count("← chosen") == 1
    assert "None" not in text.replace("num_speculative_tokens=None", "")
    rows = tuning_tables(TuningEvidence.read(LOSSLESS))["Measured"]
    assert rows[0]["config"] == "autoregressive"
    (row,) = [row for row in rows if "chosen" in row["config"]]
    assert row["confirmed"] == "yes"
    assert row["times as fast"].startswith("1.57"), "not the rung's 1.48, which luck chose"


def test_names_from_outside_are_text() -> None:
    page = page_of(LOSSLESS)
    assert "<b>bold</b>" in page.text
    assert "A <i>CPU</i>" in page.text
    assert not {"b", "i"} & set(page.tags)
    assert "<script>" in page_of({**LOSSLESS, "reason": "<script>alert(1)</script>"}).text


def test_plain_decoding_as_the_choice_and_a_choice_that_was_not_measured() -> None:
    assert "30.3" in page_of({**LOSSLESS, "choice": PLAIN}).text
    nothing = {**LOSSLESS, "measured": [], "rungs": [], "confirmation": {}, "trials": []}
    assert choice_figures(TuningEvidence.read(nothing)) == {}
    assert "spide(parallel=True, tau=0.4)" in page_of(nothing).text


def test_thousands_of_trials_stay_readable_and_small() -> None:
    many = TuningEvidence.read(
        {
            **LOSSLESS,
            "trials": [trial("svip", 20 + i / 100, 0.5, threshold=i / 5000) for i in range(5000)],
        }
    )
    text = tuning_html(many, [])
    assert len(text) < 500_000
    assert f"The fastest {SHOWN_TRIALS} of 5000." in Page(text).text


def test_replays_that_are_estimates_are_reported_with_the_fix() -> None:
    beyond = {"pearl": 2, "vanilla_sd": 1}
    rollouts = {"length": 16, "beyond": beyond, "inexact": 3, "replayed": 10}
    text = page_of(LOSSLESS | {"rollouts": rollouts}).text
    for part in ("3 of 10 replays", "of 16 tokens", "2 of pearl, 1 of vanilla_sd", "rollout"):
        assert part in text
    enough = LOSSLESS | {"rollouts": {**rollouts, "beyond": {}, "inexact": 0}}
    assert "rollout=" not in page_of(enough).text


def test_evidence_of_another_shape_is_refused_by_name() -> None:
    for broken in (
        {**LOSSLESS, "trials": [{"strategy": "svip"}]},
        {"reason": "no choice"},
        {**LOSSLESS, "rungs": 3},
    ):
        with raises_code("evidence_unreadable", "tuning.json", "draftwell step choose"):
            TuningEvidence.read(broken, "tuning.json")


@pytest.mark.parametrize("evidence", [LOSSLESS, LOSSY], ids=["lossless", "lossy"])
def test_evidence_is_written_as_it_was_read(evidence: dict[str, Any]) -> None:
    assert TuningEvidence.read(evidence).to_json() == evidence


def test_a_tuning_json_names_its_choice_at_the_top() -> None:
    read = TuningEvidence.read({"strategy": "svip", "parameters": {}, "trials": []})
    assert read.choice == StrategyChoice("svip")
