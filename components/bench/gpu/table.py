"""The table of docs/gpu.md: one row for each question, one column for each card; what no card has
answered yet is open."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from draftwell.components.bench.gpu.results import GpuResults, PartResult
from draftwell.components.report.tables import markdown, plural
from draftwell.serving.errors import DraftwellError
from draftwell.serving.files import write_text

BEGIN, END = "<!-- measured: `make gpu` writes this table -->\n", "<!-- end of the table -->\n"
OPEN = "open"
BYTES = 2
"""Of a parameter in bfloat16."""
Reports = Mapping[str, Any]


class Row(NamedTuple):
    """A question, what the answer should be, the part that measures it, and the answer in words."""

    question: str
    wanted: str
    part: str
    answer: Callable[[Reports, GpuResults], str]


def identity(reports: Reports, _: GpuResults) -> str:
    """How many strategies write the CPU's texts."""
    strategies = reports["bench"]["cpu_check"]["strategies"]
    wrong = [name for name, one in strategies.items() if one["wrong"]]
    near = sum(one["near_ties"] for one in strategies.values())
    same = f"{len(strategies) - len(wrong)} of {len(strategies)}"
    ties = f", {plural(near, 'near-tie')}" if near else ""
    return same + ties + (f"; not {', '.join(wrong)}" if wrong else "")


def invariance(reports: Reports, _: GpuResults) -> str:
    """How many answers differ from plain decoding's alone."""
    answers = [at for ways in reports["exactness"].values() for way in ways.values() for at in way]
    return f"{sum(at is not None for at in answers)} of {len(answers)}"


def plain(reports: Reports, results: GpuResults) -> str:
    """Tokens a second of plain decoding, the time of a step, and its share of the bandwidth."""
    report = reports["bench"]
    rate = report["strategies"]["autoregressive"]["decode_tokens_per_second"]
    words = f"{rate:.0f} tokens/s, {1e3 / rate:.2f} ms a step"
    parameters = report.get("padded_to") or reports["size"]["parameters"]
    share = parameters * BYTES * rate / (results.card.bandwidth * 1e9)
    return f"{words}, {share:.0%} of the bandwidth"


def speedups(reports: Reports, _: GpuResults) -> str:
    """Every strategy's speed over plain decoding, the fastest first."""
    found = {
        name: one for name, one in reports["bench"]["strategies"].items() if one.get("speedup")
    }
    del found["autoregressive"]
    ordered = sorted(found.items(), key=lambda item: -item[1]["speedup"])
    return ", ".join(f"{name} {one['speedup']:.2f}" for name, one in ordered)


def together(reports: Reports, _: GpuResults) -> str:
    """Tokens a second at once: plain decoding's, and the others' over it."""
    configs = reports["bench"]["configs"]
    base = configs["autoregressive"]["together"]
    others = [
        f"{name} {one['together'] / base:.2f}"
        for name, one in configs.items()
        if name != "autoregressive"
    ]
    return "; ".join([f"{base:,.0f} tokens/s", *others])


def choice(reports: Reports, _: GpuResults) -> str:
    """What the tuner chose, and how fast it is said to be."""
    found = reports["tuning"]
    return f"{found['strategy']}: {found['reason']}"


def judged(reports: Reports, _: GpuResults) -> str:
    """The gate's checks of the choice."""
    checks = reports["gate"]["checks"]
    failed = [check["name"] for check in checks if not check["passed"]]
    words = f"{len(checks) - len(failed)} of {len(checks)} checks passed"
    return words + (f"; not {', '.join(failed)}" if failed else "")


def served(reports: Reports, _: GpuResults) -> str:
    """Tokens a second of the server by number of clients."""
    rows = reports["server"]["rows"]
    return ", ".join(
        f"{row['clients']}: {row['tokens_per_second']:.0f}"
        + (f" ({row['failed']} failed)" if row["failed"] else "")
        for row in rows
    )


ROWS = (
    Row("strategies in float32 whose texts are the CPU's", "all", "float32", identity),
    Row("bfloat16 answers that differ with what runs beside them", "0", "bfloat16", invariance),
    Row("plain, 135 M", "at most 0.6 ms a step", "plain-135m", plain),
    Row("plain, padded to 7 B", "at least 80 % of the bandwidth", "plain-7b", plain),
    Row("7 B, greedy, × plain", "eagle3 or hybrid at least 1.8", "greedy-7b", speedups),
    Row("7 B, sampled (T = 0.8), × plain", "–", "sampled-7b", speedups),
    Row("8 requests at once, others × plain", "–", "together-8", together),
    Row("32 requests at once, others × plain", "10,000 tokens/s, 0.98", "together-32", together),
    Row("the tuner's choice after three minutes", "–", "tuning", choice),
    Row("the gate of that choice", "all", "gate", judged),
    Row("the bundle's server, tokens/s by clients", "–", "server", served),
    Row("7 B, draft on the CPU, × plain", "–", "cpu-draft", speedups),
)
"""In the order in which they are measured."""


def cell(row: Row, results: GpuResults) -> str:
    """One answer with where it comes from; open where the part was not measured, with why."""
    part = results.parts.get(row.part)
    if part is None:
        return OPEN
    if part.state != "measured":
        return f"{OPEN}: {part.why}".replace("|", "\\|")
    return f"{row.answer(part.reports, results)} ({origin(part)})"


def origin(part: PartResult) -> str:
    """Day and commit of a part."""
    return " ".join(filter(None, (part.at[:10], (part.commit or "")[:7])))


def gpu_table(found: Sequence[GpuResults]) -> str:
    """The table as Markdown, with a line on each card."""
    if not found:
        columns, cards = ["no card yet"], ""
        answers = [[OPEN] for _ in ROWS]
    else:
        columns = [f"{results.pair}, {results.card.name}" for results in found]
        answers = [[cell(row, results) for results in found] for row in ROWS]
        cards = "\n" + "".join(
            f"{one.card.name}: {one.card.gigabytes:.0f} GB, copies {one.card.bandwidth:,.0f} GB/s, "
            f"torch {one.card.torch}.\n"
            for one in found
        )
    rows = [[row.question, row.wanted, *cells] for row, cells in zip(ROWS, answers, strict=True)]
    return markdown(["what", "wanted", *columns], rows) + cards


def write_page(page: Path, found: Sequence[GpuResults]) -> None:
    """Put the table into a page, in place of the one there.

    Raises:
        DraftwellError: the page has no place for it (`no_place_for_table`).
    """
    text = page.read_text(encoding="utf-8") if page.is_file() else ""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise DraftwellError(
            f"{page} has no place for the table of `make gpu`: it stands between the lines "
            f"{BEGIN.strip()} and {END.strip()}",
            code="no_place_for_table",
        )
    write_text(page, f"{before}{begin}\n{gpu_table(found)}\n{end}{after}")
