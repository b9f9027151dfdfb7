"""The gate's verdict on what benchmark tools measured: the speed over plain decoding at each load,
with an interval. Nothing is measured here, and what the files cannot show is named as skipped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from pydantic import Field

from draftwell.components.bench.engines.measure import Side
from draftwell.components.engines.port import Acceptance, Message
from draftwell.components.gate.bench_checks import speed_check
from draftwell.components.gate.engine_checks import OUTPUTS, few_prompts
from draftwell.components.gate.evidence import Interval
from draftwell.components.gate.evidence_files.pairs import are_detailed, by_load
from draftwell.components.gate.evidence_files.run import BenchmarkRun, Request
from draftwell.components.report.intervals import FEWEST_RUNS, Ratio, ratio_of, ratio_of_runs
from draftwell.serving.bundle.verdict import Check, GateVerdict, Skipped, Thresholds
from draftwell.serving.errors import DraftwellError


class LoadFigure(Message):
    """The speed over plain decoding at one load, and what explains it."""

    load: str
    prompts: int = Field(description="distinct ones, which the interval is over; 0: over runs")
    at_once: int = Field(1, description="requests that were answered at once, in the mean")
    runs: int
    ratio: float
    low: float
    high: float
    tokens_per_second: float = Field(description="of all requests together")
    plain_tokens_per_second: float
    acceptance: Acceptance
    first_token_ratio: float | None = Field(description="mean time over plain decoding's")
    token_ratio: float | None = Field(description="mean time of each further token, likewise")


def judge_evidence(
    others: Sequence[BenchmarkRun], plains: Sequence[BenchmarkRun], thresholds: Thresholds
) -> tuple[GateVerdict, list[LoadFigure]]:
    """Judge runs with speculation beside plain ones.

    Raises:
        DraftwellError: they cannot be compared (`unlike_evidence`), or there is no threshold of
            speed (`no_threshold`).
    """
    least = thresholds.min_speedup_lower_bound
    if least is None:
        raise DraftwellError(
            "evidence is judged by min_speedup_lower_bound: add it to registry/gates.yaml",
            code="no_threshold",
        )
    parts: list[Check | Skipped | str] = []
    figures: list[LoadFigure] = []
    for load, (with_drafts, plain) in by_load(others, plains).items():
        name = f"speed over plain decoding, {load}"
        if not are_detailed((*with_drafts, *plain)) and (
            min(len(with_drafts), len(plain)) < FEWEST_RUNS
        ):
            parts.append(too_little(name, least, plain[0]))
            continue
        figure = compared(load, with_drafts, plain)
        parts.append(judged(name, figure, least))
        parts.append(explained(figure))
        figures.append(figure)
    parts += [
        Skipped(OUTPUTS, "a benchmark's results hold no tokens to compare"),
        Skipped("regression", "the champion was not measured beside it"),
    ]
    return GateVerdict.of(parts), figures


def judged(name: str, figure: LoadFigure, least: float) -> Check:
    """Whether the lower end of a load's speed reaches the threshold."""
    found = Interval(figure.ratio, figure.low, figure.high, figure.prompts or figure.runs)
    check = speed_check(name, found, least, "plain decoding")
    if figure.prompts:
        return few_prompts(check, figure.prompts, figure.at_once)
    if check.enough:
        return check
    why = f"{found.value:.2f} x plain decoding {found}: not enough evidence from {figure.runs} runs"
    return replace(check, detail=f"{why}, name more of them", prompts_needed=None)


def too_little(name: str, least: float, run: BenchmarkRun) -> Check:
    """The check of runs whose requests were not saved, and which are too few for an interval."""
    detail = (
        f"the sums of fewer than {FEWEST_RUNS} runs have no interval: let {run.tool} save every "
        f"request ({run.details}), or name {FEWEST_RUNS} runs of each"
    )
    return Check(name, 0.0, least, False, detail, enough=False)


def compared(
    load: str, others: Sequence[BenchmarkRun], plains: Sequence[BenchmarkRun]
) -> LoadFigure:
    """The figure of a load: over prompts where every request is known, else over runs."""
    answers, plain_answers = requests_of(others), requests_of(plains)
    prompts, at_once = 0, 1
    if are_detailed((*others, *plains)):
        at_once = max(overlap_of(run) for run in (*others, *plains))
        plain, other = sides_of(plain_answers, answers)
        ratio, prompts = paired(plain, other, at_once), len(plain.seconds)
    else:
        speeds, plain_speeds = ([speed_of([run]) for run in runs] for runs in (others, plains))
        ratio = ratio_of_runs(plain_speeds, speeds)
    return LoadFigure(
        load=load,
        prompts=prompts,
        at_once=at_once,
        runs=len(others),
        **ratio._asdict(),
        tokens_per_second=speed_of(others),
        plain_tokens_per_second=speed_of(plains),
        acceptance=Acceptance.total(run.acceptance for run in others),
        first_token_ratio=mean_ratio(
            [one.first_token_seconds for one in answers],
            [one.first_token_seconds for one in plain_answers],
        ),
        token_ratio=mean_ratio(
            [one.token_seconds for one in answers], [one.token_seconds for one in plain_answers]
        ),
    )


def requests_of(runs: Sequence[BenchmarkRun]) -> list[Request]:
    """The requests of all runs."""
    return [request for run in runs for request in run.requests]


def overlap_of(run: BenchmarkRun) -> int:
    """How many requests were answered at once in the mean, at least 1."""
    return max(1, round(sum(request.seconds for request in run.requests) / run.seconds))


def speed_of(runs: Sequence[BenchmarkRun]) -> float:
    """Tokens a second of all requests together."""
    return sum(run.tokens for run in runs) / sum(run.seconds for run in runs)


def sides_of(plains: Sequence[Request], others: Sequence[Request]) -> tuple[Side, Side]:
    """Seconds and tokens of each distinct prompt, plain and with drafts, in the order in which
    plain decoding was sent them."""
    places: dict[str, int] = {}
    for request in plains:
        places.setdefault(request.prompt, len(places))
    sides = []
    for requests in (plains, others):
        side = Side(seconds=[0.0] * len(places), tokens=[0] * len(places))
        for request in requests:
            side.seconds[places[request.prompt]] += request.seconds
            side.tokens[places[request.prompt]] += request.tokens
        sides.append(side)
    return sides[0], sides[1]


def paired(plain: Side, other: Side, at_once: int) -> Ratio:
    """How many times as fast requests are answered. Requests that are answered at once share the
    machine, so the interval reaches as far as that over groups of so many, too."""
    each = ratio_of(plain, other)
    groups = ratio_of(in_groups(plain, at_once), in_groups(other, at_once))
    return Ratio(each.ratio, min(each.low, groups.low), max(each.high, groups.high))


def in_groups(side: Side, size: int) -> Side:
    """Sums over every `size` prompts that follow one another."""
    starts = range(0, len(side.seconds), size)
    return Side(
        seconds=[sum(side.seconds[start : start + size]) for start in starts],
        tokens=[sum(side.tokens[start : start + size]) for start in starts],
    )


def mean_ratio(times: Sequence[float | None], plain: Sequence[float | None]) -> float | None:
    """Ratio of two means; None where a time is missing on one side."""
    known, base = ([one for one in part if one is not None] for part in (times, plain))
    if not known or len(known) != len(times) or len(base) != len(plain) or not sum(base):
        return None
    return fmean(known) / fmean(base)


def explained(figure: LoadFigure) -> str:
    """What explains a speed and is not judged, as far as the files say it."""
    acceptance = figure.acceptance
    known = (
        (figure.first_token_ratio, ".2f", "x plain decoding's time to first token"),
        (figure.token_ratio, ".2f", "x its time for each further token"),
        (acceptance.rate, ".0%", "of drafted tokens accepted"),
        (acceptance.length, ".2f", "tokens a round"),
    )
    said = [f"{value:{form}} {what}" for value, form, what in known if value is not None]
    return f"{figure.load}, not judged: {', '.join(said) or 'the files say nothing of drafts'}"
