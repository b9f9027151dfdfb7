"""Measuring for the tuner on a real pair of tiny models: turns, what contenders keep and forget,
and how outputs are judged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from draftwell.components.bench.runner import StrategyContender
from draftwell.components.bench.target_agreement import TargetAgreement, agreement
from draftwell.components.prompts.prompt import Prompt
from draftwell.components.tune import evaluator as module
from draftwell.components.tune.evaluator import Evaluator, Measured, QualityReader
from draftwell.serving.artifacts.acceptance_table import AcceptanceTable
from draftwell.serving.artifacts.base import Provenance
from draftwell.serving.artifacts.hardware_profile import HardwareProfile
from draftwell.serving.runtime.pair import LoadedPair
from draftwell.serving.runtime.strategies import PLAIN, StrategyChoice, StrategyResources
from tests.support.models.tiny import table_pair

PROMPTS = [
    Prompt(f"p{i}", None, [text], text)
    for i, text in enumerate(["hello world", "abc", "so it goes", "xyzzy!"])
]
ORIGIN = Provenance(pair="tiny", fingerprint="f" * 64, device_class="cpu-test")
SERIAL = StrategyChoice("spide", {"parallel": False, "tau": 0.2})
GAMMA = StrategyChoice("vanilla_sd", {"num_speculative_tokens": 3})


@pytest.fixture(scope="module")
def pair() -> LoadedPair:
    return table_pair()


def resources() -> StrategyResources:
    return StrategyResources(
        {
            "acceptance_table": AcceptanceTable.empty(ORIGIN),
            "hardware_profile": HardwareProfile(1.0, {1: 10.0}, 0.1, ORIGIN),
        }
    )


def judged(contest: Evaluator, config: StrategyChoice) -> int:
    """Tokens that a SPIDE contender's own table has seen judged."""
    table: Any = contest._contenders[config]._strategy.resources.artifacts["acceptance_table"]
    return sum(table.total)


def test_all_decode_a_prompt_before_the_next_one_comes(
    pair: LoadedPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[tuple[str, int]] = []
    real = StrategyContender.generate

    def generate(self: StrategyContender, ids: Sequence[int], sampling: Any) -> Any:
        if sampling.max_tokens == 10:  # the warm-up's are fewer
            order.append((self.strategy, len(ids)))
        return real(self, ids, sampling)

    monkeypatch.setattr(module.StrategyContender, "generate", generate)
    Evaluator(pair, resources(), max_tokens=10)([PLAIN, GAMMA, SERIAL], PROMPTS[:2])
    first, second = (len(pair.encode_prompt(prompt.prompt)) for prompt in PROMPTS[:2])
    assert order == [
        ("autoregressive", first),
        ("vanilla_sd", first),
        ("spide", first),
        ("vanilla_sd", second),
        ("spide", second),
        ("autoregressive", second),
    ]


def test_results_come_in_the_order_of_the_configs(pair: LoadedPair) -> None:
    plain, fast = Evaluator(pair, resources(), max_tokens=10)([PLAIN, GAMMA], PROMPTS)
    assert plain.outputs == fast.outputs, "both are the target's greedy text"
    assert plain.calls == [tokens - 1 for tokens in plain.tokens], (
        "the prompt's own forward verifies nothing, so it is no call"
    )
    assert sum(fast.calls) < sum(plain.calls)
    assert all(0 < tokens <= 10 for tokens in plain.tokens)
    assert min(plain.seconds + fast.seconds) > 0
    [short] = Evaluator(pair, resources(), max_tokens=10)([PLAIN], PROMPTS, max_tokens=3)
    assert max(short.tokens) == 3


def test_contenders_keep_what_they_learnt_until_they_are_asked_afresh(pair: LoadedPair) -> None:
    used = resources()
    contest = Evaluator(pair, used, max_tokens=10)
    contest([PLAIN, SERIAL], PROMPTS[:2])
    once = judged(contest, SERIAL)
    assert once > 0
    contest([PLAIN, SERIAL], PROMPTS[2:])
    assert judged(contest, SERIAL) > once
    contest([PLAIN, SERIAL], PROMPTS[:2], fresh=True)
    assert judged(contest, SERIAL) == once, "neither the rungs before nor the warm-up are in it"
    table: Any = used.artifacts["acceptance_table"]
    assert sum(table.total) == 0, "nobody writes to the artifact itself"


def test_outputs_are_judged_by_the_target(
    pair: LoadedPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    [plain] = Evaluator(pair, resources(), max_tokens=10)([PLAIN], PROMPTS)
    reader = QualityReader(pair)
    assert reader(PROMPTS, plain).share == 1.0
    wrong = Measured(
        plain.seconds,
        [[output[0], *[(token + 1) % 20 for token in output[1:]]] for output in plain.outputs],
        plain.calls,
    )
    spoilt = reader(PROMPTS, wrong).share
    assert spoilt < 0.9
    right = sum(
        agreement(pair, pair.encode_prompt(p.prompt), o).matches
        for p, o in zip(PROMPTS, wrong.outputs, strict=True)
    )
    assert spoilt == pytest.approx(right / sum(wrong.tokens))
    monkeypatch.setattr(
        module, "agreement", lambda *args: pytest.fail("what was read once is not read again")
    )
    assert reader(PROMPTS, wrong).share == spoilt


def test_rouge_is_in_points_and_only_where_there_are_references(
    pair: LoadedPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = Measured([1.0] * 2, [[5, 6]] * 2, [2] * 2)
    monkeypatch.setattr(module, "agreement", lambda *args: TargetAgreement(2, 2, 0.0))
    texts = [
        Prompt("a", None, ["x"], pair.decode([5, 6])),
        Prompt("b", None, ["y"], "nothing alike"),
    ]
    assert QualityReader(pair)(texts, measured).rouge_l == pytest.approx(50.0)
    assert (
        QualityReader(pair)([Prompt("a", None, ["x"]), Prompt("b", None, ["y"])], measured).rouge_l
        is None
    )


def test_sampled_requests_have_seeds_of_their_own_and_the_same_each_time(pair: LoadedPair) -> None:
    contest = Evaluator(pair, resources(), max_tokens=10, temperature=0.7)
    plain, _ = contest([PLAIN, GAMMA], PROMPTS)
    [again] = contest([PLAIN], PROMPTS, fresh=True)
    assert again.outputs == plain.outputs, "fixed seeds"
    [greedy] = Evaluator(pair, resources(), max_tokens=10)([PLAIN], PROMPTS)
    assert plain.outputs != greedy.outputs
    twice = [PROMPTS[0], Prompt("again", None, PROMPTS[0].turns)]
    [two] = contest([PLAIN], twice)
    assert two.outputs[0] != two.outputs[1], "every prompt has a seed of its own"


def test_sampled_outputs_are_judged_by_how_likely_they_are(pair: LoadedPair) -> None:
    """Greedy texts have the best share of argmax, and are far too likely for samples: only the
    second measure shows it."""
    many = [Prompt(f"p{i}", None, ["hello world"]) for i in range(60)]
    [sampled] = Evaluator(pair, resources(), max_tokens=10, temperature=0.7)([PLAIN], many)
    [greedy] = Evaluator(pair, resources(), max_tokens=10)([PLAIN], PROMPTS)
    reader = QualityReader(pair, 0.7)
    own, likely = reader(many, sampled), reader(PROMPTS, greedy)
    assert own.surprisal == pytest.approx(0.0, abs=0.1)
    assert likely.share == 1.0 > own.share
    assert likely.surprisal is not None
    assert likely.surprisal < -0.3
    assert QualityReader(pair)(PROMPTS, greedy).surprisal is None
