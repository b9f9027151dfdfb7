"""Traps that implementations fall into, each for every strategy: what a slot holds, who draws from
which stream, where a text ends.

`docs/proofs.md` says which test answers to which claim.
"""

from __future__ import annotations

import time
import zlib
from collections import Counter
from collections.abc import Sequence
from functools import cache
from itertools import cycle
from typing import Any

import pytest
import torch

from draftwell.serving.runtime.acceptance import exact
from draftwell.serving.runtime.engine import decisions
from draftwell.serving.runtime.engine.engine import Engine
from draftwell.serving.runtime.random_streams import RandomStream, Streams
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.session.lane import Lane
from draftwell.serving.runtime.session.stats import Stats
from draftwell.serving.runtime.strategies import STRATEGIES, Strategy, build_strategy
from draftwell.serving.runtime.types import Draft, Verdict
from tests.support.cases import in_turn
from tests.support.models.enumeration import law_error
from tests.support.models.resources import NEEDED, table_pair, table_resources
from tests.support.models.spans import span_of
from tests.support.models.table_model import TableModel
from tests.support.models.variants import VARIANTS

LOSSY = [
    (name, NEEDED.get(name, {})) for name, strategy in STRATEGIES.items() if not strategy.lossless
]
EVERY = [*VARIANTS, *LOSSY]
VOCAB = 8


def build(name: str, parameters: dict) -> Strategy:
    return build_strategy(name, parameters, table_resources(VOCAB))


NORMAL = torch.randn(9973, VOCAB, generator=torch.Generator().manual_seed(0))


class WholeText(TableModel):
    """Logits that depend on every token of the context: one that is missing, doubled or stale
    changes all behind it."""

    def __init__(self, noise: float = 0.0, seed: int = 1):
        super().__init__(torch.zeros(VOCAB, VOCAB))
        self.noise, self.seed = noise, seed

    def next_logits(self, context: Sequence[int]) -> torch.Tensor:
        where = zlib.crc32(bytes(context))
        return 3 * NORMAL[where % 9973] + self.noise * NORMAL[(where + self.seed) % 9973]


def whole_pair(noise: float) -> dict:
    between = {"qualifier": WholeText(noise / 2, seed=2), "head": WholeText(noise / 2, seed=3)}
    return {"target": WholeText(), "draft": WholeText(noise), **between}


# --- what the slots hold
# ------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "parameters", "temperature", "noise"),
    in_turn(EVERY, [0.0, 0.9], [0.0, 0.6, 3.0]),
    ids=str,
)
def test_a_lane_never_reads_behind_tokens_that_are_not_those_of_the_sequence(
    monkeypatch, name, parameters, temperature, noise
):
    """One entry too few after a full accept, one too many on rollback, a round that drafted
    nothing: each shows here."""
    original = Lane.read

    def read(self, sequence, keep=1, **more):
        assert self.model.slots.lengths[self.slot] == self.length
        assert self.model.tokens[self.slot][: self.length] == list(sequence[: self.length])
        return (yield from original(self, sequence, keep, **more))

    monkeypatch.setattr(Lane, "read", read)
    for seed in range(2):
        sampling = Sampling(max_tokens=40, temperature=temperature, seed=seed)
        job = Engine(whole_pair(noise)).generate([1, seed], sampling, build(name, parameters))
        assert len(job.output) == 40


@pytest.mark.parametrize(
    ("name", "parameters"),
    [case for case in EVERY if STRATEGIES[case[0]].roles != ("target",)],
    ids=str,
)
def test_a_draft_that_is_the_target_is_always_right(name, parameters):
    """Were the draft's slot a token off anywhere, its logits would be others, and something would
    be rejected."""
    models = whole_pair(0.0)
    stats = (
        Engine(models)
        .generate([1, 2], Sampling(max_tokens=60), build(name, parameters))
        .session.stats
    )
    assert stats.judged == stats.accepted > 0


@pytest.mark.parametrize(("name", "parameters"), VARIANTS, ids=str)
def test_greedy_text_is_the_targets_whatever_the_draft_does(name, parameters):
    for noise in (0.0, 0.6, 3.0):
        job = Engine(whole_pair(noise)).generate(
            [3], Sampling(max_tokens=50), build(name, parameters)
        )
        assert job.output == by_itself()


@cache
def by_itself() -> list[int]:
    """The target's text."""
    asked = Sampling(max_tokens=50)
    return Engine(whole_pair(0.0)).generate([3], asked, build("autoregressive", {})).output


def test_a_mutant_that_rolls_back_one_token_too_few_is_caught(monkeypatch):
    """The last of the tokens that were dropped stays in the cache."""
    original = Lane.rollback

    def rollback(self, length):
        known = self.model.tokens[self.slot]
        if length < self.length and length < len(known) - 1:
            known[length - 1] = known[length]
        original(self, length)

    monkeypatch.setattr(Lane, "rollback", rollback)
    models = whole_pair(3.0)
    output = Engine(models).generate([3], Sampling(max_tokens=50), build("vanilla_sd", {})).output
    monkeypatch.undo()
    assert output != by_itself()


# --- where a text ends
# ------------------------------------------------------------


def ending_pair(noise: float) -> dict:
    """Long accepted runs and stop tokens in them."""
    models = table_pair(vocab=VOCAB, seed=3, noise=noise)
    for model in models.values():
        model.table[..., 5] += 1.0
    return models


@pytest.mark.parametrize(
    ("name", "parameters", "stops"),
    in_turn(EVERY, [frozenset({5}), frozenset(), frozenset({1, 6})]),
    ids=str,
)
def test_stop_tokens_and_budgets_end_the_text_wherever_they_fall(name, parameters, stops):
    """Budgets of 1 to 12 put the end at every place of a round: in an accepted run, at its edge, at
    the bonus."""
    for budget in range(1, 13):
        models = ending_pair(noise=(0.05, 1.0)[budget % 2])
        prompt = [2, budget % 4]
        for temperature in (0.0, 1.0):
            sampling = Sampling(
                max_tokens=budget, temperature=temperature, stop_token_ids=stops, seed=budget
            )
            job = Engine(models).generate(prompt, sampling, build(name, parameters))
            check_end(job.output, sampling, job.session.text.finish_reason)
            assert (
                job.session.stats.emitted
                == job.session.stats.accepted + job.session.stats.sampled
                == len(job.output)
            )
            if temperature == 0.0 and STRATEGIES[name].lossless:
                assert job.output == ended_by_itself(budget, stops)


@cache
def ended_by_itself(budget: int, stops: frozenset[int]) -> list[int]:
    asked = Sampling(max_tokens=budget, stop_token_ids=stops)
    engine = Engine(ending_pair(1.0))
    return engine.generate([2, budget % 4], asked, build("autoregressive", {})).output


def check_end(output: list[int], sampling: Sampling, reason: str | None) -> None:
    assert not sampling.stop_token_ids & set(output[:-1]), "nothing follows a stop token"
    stopped = output[-1] in sampling.stop_token_ids
    assert reason == ("stop" if stopped else "length")
    assert stopped or len(output) == sampling.max_tokens


@pytest.mark.parametrize(
    ("name", "parameters", "seed"),
    [(*one, seed) for one, seed in zip(VARIANTS, cycle([1, 5]), strict=False)],
    ids=str,
)
def test_the_law_of_four_tokens_is_the_targets(name, parameters, seed):
    """Longer than one draft, and two tokens to choose from: rounds follow each other in every
    way."""
    models, sampling = table_pair(vocab=2, seed=seed), Sampling(max_tokens=4, temperature=1.0)

    assert (
        law_error(
            lambda: build_strategy(name, parameters, table_resources(2)), models, [1], sampling
        )
        < 1e-6
    )


# --- streams and distributions
# ----------------------------------------------------------------------------------------


class Watched:
    """Every uniform and every draw of a request, by stream."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.made = 0
        self.uniforms: list[float] = []
        self.draws: dict[str, list[tuple[torch.Tensor, int]]] = {"draft": [], "sample": []}
        self.tests = 0
        names: dict[int, str] = {}
        init, accepts = Streams.__init__, RandomStream.accepts
        draw, draw_alone = decisions.by_inversion, RandomStream.draw

        def made(streams: Streams, seed: int) -> None:
            self.made += 1
            init(streams, seed)
            for name in ("draft", "test", "sample"):
                stream = getattr(streams, name)
                names[id(stream)] = name
                stream._generator = Counted(stream._generator, self.uniforms)

        def drawn(laws: torch.Tensor, streams: Any) -> torch.Tensor:
            columns = draw(laws, streams)
            for stream, law, column in zip(streams, laws, columns.tolist(), strict=True):
                self.draws[names[id(stream)]].append((law, column))
            return columns

        def tested(stream: RandomStream, target_prob: float, draft_prob: float) -> bool:
            assert names[id(stream)] == "test", "a test reads no other stream"
            self.tests += 1
            return accepts(stream, target_prob, draft_prob)

        monkeypatch.setattr(Streams, "__init__", made)

        def drawn_alone(stream: RandomStream, law: torch.Tensor) -> int:
            token = draw_alone(stream, law)
            self.draws[names[id(stream)]].append((law, token))
            return token

        monkeypatch.setattr(RandomStream, "draw", drawn_alone)
        monkeypatch.setattr(decisions, "by_inversion", drawn)
        monkeypatch.setattr(RandomStream, "accepts", tested)


class Counted:
    """A generator whose numbers are kept."""

    def __init__(self, inner: Any, seen: list[float]):
        self.inner, self.seen = inner, seen

    def random(self) -> float:
        self.seen.append(float(self.inner.random()))
        return self.seen[-1]


@pytest.mark.parametrize(("name", "parameters"), EVERY, ids=str)
def test_no_uniform_serves_twice_and_no_seed_is_set_inside_the_loop(monkeypatch, name, parameters):
    watched, strategy = Watched(monkeypatch), build(name, parameters)
    models = table_pair(vocab=VOCAB)
    strategy.couples = lambda *_: False  # what is coupled reads no uniforms
    job = Engine(models).generate(
        [1, 2], Sampling(max_tokens=60, temperature=1.0, seed=4), strategy
    )
    assert watched.made == 1, "streams are made once a request"
    assert len(watched.uniforms) == len(set(watched.uniforms)) > 0
    assert len(watched.uniforms) == watched.tests + sum(map(len, watched.draws.values())), (
        "one uniform a decision"
    )
    alternatives = max(parameters.get("max_branches", 1), parameters.get("top_k", 1)) > 1
    trees = name in ("rest", "lookahead", "medusa", "duo_decoding") or alternatives
    if STRATEGIES[name].lossless and not trees:  # those test several candidates for one position
        assert watched.tests == job.session.stats.judged, (
            "every judged token is tested once, with a uniform of its own"
        )
        assert len(watched.draws["sample"]) == job.session.stats.sampled


@pytest.mark.parametrize(
    ("name", "parameters"),
    [case for case in VARIANTS if STRATEGIES[case[0]].roles != ("target",)],
    ids=str,
)
@pytest.mark.parametrize(
    "warpers",
    [{"temperature": 0.6}, {"temperature": 1.0, "top_k": 3, "frequency_penalty": 0.5}],
    ids=str,
)
def test_the_draft_probability_that_is_judged_is_the_one_that_was_sampled_from(
    monkeypatch, name, parameters, warpers
):
    watched, judged = Watched(monkeypatch), []
    keeps = exact.keeps

    def seen(draft, i, target, rng):
        if draft.rows:
            judged.append((draft.prob(i), draft.tokens[i]))
        return keeps(draft, i, target, rng)

    monkeypatch.setattr(exact, "keeps", seen)
    Engine(table_pair(vocab=VOCAB)).generate(
        [1, 2], Sampling(max_tokens=60, **warpers), build(name, parameters)
    )
    drawn = Counter((float(law[token]), token) for law, token in watched.draws["draft"])
    assert judged or name == "duo_decoding", "its proposals are deterministic"
    assert not Counter(judged) - drawn


def test_raw_figures_are_the_same_at_every_temperature():
    """C, H, theta's factors, raw logits and scores' inputs: nothing dynamic may see the warped
    row."""
    logits = torch.randn(5, 30, generator=torch.Generator().manual_seed(1)) * 3
    cold, warm = (
        span_of(logits, Sampling(temperature=t, **extra))
        for t, extra in ((0.0, {}), (1.0, {"top_k": 2, "top_p": 0.5, "logit_bias": {3: 2.0}}))
    )
    for row in range(5):
        assert cold.confidence(row) == warm.confidence(row) < 1.0
        assert cold.entropy(row) == warm.entropy(row) > 0.0
        assert torch.equal(cold.raw(row), warm.raw(row))
        assert cold.raw_prob(row, 3) == warm.raw_prob(row, 3) == float(warm.raw(row)[3])
        assert cold.raw_logit(row, 3) == warm.raw_logit(row, 3)


# --- figures
# ------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("autoregressive", {}), ("vanilla_sd", {}), ("spide", {}), ("pearl", {})],
    ids=str,
)
def test_prompt_and_draft_forwards_are_part_of_every_speed_figure(name, parameters):
    """`wall_seconds`, of which all speeds are made, has the prompt's forward and the draft's in
    it."""
    models = table_pair(vocab=VOCAB)
    for model in models.values():
        forward = model.forward

        def slow(rows, forward=forward):
            time.sleep(0.03 if any(row.prefill for row in rows) else 0.002)
            return forward(rows)

        model.forward = slow
    stats = (
        Engine(models)
        .generate([1, 2], Sampling(max_tokens=12), build(name, parameters))
        .session.stats
    )
    assert stats.first_token_seconds >= 0.03, "TTFT has the prompt's forward in it"
    assert stats.prefill_seconds >= 0.03
    assert stats.wall_seconds >= 0.03 + 0.002 * max(stats.target_calls, stats.draft_calls - 1)
    if not build(name, parameters).overlaps:
        assert (
            stats.wall_seconds >= stats.prefill_seconds + stats.target_seconds + stats.draft_seconds
        )


def test_the_measures_of_a_scripted_generation():
    """Three rounds of 4 drafted tokens: all kept and a bonus; all kept without one (PEARL); one
    kept and a correction."""
    stats, draft = Stats(), Draft([1, 2, 3, 4])
    for verdict in (Verdict(4, 9, 4), Verdict(4, None, 4), Verdict(1, 9, 2)):
        stats.drafted += len(draft)
        stats.target_calls += 1
        stats.count(draft, verdict)
    assert stats.acceptance_rate == 9 / 10, "tokens behind a rejection were not judged"
    assert stats.draft_efficiency == 9 / 12
    assert stats.mean_acceptance_length == 1 + 9 / 3, "a bonus is no accepted token"
    assert stats.mat == 9 / 2, "the run between corrections: two tokens came from the target"
    assert stats.accepted_per_call == 9 / 3
    assert [stats.accepted_at[i] / stats.judged_at[i] for i in range(4)] == [
        1.0,
        2 / 3,
        2 / 3,
        2 / 3,
    ]
