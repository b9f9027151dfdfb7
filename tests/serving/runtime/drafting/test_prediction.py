"""A client's prediction as a draft: it follows edits, the law of the output stays the target's, and
drafts that fail get short."""

from __future__ import annotations

from typing import Any

import pytest

from draftwell.serving.runtime.drafting import prediction as module_of_drafts
from draftwell.serving.runtime.drafting.prediction import LONGEST, SHORTEST, Prediction
from draftwell.serving.runtime.engine.engine import Engine
from draftwell.serving.runtime.requests import Sampling, Text
from draftwell.serving.runtime.strategies import build_strategy, given as module
from draftwell.serving.runtime.types import Verdict
from tests.support.models.enumeration import law_error
from tests.support.models.resources import decode, table_pair, table_resources

EACH_SCHEDULE = [
    ("autoregressive", {}),
    ("vanilla_sd", {"num_speculative_tokens": 2}),
    ("prompt_lookup", {}),
    ("hybrid", {"max_draft": 3}),
    ("suffix", {"alpha": 2.0, "max_branches": 2, "min_probability": 0.0}),
    ("eagle3", {"num_speculative_tokens": 2, "threshold": 0.5}),
    ("eagle3", {"num_speculative_tokens": 2, "top_k": 2, "tree_tokens": 4}),
    ("lookahead", {}),
    ("medusa", {"nodes": 2}),
    ("swift", {"threshold": 0.3}),
    ("spide", {"tau": 0.4, "max_draft": 3}),
    ("pearl", {"num_speculative_tokens": 2}),
    ("duo_decoding", {"num_speculative_tokens": 2}),
]
TARGET = list(range(100, 160))


def written(answer: list[int], prediction: Prediction) -> tuple[list[int], int, int]:
    """Decode an answer that is known, with the prediction as the only draft: tokens, passes of the
    target, and tokens kept."""
    text, passes, kept = Text([1], Sampling(max_tokens=len(answer))), 0, 0
    while not text.finished:
        done, passes = len(text.output), passes + 1
        draft = prediction.propose(text, len(answer) - done - 1)
        accepted = next(
            (i for i, token in enumerate(draft.tokens) if token != answer[done + i]), len(draft)
        )
        text.append(answer[done : done + accepted + 1])
        if len(draft):
            prediction.learn(draft, Verdict(accepted, 0, min(len(draft), accepted + 1)))
        kept += accepted
    return text.output, passes, kept


EDITS = {
    "none": TARGET,
    "one token replaced": [*TARGET[:20], 7, *TARGET[21:]],
    "three tokens for one": [*TARGET[:20], 7, 8, 9, *TARGET[21:]],
    "a line inserted": [*TARGET[:20], 7, 8, 9, 10, 11, 12, *TARGET[20:]],
    "a line deleted": [*TARGET[:20], *TARGET[28:]],
    "half deleted": [*TARGET[:10], *TARGET[40:]],
    "parts swapped": [*TARGET[30:], *TARGET[:30]],
    "renamed everywhere": [7 if token % 10 == 3 else token for token in TARGET],
}


@pytest.mark.parametrize(
    ("answer", "most"), [*zip(EDITS.values(), (5, 7, 8, 14, 8, 8, 9, 24), strict=True)], ids=EDITS
)
def test_it_continues_after_every_kind_of_edit(answer: list[int], most: int) -> None:
    output, passes, kept = written(answer, Prediction(TARGET))
    assert output == answer
    assert passes <= most
    assert passes + kept == len(answer)


def test_of_equal_places_the_nearest_one_counts() -> None:
    body = [1, 2, 3, 4, 50, 1, 2, 3, 4, 51, 1, 2, 3, 4, 52]
    text, prediction = Text([0], Sampling()), Prediction(body)
    text.append([1, 2, 3, 4, 50, 9, 2, 3])  # the second 1 became a 9
    assert prediction.propose(text, 9).tokens == [4, 51, 1, 2, 3, 4, 52]


def test_a_draft_ends_at_a_stop_token() -> None:
    text = Text([0], Sampling(stop_token_ids=frozenset({3})))
    assert Prediction([1, 2, 3, 4]).propose(text, 9).tokens == [1, 2, 3]
    assert not len(Prediction([1, 2, 3, 4]).propose(text, 0))


def test_lengths_follow_what_was_kept() -> None:
    prediction, text = Prediction([1] * 200), Text([0], Sampling())
    lengths = []
    for accepted in (8, 16, 32, 5, 0, 0, 1):
        draft = prediction.propose(text, 100)
        lengths.append(len(draft))
        prediction.learn(draft, Verdict(accepted, 0, accepted + 1))
    assert lengths == [8, 16, LONGEST, LONGEST, 10, 8, SHORTEST]


def test_a_prediction_that_never_fits_is_soon_asked_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tokens occur in the answer, in another order."""
    answer = [100 + (i * 37) % 60 for i in range(60)]
    prediction, drafted = Prediction(TARGET), list[int]()
    propose = prediction.propose
    monkeypatch.setattr(
        prediction, "propose", lambda *asked: drafted.append(len(draft := propose(*asked))) or draft
    )
    _, passes, kept = written(answer, prediction)
    assert passes + kept == 60
    assert sum(drafted) <= 30
    assert max(drafted[5:]) <= SHORTEST


def test_a_round_is_left_to_a_strategy_whose_drafts_bring_more() -> None:
    text, prediction = Text([0], Sampling()), Prediction(TARGET)
    assert len(prediction.propose(text, 9, worth=5.0)), "all of it may fit"
    for _ in range(2):  # nothing of it does
        prediction.learn(prediction.propose(text, 9, worth=0.0), Verdict(0, 0, 1))
    assert not len(prediction.propose(text, 9, worth=5.0))
    assert len(prediction.propose(text, 9, worth=2.0))
    text.append([7, 8, 130])
    assert not len(prediction.propose(text, 9, worth=2.5)), "one token that fits says little"
    text.append([131, 132])
    assert prediction.propose(text, 9, worth=2.5).tokens[:2] == [133, 134]


def test_what_failed_is_tried_again_and_forgotten() -> None:
    text, prediction = Text([0], Sampling()), Prediction(TARGET)
    for _ in range(4):
        prediction.learn(prediction.propose(text, 9), Verdict(0, 0, 1))
    asked = [
        len(prediction.propose(text, 9, worth=3.0)) for _ in range(module_of_drafts.PATIENCE + 1)
    ]
    assert asked[:-1] == [0] * module_of_drafts.PATIENCE
    assert asked[-1] > 0
    for _ in range(4):  # it fits again
        prediction.learn(prediction.propose(text, 9), Verdict(8, 0, 8))
    assert len(prediction.propose(text, 9, worth=3.0))


@pytest.mark.parametrize("name", ["vanilla_sd", "pearl", "spide", "duo_decoding", "autoregressive"])
def test_a_strategys_worth_is_that_of_a_round(name: str) -> None:
    """Also where a draft that is kept whole brings no token besides, as where models overlap."""
    target = table_pair(vocab=8)["target"]
    parameters = (
        {"num_speculative_tokens": 4} if name in ("vanilla_sd", "pearl", "duo_decoding") else {}
    )
    models = {"target": target, "draft": table_pair(vocab=8)["target"]}
    job = decode(models, [1, 2], name, parameters, table_resources(8), max_tokens=60)
    worth = module.Predicted.worth(job.session.stats)
    if name == "autoregressive":
        assert worth == module.LEAST_WORTH
    else:
        assert 1 < worth <= 9


@pytest.mark.parametrize(
    "warpers",
    [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 1.0, "repetition_penalty": 1.5}],
    ids=str,
)
@pytest.mark.parametrize("prediction", [(0, 1, 2, 1), (1, 1, 0, 0)], ids=str)
@pytest.mark.parametrize(("name", "parameters"), EACH_SCHEDULE, ids=str)
def test_the_joint_law_is_the_targets_whatever_is_predicted(
    name: str, parameters: Any, prediction: Any, warpers: Any
) -> None:
    models = table_pair()
    sampling = Sampling(
        max_tokens=4 if name == "autoregressive" else 3,
        stop_token_ids=frozenset({2}),
        prediction=prediction,
        **warpers,
    )

    assert (
        law_error(
            lambda: build_strategy(name, parameters, table_resources()), models, [0, 1, 0], sampling
        )
        < 1e-6
    )


@pytest.mark.parametrize(
    ("name", "parameters"), [*EACH_SCHEDULE, ("lookahead", {"pool_from_text": False})], ids=str
)
def test_drafts_of_strategy_and_prediction_take_turns(name: str, parameters: Any) -> None:
    """A prediction whose start is wrong and whose middle has errors: the strategy's own rounds come
    before, between and after."""
    plain = decode(table_pair(vocab=50), [1, 2], "autoregressive", max_tokens=40).output
    wrong = [49 if plain[i] != 49 else 48 for i in range(40)]
    prediction = tuple(wrong[i] if i < 4 or i % 9 < 3 else plain[i] for i in range(32))
    for asked in (prediction, (wrong[0], *plain[5:])):
        job = decode(
            table_pair(vocab=50),
            [1, 2],
            name,
            parameters,
            table_resources(50),
            max_tokens=40,
            prediction=asked,
        )
        stats = job.session.stats
        assert job.output == plain
        assert stats.predicted_accepted > 0
        assert stats.kept["prediction"] == stats.predicted_accepted
        assert sum(stats.kept.values()) == stats.accepted
        assert stats.target_calls > stats.predicted_rounds, "rounds without the prediction, too"


def test_mutant_that_trusts_the_prediction_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:

    def trusting(self: Any, draft: Any, rows: Any, rng: Any, *, bonus: bool = True) -> Any:
        drawn = yield from rows.draw(len(draft), rng.sample)
        return Verdict(len(draft), drawn.token, len(draft))

    monkeypatch.setattr(module.Exact, "judge", trusting)
    models, sampling = (
        table_pair(),
        Sampling(max_tokens=3, temperature=1.0, prediction=(0, 1, 2, 1)),
    )

    assert law_error(lambda: build_strategy("autoregressive"), models, [0, 1, 0], sampling) > 1e-3


@pytest.mark.parametrize(
    "name", ["csd", "lossy_sd", "fly", "asd", "sprinter", "pyramid_fuzzy", "mentored", "fuzzy_sd"]
)
def test_lossy_strategies_take_one_too(name: str) -> None:
    """A prediction is judged exactly in any case; what it brings is counted apart."""
    from tests.support.models.resources import NEEDED

    plain = decode(table_pair(vocab=8), [1, 2], "autoregressive", max_tokens=30).output
    job = decode(
        table_pair(vocab=8),
        [1, 2],
        name,
        NEEDED.get(name, {}),
        table_resources(8),
        max_tokens=30,
        prediction=tuple(plain),
    )
    stats = job.session.stats
    assert job.output == plain
    assert stats.predicted_accepted == stats.predicted == stats.accepted
    assert stats.predicted_accepted + stats.sampled == 30


@pytest.mark.parametrize("together", [True, False])
def test_requests_with_and_without_one_run_beside_each_other(together: bool) -> None:
    engine = Engine(table_pair(vocab=8))
    plain = [
        engine.generate([1, i], Sampling(max_tokens=20), build_strategy("autoregressive")).output
        for i in range(4)
    ]
    jobs = []
    for i, output in enumerate(plain):
        sampling = Sampling(
            max_tokens=20, prediction=(*output[:7], 3, *output[9:]) if i % 2 else ()
        )
        jobs.append(engine.submit([1, i], sampling, build_strategy("vanilla_sd")))
        if not together:
            engine.run(jobs[-1:])
    engine.run(jobs)
    assert [job.output for job in jobs] == plain
