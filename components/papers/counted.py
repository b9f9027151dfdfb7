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

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from draftwell.components.bench.answers.accuracy import checked, task_accuracy
from draftwell.components.bench.interleaved import REFERENCE, Progress
from draftwell.components.bench.metrics import overlap
from draftwell.components.bench.schema import BenchEntry, Frozen, PromptRow
from draftwell.components.collect.decoding import Request
from draftwell.components.papers.calibrated import Calibrated, calibrated
from draftwell.components.papers.cells import Cell
from draftwell.components.papers.plan import Planned
from draftwell.components.papers.replays import SLOTS, entry_of, report_of
from draftwell.components.prompts.overlap import hash_of
from draftwell.components.prompts.prompt import Prompt, ids_of
from draftwell.components.results import Results
from draftwell.serving.files import json_digest
from draftwell.serving.runtime.engine.engine import Engine, Job
from draftwell.serving.runtime.pair import LoadedPair
from draftwell.serving.runtime.strategies import (
    Strategy,
    StrategyChoice,
    StrategyResources,
    build_strategy,
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


class Contender(NamedTuple):
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
    planned: Planned,
    pair: LoadedPair,
    resources: StrategyResources,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Decode with a cell's contenders, and plainly.

    Args:
        cell: with `counted`.
    Returns:
        fields of the cell's file.
    """
    prompts = planned.chosen.prompts
    made = calibrated(cell, planned, pair, resources, progress)
    contenders = [contender(cell, planned, pair, label, one) for label, one in made.items()]
    base = pair.sampling(max_tokens=cell.max_tokens, temperature=cell.temperature, logprobs=1)
    requests: dict[str, Request] = {
        f"{hash_of(prompt)}-{cell.seed + place}": (
            ids_of(pair, prompt),
            replace(base, seed=cell.seed + place),
        )
        for place, prompt in enumerate(prompts)
    }
    decode_missing(pair, contenders, requests, progress)
    entries, answers = dict[str, BenchEntry](), {}
    for one in contenders:
        texts = [one.texts[key] for key in requests]
        answers[one.label] = [pair.decode(list(text.tokens)) for text in texts]
        entries[one.label] = counted_entry(cell, one.choice, prompts, texts, answers[one.label])
    right = {label: checked(prompts, some) for label, some in answers.items()}
    for label, entry in entries.items():
        tasks = task_accuracy(prompts, right[label], right[REFERENCE])
        entries[label] = entry.model_copy(update={"tasks": tasks})
    return {
        "report": report_of(cell, pair, prompts, entries),
        "points": {label: one.point for label, one in made.items() if one.point},
    }


def contender(
    cell: Cell, planned: Planned, pair: LoadedPair, label: str, one: Calibrated
) -> Contender:
    """A contender with its texts, in a file that is named by all that they depend on."""
    asked = [cell.max_tokens, cell.temperature, pair.dtype]
    resources = replace(one.resources, deterministic=True)
    strategy = build_strategy(one.choice.name, dict(one.choice.parameters), resources)
    digests = {**planned.made.artifacts, **one.digests}
    kinds = {kind: digests.get(kind, "") for kind in strategy.reads()}
    subject = (
        [planned.made.target, asked]
        if label == REFERENCE
        else [pair.fingerprint, asked, str(one.choice), kinds, one.digests.get(label, "")]
    )
    name = f"{one.choice.name}-{json_digest(subject)[:12]}.jsonl"
    texts = Results[Text](planned.folder / "counts" / name, subject, Text)
    return Contender(label, one.choice, strategy, texts)


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
    """Each request's text as soon as it is finished.

    Args:
        requests: at most as many as the pair has slots.
    """
    running = dict[str, Job]()
    rated = set[str]()
    try:
        for key, (ids, sampling) in requests.items():
            running[key] = engine.submit(ids, sampling, strategy)
        while running:
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


def counted_entry(
    cell: Cell,
    choice: StrategyChoice,
    prompts: Sequence[Prompt],
    texts: Sequence[Text],
    answers: Sequence[str],
) -> BenchEntry:
    """A contender's counters; its seconds are target passes, the prompt's reading one of them."""
    costs = {str(role): cost for role, cost in (cell.counted or {}).items()}
    drafter = str(choice.parameters.get("drafter", "draft"))
    rows = [
        PromptRow(
            prompt_id=prompt.id,
            seconds=1
            + text.target_calls
            + text.draft_calls * costs.get(drafter, 0.0)
            + text.qualifier_calls * costs.get("qualifier", 0.0),
            tokens=len(text.tokens),
            ttft_ms=1e3,
            target_calls=text.target_calls,
            accepted=text.accepted,
            judged=text.judged,
            target_argmax=text.argmax,
            log_likelihood=text.log_likelihood,
            **overlap(answer, prompt.reference),
        )
        for prompt, text, answer in zip(prompts, texts, answers, strict=True)
    ]
    return entry_of(choice, rows, sum(text.drafted for text in texts))
