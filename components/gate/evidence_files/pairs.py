"""Whether runs with speculation and without it can be compared: the same tool, load, model and
requests, and outputs of the same length."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from draftwell.components.gate.evidence_files.run import BenchmarkRun
from draftwell.serving.errors import DraftwellError

MOST_LENGTH_DIFFERENCE = 0.01
"""Share of all tokens by which outputs may differ: near-ties move an end of text, and some tools
count the tokens of the text again."""

Loads = dict[str, tuple[list[BenchmarkRun], list[BenchmarkRun]]]
"""Load → runs with speculation, and plain ones."""


def by_load(others: Sequence[BenchmarkRun], plains: Sequence[BenchmarkRun]) -> Loads:
    """The runs of both sides at each load.

    Raises:
        DraftwellError: runs cannot be compared, or prove nothing (`unlike_evidence`).
    """
    for run in (*others, *plains):
        refuse_failures(run)
    found: Loads = {}
    for side, runs in enumerate((others, plains)):
        for run in runs:
            found.setdefault(run.load, ([], []))[side].append(run)
    for load, (with_drafts, plain) in found.items():
        if not with_drafts or not plain:
            missing = "plain decoding" if with_drafts else "speculation"
            raise unlike(f"there is no run of {missing} with {load}: measure both at the same load")
        for run in (*with_drafts, *plain):
            refuse_other(plain[0], run)
        refuse_the_same(with_drafts)
        refuse_the_same(plain)
        refuse_other_requests(with_drafts, plain)
        if any(run.acceptance.drafted or run.acceptance.accepted for run in plain):
            raise unlike("the engine of plain_evidence drafted: start it without speculation")
    return found


def refuse_failures(run: BenchmarkRun) -> None:
    """Refuse a run in which a request failed, or none was completed."""
    if run.failed:
        raise unlike(
            f"{run.failed} of {run.completed + run.failed} requests of a run of {run.tool} failed: "
            "measure again when none does"
        )
    if not run.completed or not run.tokens or not run.seconds:
        raise unlike(f"a run of {run.tool} completed no request: measure again")


def refuse_the_same(runs: Sequence[BenchmarkRun]) -> None:
    """Refuse a run that is there twice, in copies of a file, say: it would vary by nothing."""
    if len({(run.seconds, run.requests) for run in runs}) < len(runs):
        raise unlike(f"a run of {runs[0].tool}, {runs[0].load}, is named twice: name it once")


def refuse_other(first: BenchmarkRun, run: BenchmarkRun) -> None:
    """Refuse a run by another tool, of another model or another number of requests, or under other
    conditions."""
    names = ("tool", "engine", "engine_version", "model", "completed")
    known = {name: getattr(first, name) for name in names} | first.conditions
    mine = {name: getattr(run, name) for name in names} | run.conditions
    for name in known | mine:
        if known.get(name) != mine.get(name):
            what = "number of requests" if name == "completed" else name.replace("_", " ")
            raise unlike(
                f"{what}: {mine.get(name)!r} in one run and {known.get(name)!r} in another: "
                "measure both in the same way"
            )


def refuse_other_requests(others: Sequence[BenchmarkRun], plains: Sequence[BenchmarkRun]) -> None:
    """Refuse other prompts, and outputs of other lengths."""
    detailed = are_detailed((*others, *plains))
    if detailed and len(others) != len(plains):
        raise unlike(
            f"{len(others)} runs with speculation and {len(plains)} without it: name as many of "
            "both"
        )
    one, other = lengths_of(plains, detailed), lengths_of(others, detailed)
    if one.keys() != other.keys():
        raise unlike("the requests are others: use the same data set, its order and its seed")
    differ, total = sum(abs(one[prompt] - other[prompt]) for prompt in one), sum(one.values())
    if differ > MOST_LENGTH_DIFFERENCE * total:
        raise unlike(
            f"outputs differ in length by {differ:g} of {total:g} tokens: let both sides ignore "
            "the end of text (ignore_eos), and check that both serve the same model"
        )


def are_detailed(runs: Sequence[BenchmarkRun]) -> bool:
    """Whether every request of every run is known."""
    return all(len(run.requests) == run.completed for run in runs)


def lengths_of(runs: Sequence[BenchmarkRun], detailed: bool) -> Mapping[str, float]:
    """Prompt → tokens of its outputs in all runs; without details the tokens of a run."""
    if not detailed:
        return {"": sum(run.tokens for run in runs) / len(runs)}
    found: Counter[str] = Counter()
    for run in runs:
        for request in run.requests:
            found[request.prompt] += request.tokens
    return found


def unlike(why: str) -> DraftwellError:
    """The error about runs that cannot be compared."""
    return DraftwellError(why, code="unlike_evidence")
