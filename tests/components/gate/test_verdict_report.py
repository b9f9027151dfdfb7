"""A verdict in three forms."""

import io
import json
from xml.etree import ElementTree

from rich.console import Console

from draftwell.components.gate.verdict_report import verdict_markdown, verdict_table, verdicts_junit
from draftwell.serving.bundle.verdict import Check, GateVerdict
from draftwell.serving.files import write_json

OPEN = Check("regression", 1.0, 0.95, False, "1.00 x the champion", enough=False, prompts_needed=40)
VERDICT = GateVerdict(
    (Check("speedup", 1.2, 1.0, True, "fast"), Check("quality", 0.5, 0.9, False, "<bad> & worse")),
    ("one note",),
)


def shown(table) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(table)
    return console.file.getvalue()


def test_a_verdict_in_three_forms():
    assert "gate: FAILED" in shown(verdict_table(VERDICT))
    assert "**Gate: failed**" in verdict_markdown(VERDICT)
    assert "- one note" in verdict_markdown(VERDICT)
    suite = ElementTree.fromstring(verdicts_junit([("gate", VERDICT)]))[0]
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("3", "1", "1")
    failure = suite.find("testcase/failure")
    assert failure is not None
    assert failure.get("message") == "<bad> & worse"


def test_not_enough_evidence_is_shown_as_neither_passed_nor_failed():
    verdict = GateVerdict((Check("speedup", 1.2, 1.0, True, "fast"), OPEN))
    assert "gate: NOT ENOUGH EVIDENCE (an estimated 40 prompts would decide: limit 40)" in shown(
        verdict_table(verdict)
    )
    assert "**Gate: not enough evidence (an estimated 40 prompts" in verdict_markdown(verdict)
    suite = ElementTree.fromstring(verdicts_junit([("gate", verdict)]))[0]
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("2", "0", "1")
    assert suite.find("testcase[@name='regression']/error") is not None


def test_reports_are_written_whole_or_not_at_all(tmp_path):
    path = write_json(tmp_path / "r.json", {"a": 1.5})
    assert json.loads(path.read_text()) == {"a": 1.5}
    assert list(tmp_path.iterdir()) == [path]
