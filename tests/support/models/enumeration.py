"""Exact enumeration: run a request once for every sequence of random decisions and add up the
probabilities.

`Oracle` stands in for a request's random streams. It follows a script of decisions and, at the
first one beyond the script, takes the first option and remembers the others; `joint_law` walks that
tree until nothing is left.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from draftwell.serving.runtime.commands import Role
from draftwell.serving.runtime.engine.decisions import decide
from draftwell.serving.runtime.engine.engine import Job
from draftwell.serving.runtime.engine.task import Task
from draftwell.serving.runtime.model import Model
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.sampling import warp
from draftwell.serving.runtime.session.session import Session
from draftwell.serving.runtime.strategies.base import Strategy
from draftwell.serving.runtime.strategies.given import draft_given
from tests.support.models.spans import one_by_one


class Oracle:
    """Decides by script; all streams of a request share one oracle."""

    def __init__(self, script: list[int]):
        self.script, self.taken, self.open = script, 0, []
        self.probability = 1.0
        self.draft = self.test = self.sample = self

    def decide(self, weights: list[float]) -> int:
        options = [i for i, w in enumerate(weights) if w > 0]
        if self.taken < len(self.script):
            choice = self.script[self.taken]
        else:
            choice = options[0]
            self.open += [([*self.script[: self.taken], o]) for o in options[1:]]
            self.script = [*self.script[: self.taken], choice]
        self.taken += 1
        self.probability *= weights[choice] / sum(weights)
        return choice

    def draw(self, probs: torch.Tensor) -> int:
        return self.decide(probs.double().tolist())

    def accepts(self, target_prob: float, draft_prob: float) -> bool:
        p = min(1.0, target_prob / draft_prob)
        return self.decide([p, 1.0 - p]) == 0


def joint_law(
    build: Callable[[], Strategy], models: dict[Role, Model], prompt: list[int], sampling: Sampling
) -> dict[tuple[int, ...], float]:
    """Probability of every output of a strategy; `build` makes a fresh one, so that its state
    starts anew."""
    law: dict[tuple[int, ...], float] = defaultdict(float)
    pending: list[list[int]] = [[]]
    while pending:
        oracle = Oracle(pending.pop())
        output = run_once(build(), models, prompt, sampling, oracle).output
        law[tuple(output)] += oracle.probability
        pending += oracle.open
    return dict(law)


def law_error(
    build: Callable[[], Strategy], models: dict[Role, Model], prompt: list[int], sampling: Sampling
) -> float:
    """How far the law of a strategy's outputs is from the target's own; 0 but for rounding where
    the strategy is lossless."""
    law = joint_law(build, models, prompt, sampling)
    return distance(law, true_law(models["target"], prompt, sampling))


def run_once(
    strategy: Strategy,
    models: dict[Role, Model],
    prompt: list[int],
    sampling: Sampling,
    oracle: Oracle,
) -> Job:
    """Run one request under an oracle, without the engine's batching."""
    session = Session(prompt, sampling, strategy.choose_models(models))
    session.rng = oracle
    draft_given(session)
    job = Job(session, Task(strategy.run(session)))
    job.task.resume()
    while not job.task.done:
        leaf = next(iter(job.task.leaves()))
        if leaf.waiting is None:
            leaf.resume(*decide([leaf.deciding], one_by_one))
        else:
            leaf.resume(models[leaf.waiting.model].forward([leaf.waiting])[0])
        job.task.join()
    session.close()
    return job


def true_law(model, prompt: list[int], sampling: Sampling) -> dict[tuple[int, ...], float]:
    """The target's own joint law, token by token from its table; biases and penalties are added
    here, one by one."""
    law = {(): 1.0}
    done: dict[tuple[int, ...], float] = defaultdict(float)
    while law:
        longer: dict[tuple[int, ...], float] = defaultdict(float)
        for text, mass in law.items():
            probs = next_probs(model, prompt, text, sampling)
            for token, p in enumerate(probs.double().tolist()):
                if p > 0:
                    ended = token in sampling.stop_token_ids or len(text) + 1 == sampling.max_tokens
                    (done if ended else longer)[(*text, token)] += mass * p
        law = longer
    return dict(done)


def next_probs(model, prompt: list[int], text: tuple[int, ...], sampling: Sampling) -> torch.Tensor:
    """The target's warped distribution behind an output, by a plain reading of docs/methods.md."""
    logits = model.next_logits([*prompt, *text]).clone()
    for token, bias in sampling.biases:
        logits[token] += bias
    for token in {*prompt, *text}:
        logits[token] *= (
            sampling.repetition_penalty if logits[token] < 0 else 1 / sampling.repetition_penalty
        )
    for token in text:
        logits[token] -= sampling.frequency_penalty
    for token in set(text):
        logits[token] -= sampling.presence_penalty
    for token in sampling.banned_token_ids:
        logits[token] = -math.inf
    if len(text) < sampling.min_tokens:
        for token in sampling.stop_token_ids:
            logits[token] = -math.inf
    if sampling.grammar is not None:
        matcher = sampling.grammar.matcher()
        assert all(matcher.accept(token) for token in text), "the text breaks the grammar"
        allowed = torch.from_numpy(matcher.allowed())
        logits[~allowed] = -math.inf
        # it must end here
        if len(text) < sampling.min_tokens and bool((logits == -math.inf).all()):
            logits[allowed] = 0.0
    return warp(logits, sampling)


def distance(law: dict, truth: dict) -> float:
    return max(abs(law.get(k, 0.0) - truth.get(k, 0.0)) for k in set(law) | set(truth))


def law_of(loop: Callable[[Oracle], Any]) -> dict[Any, float]:
    """Probability of everything that a loop may return (hashable), by trying all its random
    decisions."""
    law: dict[Any, float] = defaultdict(float)
    pending: list[list[int]] = [[]]
    while pending:
        oracle = Oracle(pending.pop())
        result = loop(oracle)
        law[result] += oracle.probability
        pending += oracle.open
    return dict(law)
