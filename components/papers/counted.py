"""Cells that are counted: contenders decode for real, many requests at once, on the target as it
is.

Padding a target with zeros changes no token, so texts, acceptance and calls are those of the padded
pair. Nothing is timed: seconds are passes at the paper's ratio of costs, a target pass taking 1
whatever it reads, and no pass slows another.

Every text is kept when it is finished, so that a run that was cut short resumes with the next, and
a cell of more prompts decodes only those that are new. Plain decoding's texts depend on the target
alone and are shared by all cells of that target. What a strategy learns while it decodes is
forgotten after each request: no count depends on which requests run together.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from draftwell.components.bench.answers.accuracy import checked, task_accuracy
from draftwell.components.bench.bench import subject
from draftwell.components.bench.interleaved import REFERENCE, Progress
from draftwell.components.bench.metrics import overlap
from draftwell.components.bench.schema import (
    SCHEMA,
    BenchEntry,
    BenchReport,
    Frozen,
    Machine,
    PromptRow,
    ReportSettings,
)
from draftwell.components.collect.decoding import Request
from draftwell.components.papers.calibrated import Calibrated, Point, calibrated
from draftwell.components.papers.cells import Cell
from draftwell.components.papers.made_of import MadeOf
from draftwell.components.papers.replays import SLOTS
from draftwell.components.prompts.overlap import hash_of
from draftwell.components.prompts.prompt import Prompt, ids_of
from draftwell.components.report.machine import describe_machine
from draftwell.components.results import Results
from draftwell.serving.files import json_digest
from draftwell.serving.runtime.engine.engine import Engine, Job
from draftwell.serving.runtime.pair import LoadedPair
from draftwell.serving.runtime.strategies import (
    Strategy,
    StrategyChoice,
    StrategyResources,
    build_strategy,
    find_strategy,
)

AT_ONCE = SLOTS
"""Requests in flight, and prompts that all contenders decode before the next come: whenever a run
is cut short, its contenders have nearly the same prompts behind them."""


class Text(Frozen):
    """What one request wrote, and the passes that it asked for."""

    tokens: tuple[int, ...]
    target_calls: int
    draft_calls: int = 0
    qualifier_calls: int = 0
    drafted: int = 0
    accepted: int = 0
    judged: int = 0
    argmax: int
    """Tokens that are the target's first choice."""
    log_likelihood: float
    """Nats, by the target at temperature 1."""


class Counted(NamedTuple):
    """What a cell counts.

    Args:
        points: contender → where its threshold was put, of a cell that compares at one run length.
    """

    report: BenchReport
    points: dict[str, Point]


@dataclass(frozen=True)
class Contender:
    """A strategy with the texts that it has written.

    Args:
        texts: prompt and seed → text.
    """

    label: str
    choice: StrategyChoice
    strategy: Strategy
    texts: Results[Text]


def counted(
    cell: Cell,
    pair: LoadedPair,
    prompts: Sequence[Prompt],
    resources: StrategyResources,
    folder: Path,
    *,
    made_of: MadeOf,
    training: Mapping[str, Sequence[Prompt]],
    progress: Progress | None = None,
) -> Counted:
    """Decode with a cell's contenders, and plainly.

    Args:
        cell: with `counted`.
        folder: of the run, which keeps texts and calibrations.
        made_of: whose artifacts and target texts are kept under.
        training: name of an artifact that is made for the cell → prompts that it is made from.
    """
    made = calibrated(cell, pair, training, resources, folder, progress)
    contenders = contenders_of(cell, pair, made, folder / "counts", made_of)
    base = pair.sampling(max_tokens=cell.max_tokens, temperature=cell.temperature, logprobs=1)
    requests: dict[str, Request] = {
        f"{hash_of(prompt)}-{cell.seed + place}": (
            ids_of(pair, prompt),
            replace(base, seed=cell.seed + place),
        )
        for place, prompt in enumerate(prompts)
    }
    decode_missing(pair, contenders, requests, progress)
    entries = {one.label: entry_of(one, cell, pair, prompts, list(requests)) for one in contenders}
    answers = {
        one.label: checked(prompts, [pair.decode(list(one.texts[key].tokens)) for key in requests])
        for one in contenders
    }
    report = BenchReport(
        **subject(pair, prompts),
        schema_version=SCHEMA,
        machine=Machine(**describe_machine(pair)),
        strategies={
            label: BenchEntry(
                **entry, tasks=task_accuracy(prompts, answers[label], answers[REFERENCE])
            )
            for label, entry in entries.items()
        },
        settings=ReportSettings(max_tokens=cell.max_tokens, temperature=cell.temperature, runs=1),
    )
    return Counted(report, made.points)


def contenders_of(
    cell: Cell, pair: LoadedPair, made: Calibrated, folder: Path, made_of: MadeOf
) -> list[Contender]:
    """Plain decoding, the cell's choices, and those with a verifier of the cell's own."""
    choices = {REFERENCE: StrategyChoice(REFERENCE)}
    choices |= {label: choice for choice, label in cell.known_labels.items()}
    used = dict.fromkeys(choices, made.resources)
    for label, (choice, resources) in made.further.items():
        choices[label], used[label] = choice, resources
    asked = [cell.max_tokens, cell.temperature, pair.dtype]
    found = []
    for label, choice in choices.items():
        resources = replace(used[label], deterministic=True)
        strategy = build_strategy(choice.name, dict(choice.parameters), resources)
        digests = {**made_of.artifacts, **made.digests}
        kinds = {kind: digests.get(kind, "") for kind in strategy.reads()}
        subject_of = (
            [made_of.target, asked]
            if label == REFERENCE
            else [pair.fingerprint, asked, str(choice), kinds, made.digests.get(label, "")]
        )
        name = f"{choice.name}-{json_digest(subject_of)[:12]}.jsonl"
        found.append(
            Contender(label, choice, strategy, Results[Text](folder / name, subject_of, Text))
        )
    return found


def decode_missing(
    pair: LoadedPair,
    contenders: Sequence[Contender],
    requests: Mapping[str, Request],
    progress: Progress | None,
) -> None:
    """Have all contenders decode a few requests, then the next few."""
    keys, total = list(requests), len(requests) * len(contenders)
    done = sum(key in one.texts for one in contenders for key in keys)
    for start in range(0, len(keys), AT_ONCE):
        for one in contenders:
            missing = {
                key: requests[key] for key in keys[start : start + AT_ONCE] if key not in one.texts
            }
            for key, text in finished_texts(pair.engine(), missing, one.strategy):
                one.texts.put(key, text)
                done += 1
                if progress:
                    progress(done, total, one.label)


def finished_texts(
    engine: Engine, requests: Mapping[str, Request], strategy: Strategy
) -> Iterator[tuple[str, Text]]:
    """Each request's text as soon as it is finished."""
    waiting, running, rated = deque(requests.items()), dict[str, Job](), set[str]()
    try:
        while waiting or running:
            while waiting and len(running) < AT_ONCE:
                key, (ids, sampling) = waiting.popleft()
                running[key] = engine.submit(ids, sampling, strategy)
            engine.step()
            # the pass that rates what the target has not read is none of the strategy's
            rated |= {
                key
                for key, job in running.items()
                if job.session.text.finished and job.session.unrated
            }
            for key, job in [item for item in running.items() if item[1].finished]:
                del running[key]
                if job.error:
                    raise job.error
                yield key, text_of(job, rating_passes=key in rated)
    finally:
        for job in running.values():  # the slots must come back
            engine.cancel(job)
        engine.close()


def text_of(job: Job, *, rating_passes: bool) -> Text:
    """A finished request's text and counters."""
    stats, emitted = job.session.stats, job.session.emitted(0)
    ratings = [(one.id, one.rating) for one in emitted if one.rating is not None]
    return Text(
        tokens=tuple(one.id for one in emitted),
        target_calls=stats.target_calls - rating_passes,
        draft_calls=stats.draft_calls,
        qualifier_calls=stats.qualifier_calls,
        drafted=stats.drafted,
        accepted=stats.accepted,
        judged=stats.judged,
        argmax=sum(token == rating.top[0][0] for token, rating in ratings),
        log_likelihood=sum(rating.logprob for _, rating in ratings),
    )


def entry_of(
    one: Contender, cell: Cell, pair: LoadedPair, prompts: Sequence[Prompt], keys: Sequence[str]
) -> dict[str, object]:
    """A contender's counters as the fields of a bench's entry; the prompt's reading takes one
    target pass."""
    costs = {str(role): cost for role, cost in (cell.counted or {}).items()}
    if (drafter := one.choice.parameters.get("drafter")) is not None:
        costs["draft"] = costs[str(drafter)]
    texts = [one.texts[key] for key in keys]
    rows = tuple(
        PromptRow(
            prompt_id=prompt.id,
            seconds=1 + passes(text, costs),
            tokens=len(text.tokens),
            ttft_ms=1e3,
            target_calls=text.target_calls,
            accepted=text.accepted,
            judged=text.judged,
            target_argmax=text.argmax,
            log_likelihood=text.log_likelihood,
            **overlap(pair.decode(list(text.tokens)), prompt.reference),
        )
        for prompt, text in zip(prompts, texts, strict=True)
    )
    drafted, judged = (sum(getattr(text, name) for text in texts) for name in ("drafted", "judged"))
    accepted = sum(text.accepted for text in texts)
    return {
        "strategy": one.choice.name,
        "parameters": {name: str(value) for name, value in one.choice.parameters.items()},
        "lossless": find_strategy(one.choice.name).lossless,
        "per_prompt": rows,
        "acceptance_rate": accepted / judged if judged else None,
        "draft_efficiency": accepted / drafted if drafted else None,
    }


def passes(text: Text, costs: Mapping[str, float]) -> float:
    """What a text's passes behind the prompt's take, in target passes."""
    return (
        text.target_calls
        + text.draft_calls * costs.get("draft", 0.0)
        + text.qualifier_calls * costs.get("qualifier", 0.0)
    )
