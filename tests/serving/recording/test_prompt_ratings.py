"""Where final tokens come from, and what the target thinks of them: the same whatever the strategy,
also inside a draft."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch

from draftwell.serving.recording.prompt_ratings import PART, RatedPrompt
from draftwell.serving.runtime.commands import Forward
from draftwell.serving.runtime.engine.engine import Engine, Job
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.strategies import STRATEGIES, build_strategy
from draftwell.serving.runtime.types import Emitted
from tests.support.models.finite_grammar import FiniteGrammar
from tests.support.models.resources import table_pair, table_resources

VOCAB = 8
LOSSLESS = [name for name, cls in STRATEGIES.items() if cls.lossless and name != "autoregressive"]
PROMPT = [1, 2, 1, 2, 1]
EAGER = {"adaedl": {"threshold": 0.05, "max_draft": 6}}
"""Strategy → settings with which it drafts on such flat distributions."""


def pair(noise: float = 1.0) -> dict:
    return table_pair(VOCAB, noise=noise)


def decode(name: str, models: dict | None = None, **sampling: Any) -> tuple[Job, list[Emitted]]:
    """A finished request and what it handed out round by round."""
    engine = Engine(models or pair())
    job = engine.submit(
        PROMPT,
        Sampling(**{"max_tokens": 40} | sampling),
        build_strategy(name, EAGER.get(name), table_resources(VOCAB)),
    )
    handed: list[Emitted] = []
    while not job.finished:
        engine.step()
        handed += job.new_tokens()
    assert job.error is None
    return job, handed


def expected_ratings(job: Job, models: dict, count: int) -> list[tuple[float, list[int]]]:
    """Log-prob and likeliest tokens of each output token, from the target's own logits behind the
    text before it."""
    result = []
    for place in range(job.session.text.prompt_length, len(job.session.text.ids)):
        logprobs = models["target"].next_logits(job.session.text.ids[:place]).log_softmax(-1)
        result.append(
            (float(logprobs[job.session.text.ids[place]]), logprobs.topk(count).indices.tolist())
        )
    return result


@pytest.mark.parametrize("name", list(STRATEGIES))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_token_is_rated_by_the_target(name: str, temperature: float) -> None:
    models = pair()
    job, handed = decode(name, models, temperature=temperature, logprobs=3, seed=4)
    assert [token.id for token in handed] == job.output
    for token, (logprob, top) in zip(handed, expected_ratings(job, models, 3), strict=True):
        assert token.rating is not None
        assert token.rating.logprob == pytest.approx(logprob, abs=1e-5)
        assert [t for t, _ in token.rating.top] == top
        assert dict(token.rating.top).get(token.id, token.rating.logprob) == token.rating.logprob, (
            "one number, wherever it stands"
        )


@pytest.mark.parametrize("name", list(STRATEGIES))
def test_ratings_change_neither_text_nor_counters(name: str) -> None:
    (plain, _), (rated, _) = (
        decode(name, temperature=1.0, seed=2, logprobs=asked) for asked in (None, 0)
    )
    assert rated.output == plain.output
    counters = ("drafted", "judged", "accepted", "rescued", "sampled", "rounds", "accepted_at")
    assert [getattr(rated.session.stats, c) for c in counters] == [
        getattr(plain.session.stats, c) for c in counters
    ]


@pytest.mark.parametrize("name", list(STRATEGIES))
def test_origins_agree_with_the_counters(name: str) -> None:
    job, handed = decode(name, temperature=1.0, seed=1)
    stats, seen = job.session.stats, Counter(token.origin for token in handed)
    assert sum(seen.values()) == len(job.output)
    assert seen["accepted"] + seen["rescued"] == stats.accepted
    assert seen["rescued"] == stats.rescued
    assert (
        seen["recovered"] == stats.judged - stats.accepted
        or stats.judged_at[0] == 0
        or name == "duo_decoding"
    )
    if name == "autoregressive":
        assert set(seen) == {"target"}


def test_each_origin_is_told() -> None:
    """A lossless strategy has all but rescued; csd with an open gate rescues; sprinter's trusted
    tokens were never judged exactly."""
    _, exact = decode("vanilla_sd", temperature=1.0)
    assert {token.origin for token in exact} == {"accepted", "recovered", "target"}
    assert exact[0].origin == "target", "the prompt's forward gives the first token"
    _, lossy = decode("lossy_sd", temperature=1.0, max_tokens=80)
    assert "rescued" in {token.origin for token in lossy}


def test_a_recovered_token_stands_where_the_draft_was_rejected() -> None:
    """Greedy: token by token against what the draft would have said."""
    models = pair()
    job, handed = decode("vanilla_sd", models)
    ids = job.session.text.ids
    for place, token in enumerate(handed):
        drafted = int(models["draft"].next_logits(ids[: len(PROMPT) + place]).argmax())
        if token.origin == "accepted":
            assert drafted == token.id
        if token.origin == "recovered":
            assert drafted != token.id
    assert {token.origin for token in handed} >= {"accepted", "recovered"}


def test_trusted_tokens_wait_for_their_rating() -> None:
    """SPRINTER shows tokens before the target has read them; with log-probs they come with the
    target's next forward."""
    engine = Engine(pair())
    job = engine.submit(
        PROMPT,
        Sampling(max_tokens=60, logprobs=0, temperature=1.0),
        build_strategy("sprinter", {}, table_resources(VOCAB)),
    )
    waited = 0
    while not job.finished:
        engine.step()
        fresh = job.new_tokens()
        assert all(token.rating is not None for token in fresh)
        waited = max(waited, job.session.unrated)
    assert waited > 0, "otherwise this tests nothing"
    assert len(job.session.ratings) == len(job.output) == 60


def test_nothing_is_rated_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def costly(*arguments: Any) -> Any:
        raise AssertionError("the hot path rates tokens")

    monkeypatch.setattr("draftwell.serving.runtime.logits.Span.rating", costly)
    _, handed = decode("vanilla_sd")
    assert {token.rating for token in handed} == {None}


@pytest.mark.parametrize("name", LOSSLESS)
@pytest.mark.parametrize(
    "change",
    [
        {"presence_penalty": 1.5},
        {"frequency_penalty": 0.7},
        {"logit_bias": {2: 3.0, 5: -100.0}},
        {"presence_penalty": -0.5, "frequency_penalty": 0.9, "logit_bias": {0: 2.0}},
    ],
)
def test_penalties_and_biases_inside_a_draft(name: str, change: dict[str, Any]) -> None:
    """Greedy speculative output equals plain decoding's, which is what the formula says token by
    token."""
    models = pair(noise=0.5)
    job, _ = decode(name, models, max_tokens=60, **change)
    assert job.output == by_hand(models, 60, **change)
    # whose chains are guesses here
    if name not in ("prompt_lookup", "rest", "lookahead", "medusa"):
        assert job.session.stats.accepted > 5, "drafts must be accepted for this to test anything"


def by_hand(
    models: dict,
    length: int,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    logit_bias: dict[int, float] | None = None,
) -> list[int]:
    """OpenAI's formula: z(t) + bias(t) − presence·[c(t) > 0] − frequency·c(t), with counts of the
    output alone."""
    output: list[int] = []
    for _ in range(length):
        logits = models["target"].next_logits([*PROMPT, *output]).clone()
        for token in range(VOCAB):
            count = output.count(token)
            logits[token] += (
                (logit_bias or {}).get(token, 0.0)
                - presence_penalty * (count > 0)
                - frequency_penalty * count
            )
        output.append(int(logits.argmax()))
    return output


def test_ratings_are_of_the_model_not_of_penalties() -> None:
    """With a bias of 100 the text is forced, and its log-probs still say how unlikely it is."""
    models = pair()
    job, handed = decode("vanilla_sd", models, logit_bias={3: 100.0}, logprobs=1, max_tokens=8)
    assert job.output == [3] * 8
    assert [t.rating.logprob for t in handed if t.rating] == pytest.approx(
        [e[0] for e in expected_ratings(job, models, 1)], abs=1e-5
    )
    assert min(t.rating.logprob for t in handed if t.rating) < -0.5


class Widest:
    """Remembers the most rows that one forward kept."""

    def __init__(self, model: Any):
        self.model, self.kept = model, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def forward(self, rows: list[Forward]) -> Any:
        self.kept = max(self.kept, *(row.keep for row in rows))
        return self.model.forward(rows)


@pytest.mark.parametrize("length", [1, 2, PART - 1, PART, PART + 1, 2 * PART + 5])
def test_a_prompt_is_rated_in_one_pass(length: int) -> None:
    target = Widest(pair()["target"])
    prompt = torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(0)).tolist()
    job = Engine({"target": target}).generate(
        prompt, Sampling(max_tokens=3, logprobs=2), RatedPrompt()
    )
    ratings = job.session.prompt_ratings
    assert len(ratings) == length
    assert ratings[0] is None
    for place in range(1, length):
        logprobs = target.model.next_logits(prompt[:place]).log_softmax(-1)
        assert ratings[place] is not None
        assert ratings[place].logprob == pytest.approx(float(logprobs[prompt[place]]), abs=1e-5)  # type: ignore[union-attr]
    plain = Engine(pair()).generate(
        prompt, Sampling(max_tokens=3), build_strategy("autoregressive")
    )
    assert job.output == plain.output
    assert job.session.stats.target_tokens == length + 2, "no token is read twice"
    assert target.kept <= PART, "rows of a long prompt would fill the memory"


@pytest.mark.parametrize("length", [PART - 1, PART + 1, 2 * PART])
def test_what_an_output_may_be_does_not_rate_its_prompt(length: int) -> None:
    """Neither a grammar nor `min_tokens` knows a prompt, also where it is read in parts."""
    target = pair()["target"]
    prompt = torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(0)).tolist()
    asked = {"max_tokens": 3, "logprobs": 0, "stop_token_ids": frozenset({5})}
    free = Engine({"target": target}).generate(prompt, Sampling(**asked), RatedPrompt()).session
    for change in (
        {"grammar": FiniteGrammar([{3: 0}], VOCAB)},
        {"min_tokens": 3, "temperature": 1.0},
    ):
        held = (
            Engine({"target": target})
            .generate(prompt, Sampling(**asked | change), RatedPrompt())
            .session
        )
        assert held.prompt_ratings == free.prompt_ratings
        assert held.text.output == [3] * 3 if "grammar" in change else 5 not in held.text.output


def test_a_token_without_probability_is_rated_minus_infinity() -> None:
    models = pair()
    models["target"].table[..., 4] = -math.inf
    _, handed = decode("mentored", models, temperature=1.0, logprobs=VOCAB)
    assert all(dict(token.rating.top)[4] == -math.inf for token in handed if token.rating)
