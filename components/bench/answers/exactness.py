"""Whether a greedy request has one answer, to the bit: whatever the lossless strategy, and whatever
runs before and beside it.

Every strategy decodes every prompt in each of `WAYS`, and its answer is compared with plain
decoding's alone. A sampled request has one answer for a seed and a strategy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from draftwell.components.bench.interleaved import Progress
from draftwell.components.bench.runner import Config, labels_of
from draftwell.components.bench.target_agreement import first_difference
from draftwell.components.collect.decoding import Request, decode_all
from draftwell.components.prompts.prompt import Prompt, ids_of
from draftwell.components.report.provenance import code_digest
from draftwell.components.report.tables import rich_table
from draftwell.components.results import Results
from draftwell.serving.runtime.engine.engine import Engine
from draftwell.serving.runtime.engine.prompt_budget import PromptBudget
from draftwell.serving.runtime.models.native.library import key
from draftwell.serving.runtime.pair import LoadedPair
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.strategies import (
    PLAIN,
    Strategy,
    StrategyResources,
    build_strategy,
)

if TYPE_CHECKING:
    from rich.table import Table

BESIDE = 8
"""Requests at once."""
CHOICES = 4
"""Answers to one prompt, as `n` asks for."""
TEMPERATURE = 0.8
"""Of the sampled answers."""
PIECE = 13
"""Tokens of a prompt's pieces where they are cut at other borders."""
NEXT = "\nGo on, and say why."
"""The user's second turn."""
Found = dict[str, list[int | None]]
"""Way → for each prompt the first token that differs from plain decoding's answer, or None."""
Way = Callable[["Trial", Strategy], list[list[int]]]


@dataclass(frozen=True)
class Trial:
    """What all strategies decode.

    Args:
        requests: a prompt's ids and sampling each.
        wanted: plain decoding's answer to each alone.
        turns: the same with that answer and a second turn after it.
        wanted_turns: plain decoding's answer to these.
    """

    pair: LoadedPair
    requests: Sequence[Request]
    wanted: Sequence[Sequence[int]]
    turns: Sequence[Request]
    wanted_turns: Sequence[Sequence[int]]


def alone(trial: Trial, strategy: Strategy) -> list[list[int]]:
    """One after another, each on an engine of its own."""
    return [one_by_one(trial.pair, strategy, [request])[0] for request in trial.requests]


def again(trial: Trial, strategy: Strategy) -> list[list[int]]:
    """The third time in a row: the slot holds the prompt already."""
    return [one_by_one(trial.pair, strategy, [request] * 3)[2] for request in trial.requests]


def streamed(trial: Trial, strategy: Strategy) -> list[list[int]]:
    """As the server takes them from the engine for a client that streams."""
    engine, found = trial.pair.engine(), []
    try:
        for ids, sampling in trial.requests:
            job, read = engine.submit(ids, sampling, strategy), []
            while not job.finished:
                engine.step()
                read += [token.id for token in job.new_tokens()]
            engine.run([job])  # raises its error
            found.append(read)
    finally:
        engine.close()
    return found


def beside(trial: Trial, strategy: Strategy) -> list[list[int]]:
    """Eight at once."""
    return at_once(trial.pair, strategy, trial.requests, BESIDE)


def choices(trial: Trial, strategy: Strategy) -> list[list[int]]:
    """Four answers to each prompt at once: one that differs from plain decoding's, if any does."""
    found = []
    for request, wanted in zip(trial.requests, trial.wanted, strict=True):
        answers = at_once(trial.pair, strategy, [request] * CHOICES, CHOICES)
        found.append(next((one for one in answers if one != list(wanted)), answers[0]))
    return found


def predicted(trial: Trial, strategy: Strategy) -> list[list[int]]:
    """With a prediction that is right at first."""
    requests = [
        (ids, replace(sampling, prediction=(*wanted[: len(wanted) // 2], *wanted[:8])))
        for (ids, sampling), wanted in zip(trial.requests, trial.wanted, strict=True)
    ]
    return one_by_one(trial.pair, strategy, requests)


def cut(trial: Trial, strategy: Strategy) -> list[list[int]]:
    """Prompts read in short pieces while others are answered."""
    budget = PromptBudget(PIECE)
    return at_once(trial.pair, strategy, trial.requests, BESIDE, budget)


def second_turn(trial: Trial, strategy: Strategy) -> list[list[int]]:
    """After the first turn, whose slot the second continues."""
    found = []
    for first, second in zip(trial.requests, trial.turns, strict=True):
        found.append(one_by_one(trial.pair, strategy, [first, second])[1])
    return found


WAYS: Mapping[str, Way] = {
    one.__name__: one
    for one in (alone, again, streamed, beside, choices, predicted, cut, second_turn)
}


def one_by_one(
    pair: LoadedPair, strategy: Strategy, requests: Sequence[Request]
) -> list[list[int]]:
    """One after another on one engine, each of which may reuse what the one before it read."""
    engine = pair.engine()
    try:
        jobs = []
        for ids, sampling in requests:
            jobs.append(engine.submit(ids, sampling, strategy, owner="one"))
            engine.run(jobs[-1:])
        return [list(job.output) for job in jobs]
    finally:
        engine.close()


def at_once(
    pair: LoadedPair,
    strategy: Strategy,
    requests: Sequence[Request],
    most: int,
    budget: PromptBudget | None = None,
) -> list[list[int]]:
    """Several at a time."""
    engine: Engine = pair.engine(budget=budget)
    try:
        return decode_all(engine, requests, [strategy] * len(requests), most)
    finally:
        engine.close()


def trial_of(
    pair: LoadedPair, resources: StrategyResources, prompts: Sequence[Prompt], sampling: Sampling
) -> Trial:
    """Plain decoding's answers to prompts and to a second turn after each."""
    plain = build_strategy(PLAIN.name, {}, resources)
    requests: list[Request] = [(ids_of(pair, prompt), sampling) for prompt in prompts]
    wanted = [one_by_one(pair, plain, [one])[0] for one in requests]
    more = pair.encode(NEXT, special=False)
    turns: list[Request] = [
        ([*ids, *answer, *more], sampling)
        for (ids, _), answer in zip(requests, wanted, strict=True)
    ]
    wanted_turns = [one_by_one(pair, plain, [one])[0] for one in turns]
    return Trial(pair, requests, wanted, turns, wanted_turns)


def exactness(
    pair: LoadedPair,
    resources: StrategyResources,
    configs: Sequence[Config],
    prompts: Sequence[Prompt],
    sampling: Sampling,
    file: Path | None = None,
    *,
    progress: Progress | None = None,
) -> dict[str, Found]:
    """For each strategy and way, for each prompt the first token that differs from plain decoding's
    answer, or None.

    Args:
        pair: loaded with at least `BESIDE` slots.
        sampling: greedy.
        file: where what is done is kept: a run that was ended resumes, and plain decoding's answers
            are compared with those of the run before (`restarted`).
    Returns:
        `sampled` only where all models that the strategy may use are exact: others change the
        draft's distribution, and with it what is drawn.
    """
    trial = trial_of(pair, resources, prompts, sampling)
    subject = {
        "pair": pair.fingerprint,
        "padded_to": pair.padded_to,
        "code": code_digest(),
        "layers": key(),
        "artifacts": {kind: one.digest for kind, one in resources.artifacts.items()},
        "prompts": [list(ids) for ids, _ in trial.requests],
        "max_tokens": sampling.max_tokens,
    }
    results: Results[list[int | None]] = Results(file, subject, list[int | None])
    before: Results[list[list[int]]] = Results(beside_file(file), subject, list[list[int]])
    found: dict[str, Found] = {}
    if before.read:
        found[PLAIN.name] = {"restarted": compared(trial.wanted, before["plain"])}
    else:
        before.put("plain", [list(answer) for answer in trial.wanted])
    labels, done = labels_of(configs), 0
    for label, config in zip(labels, configs, strict=True):
        strategy = build_strategy(config.name, dict(config.parameters), resources.private())
        for way, decode in WAYS.items():
            if progress:
                progress(done, len(labels) * len(WAYS), f"{label} {way}")
            wanted = trial.wanted_turns if decode is second_turn else trial.wanted
            if f"{label} {way}" not in results:
                results.put(f"{label} {way}", compared(decode(trial, strategy), wanted))
            found.setdefault(label, {})[way] = results[f"{label} {way}"]
            done += 1
        fixed = replace(resources, deterministic=True)
        drawn = build_strategy(config.name, dict(config.parameters), fixed)
        if all(model.exact for model in drawn.choose_models(pair.models).values()):
            if f"{label} sampled" not in results:
                results.put(f"{label} sampled", sampled_beside(trial, drawn))
            found[label]["sampled"] = results[f"{label} sampled"]
    return found


def sampled_beside(trial: Trial, strategy: Strategy) -> list[int | None]:
    """Sampled with a seed, eight at once: where that differs from the strategy's own answer
    alone."""
    requests = [
        (ids, replace(sampling, temperature=TEMPERATURE, seed=seed))
        for seed, (ids, sampling) in enumerate(trial.requests)
    ]
    wanted = [one_by_one(trial.pair, strategy, [one])[0] for one in requests]
    return compared(at_once(trial.pair, strategy, requests, BESIDE), wanted)


def beside_file(file: Path | None) -> Path | None:
    """Where plain decoding's answers are kept."""
    return file and file.with_suffix(".plain.jsonl")


def compared(answers: Sequence[Sequence[int]], wanted: Sequence[Sequence[int]]) -> list[int | None]:
    """The first token of each answer that differs, or None."""
    return [first_difference(*both) for both in zip(answers, wanted, strict=True)]


def differing(found: Mapping[str, Found]) -> int:
    """How many answers differ from plain decoding's."""
    return sum(at is not None for ways in found.values() for one in ways.values() for at in one)


def exactness_table(found: Mapping[str, Found]) -> Table:
    """Identical answers of each strategy by way."""
    ways = ["restarted", *WAYS, "sampled"]

    def cell(answers: Sequence[int | None] | None) -> str:
        return "" if answers is None else f"{answers.count(None)} of {len(answers)}"

    rows = [[label, *(cell(one.get(way)) for way in ways)] for label, one in found.items()]
    note = (
        "greedy answers that are plain decoding's alone, to the bit; sampled ones, eight at once, "
        "that are the strategy's own alone with the same seed"
    )
    return rich_table(["strategy", *(way.replace("_", " ") for way in ways)], rows, note)
