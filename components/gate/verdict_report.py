"""Verdicts for the terminal, for Markdown and for CI."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from draftwell.components.report.tables import markdown, rich_table
from draftwell.serving.bundle.verdict import FAILED, PASSED, UNDECIDED, Check, GateVerdict

if TYPE_CHECKING:
    from rich.table import Table

VERDICT_COLUMNS = ("check", "value", "threshold", "result", "detail")
SHOWN = {PASSED: "passed", FAILED: "FAILED", UNDECIDED: "NOT ENOUGH EVIDENCE"}


def verdict_rows(verdict: GateVerdict) -> list[list[str]]:
    """One row of text for each check, in `VERDICT_COLUMNS`."""
    return [
        [c.name, f"{c.value:.4g}", f"{c.threshold:.4g}", SHOWN[c.result], c.detail]
        for c in verdict.checks
    ]


def verdict_table(verdict: GateVerdict, title: str | None = None) -> Table:
    """A verdict as a table for the terminal."""
    result = f"gate: {SHOWN[verdict.result]}{prompts_hint(verdict)}"
    return rich_table(
        VERDICT_COLUMNS, verdict_rows(verdict), "; ".join([result, *verdict.notes]), title
    )


def prompts_hint(verdict: GateVerdict) -> str:
    """How many prompts would decide a verdict without enough evidence."""
    if verdict.result != UNDECIDED or verdict.prompts_needed is None:
        return ""
    return (
        f" (an estimated {verdict.prompts_needed} prompts would decide: limit "
        f"{verdict.prompts_needed})"
    )


def verdict_markdown(verdict: GateVerdict) -> str:
    """A verdict as Markdown, for a pull request or a run's description."""
    notes = "".join(f"- {note}\n" for note in verdict.notes)
    table = markdown(VERDICT_COLUMNS, verdict_rows(verdict))
    return f"**Gate: {verdict.result}{prompts_hint(verdict)}**\n\n{table}\n{notes}"


def verdicts_markdown(verdicts: Sequence[tuple[str, GateVerdict]]) -> str:
    """Several verdicts under their titles."""
    return "\n".join(f"### {title}\n\n{verdict_markdown(verdict)}" for title, verdict in verdicts)


def verdicts_junit(verdicts: Sequence[tuple[str, GateVerdict]]) -> str:
    """Several verdicts as JUnit XML, a suite each."""
    suites = ElementTree.Element("testsuites", name="gate")
    suites.extend(suite_of(verdict, title) for title, verdict in verdicts)
    return as_xml(suites)


def suite_of(verdict: GateVerdict, name: str) -> ElementTree.Element:
    """A verdict as a JUnit suite: a test case for each check, skipped ones for the notes.

    A check without enough evidence is an error there: its test case reached no result, and no
    reader shows that as passed.
    """
    results = [check.result for check in verdict.checks]
    suite = ElementTree.Element(
        "testsuite",
        name=name,
        tests=str(len(verdict.checks) + len(verdict.notes)),
        failures=str(results.count(FAILED)),
        errors=str(results.count(UNDECIDED)),
        skipped=str(len(verdict.notes)),
    )
    for check in verdict.checks:
        case = ElementTree.SubElement(suite, "testcase", classname=name, name=check.name)
        if not check.passed:
            ElementTree.SubElement(
                case, "failure" if check.result == FAILED else "error", message=check.detail
            )
    for note in verdict.notes:
        case = ElementTree.SubElement(suite, "testcase", classname=name, name=note)
        ElementTree.SubElement(case, "skipped", message=note)
    return suite


def error_markdown(message: str) -> str:
    """What is reported in place of a verdict after an error."""
    return f"**Gate error: there is no verdict**\n\n{message}\n"


def error_junit(message: str) -> str:
    """The same as JUnit XML: an error, not a failure."""
    check = Check("verdict", 0, 0, False, message, enough=False)
    return as_xml(suite_of(GateVerdict((check,)), "gate"))


def as_xml(element: ElementTree.Element) -> str:
    """A JUnit document."""
    return ElementTree.tostring(element, encoding="unicode", xml_declaration=True) + "\n"
