"""A worse verifier and a shuffled table are told from the champion's by a trace alone, every time."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

import components.gate.predictive_loss
from components.calibrate.acceptance_table import build_acceptance_table
from components.collect.plan import prompt_hashes
from components.gate.predictive_loss import incomparable, judge_predictions, predictions, scores_of
from components.gate.verdict import Check, Thresholds
from components.prompts.prompt import Prompt
from components.train.examples import Examples, read_examples, split_by_prompt
from serving.artifacts.acceptance_table import AcceptanceTable
from serving.artifacts.base import Provenance
from serving.artifacts.verifier import Verifier
from serving.recording.trace import TraceSet
from tests.support.collecting import collect_traces
from tests.support.errors import raises_code
from tests.support.models.tiny import llama_pair

ORIGIN = Provenance(pair="tiny", fingerprint="f" * 64)
LIMIT = Thresholds(max_prediction_loss_ratio=1.05)
WORDS = ["abcab cabinet", "hello hello", "zebra", "one two three", "a quick fox", "banana", "mississippi", "level", "noon", "kayak",
         "racecar", "stats", "tenet", "civic", "radar", "rotor"]


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> TraceSet:
    """Texts of the target, and of others, with what the draft knew at every position."""
    prompts = [Prompt(f"p{i}", None, [f"{text} {text[::-1]} {i}"]) for i, text in enumerate(WORDS * 3)]
    return collect_traces(llama_pair(noise=0.02), prompts, tmp_path_factory.mktemp("t") / "traces", max_tokens=48, rollout=5,
                   prefix_kinds=("target", "draft"))


@pytest.fixture(scope="module")
def good(traces: TraceSet) -> dict[str, Any]:
    """A table made from the traces, and a verifier that was fitted to them."""
    examples = read_examples(traces)
    x, y = torch.from_numpy(examples.features(("scalars",))), torch.from_numpy(examples.ratio <= 1.2).float()
    assert 0.05 < float(y.mean()) < 0.95, "a verifier needs tokens of both kinds"
    weight, bias = torch.zeros(4, requires_grad=True), torch.zeros(1, requires_grad=True)
    optimiser = torch.optim.LBFGS([weight, bias], max_iter=200)

    def loss() -> torch.Tensor:
        optimiser.zero_grad()
        value = torch.nn.functional.binary_cross_entropy_with_logits(x @ weight + bias, y)
        value.backward()
        return value

    optimiser.step(loss)
    weight, bias = weight.detach(), bias.detach()
    verifier = Verifier(weight, float(bias), ("scalars",), 0.5, 1.2, ORIGIN)
    assert scores_of(verifier, examples)[0] == pytest.approx(float(torch.sigmoid(x[0] @ weight + bias)), abs=1e-5)
    return {"acceptance_table": build_acceptance_table(traces, ORIGIN), "verifier": verifier}


def judged(candidate: dict[str, Any], champion: dict[str, Any], traces: TraceSet) -> dict[str, Check]:
    found, _ = predictions(candidate, champion, traces)
    return {check.name: check for check in judge_predictions(found, LIMIT).checks}


def test_an_unchanged_candidate_has_a_ratio_of_one_every_time(good: dict[str, Any], traces: TraceSet) -> None:
    for _ in range(10):
        checks = judged(good, good, traces)
        assert set(checks) == {"acceptance_table predicts", "verifier predicts"}
        assert {check.value for check in checks.values()} == {1.0}
        assert all(check.passed for check in checks.values())


@pytest.mark.parametrize("seed", range(10))
def test_a_shuffled_table_is_caught(good: dict[str, Any], traces: TraceSet, seed: int) -> None:
    table = good["acceptance_table"]
    order = list(range(20))
    random.Random(seed).shuffle(order)
    shuffled = AcceptanceTable([table.total[i] for i in order], [table.accepted[i] for i in order], ORIGIN)
    check = judged({"acceptance_table": shuffled}, good, traces)["acceptance_table predicts"]
    assert not check.passed, check.detail


def test_without_a_champion_an_empty_table_is_the_rival(good: dict[str, Any], traces: TraceSet) -> None:
    assert judged(good, {}, traces)["acceptance_table predicts"].passed
    gloomy = AcceptanceTable([1000] * 20, [50] * 20, ORIGIN)
    assert not judged({"acceptance_table": gloomy}, {}, traces)["acceptance_table predicts"].passed


@pytest.mark.parametrize("seed", range(10))
def test_a_worse_verifier_is_caught(good: dict[str, Any], traces: TraceSet, seed: int) -> None:
    """A sign error, and noise. (Four features that say nearly the same: in a random direction some still tell something.)"""
    fine = good["verifier"]
    noise = torch.randn(4, generator=torch.Generator().manual_seed(seed)) * fine.weight.std() / 10
    worse = Verifier(noise - fine.weight, fine.bias, ("scalars",), 0.5, 1.2, ORIGIN)
    check = judged({"verifier": worse}, good, traces)["verifier predicts"]
    assert not check.passed, check.detail


def test_a_better_artifact_passes(good: dict[str, Any], traces: TraceSet) -> None:
    blunt = {"acceptance_table": AcceptanceTable([1000] * 20, [500] * 20, ORIGIN),
             "verifier": Verifier(torch.zeros(4), 0.0, ("scalars",), 0.5, 1.2, ORIGIN)}
    checks = judged(good, blunt, traces)
    assert all(check.passed and check.value < 1 for check in checks.values())


def test_a_first_verifier_is_held_against_a_constant(good: dict[str, Any], traces: TraceSet) -> None:
    fine = good["verifier"]
    check = judged({"verifier": fine}, {}, traces)["verifier predicts"]
    assert check.passed
    assert check.value < 1
    assert "a constant's" in check.detail
    turned = Verifier(-fine.weight, -fine.bias, ("scalars",), 0.5, 1.2, ORIGIN)
    assert not judged({"verifier": turned}, {}, traces)["verifier predicts"].passed


def test_a_champion_that_cannot_be_compared_gives_way_to_a_constant(good: dict[str, Any], traces: TraceSet) -> None:
    fine = good["verifier"]
    other = Verifier(-fine.weight, -fine.bias, fine.features, 0.5, 2.0, ORIGIN)
    found, notes = predictions({"verifier": fine}, {"verifier": other}, traces)
    assert [prediction.against for prediction in found] == ["a constant's"]
    assert notes[-1] == "verifier compared with a constant: the champion's label has lambda 2.0, this one's 1.2"
    states = Verifier(torch.zeros(36), 0.0, ("before", "scalars"), 0.5, 1.2, ORIGIN)
    examples = read_examples(traces)
    poor = Examples({"scalars": examples.parts["scalars"]}, examples.ratio, examples.confidence, examples.prompt)
    assert "feature before" in str(incomparable(fine, states, poor))
    assert incomparable(fine, fine, poor) is None


def test_a_verifier_that_cannot_be_scored_is_refused(good: dict[str, Any], traces: TraceSet, monkeypatch: pytest.MonkeyPatch) -> None:
    examples = read_examples(traces)
    poor = Examples({"scalars": examples.parts["scalars"]}, examples.ratio, examples.confidence, examples.prompt)
    monkeypatch.setattr(components.gate.predictive_loss, "read_examples", lambda trace: poor)
    with raises_code("feature_missing", "feature before"):
        predictions({"verifier": Verifier(torch.zeros(36), 0.0, ("before", "scalars"), 0.5, 1.2, ORIGIN)}, {}, traces)


def test_a_verifier_is_judged_on_prompts_that_it_has_not_learnt_from(good: dict[str, Any], traces: TraceSet) -> None:
    """One that knows what it has learnt by heart and nothing else would look good on all of the trace."""
    fine = good["verifier"]

    def made(**more: Any) -> Provenance:
        return Provenance(pair="tiny", fingerprint="f" * 64, **more)

    def tokens(origin: Provenance) -> int:
        mine = Verifier(fine.weight, fine.bias, fine.features, 0.5, 1.2, origin)
        found, _ = predictions({"verifier": mine}, {"verifier": fine}, traces)
        return sum(found[0].tokens)

    _, tested = split_by_prompt(read_examples(traces), 7)
    assert tokens(made(trace_digest=traces.digest(), parameters={"seed": 7})) == len(tested) < len(read_examples(traces))
    assert tokens(made(trace_digest="0" * 64, parameters={"seed": 7})) == len(read_examples(traces)), "a foreign trace is all unseen"
    learnt = Verifier(fine.weight, fine.bias, fine.features, 0.5, 1.2,
                      made(trace_digest=traces.digest(), parameters={"seed": 7, "test_trace": "1" * 64}))
    found, notes = predictions({"verifier": learnt}, {}, traces)
    assert sum(found[0].tokens) == len(read_examples(traces))
    assert notes == ["the verifier has learnt from all of the traces that it is judged on"]


def test_a_sampled_trace_judges_no_table(good: dict[str, Any], tmp_path: Path) -> None:
    """Its rollouts begin with rejected tokens, so that the gloomiest table would predict them best."""
    sampled = collect_traces(llama_pair(noise=0.02), [Prompt("p", None, ["abcab"])], tmp_path, max_tokens=12, rollout=3, temperature=0.7)
    with raises_code("sampled_trace", "temperature 0.7", "temperature 0 "):
        predictions({"acceptance_table": good["acceptance_table"]}, {}, sampled)


def test_a_verifier_is_not_judged_on_prompts_of_another_trace_that_it_has_learnt_from(good: dict[str, Any], traces: TraceSet) -> None:
    """Another digest does not mean other prompts: a part of the same ones may have been collected again."""
    hashes = prompt_hashes(traces)
    assert hashes is not None
    fine, learnt = good["verifier"], sorted(hashes.values())

    def judged_on(*known: str, recorded: bool = True) -> tuple[int, list[str]]:
        origin = ORIGIN.model_copy(update={"trace_digest": "0" * 64, "training_prompts": list(known) if recorded else None})
        found, notes = predictions({"verifier": Verifier(fine.weight, fine.bias, fine.features, 0.5, 1.2, origin)}, {}, traces)
        return len(found[0].tokens), notes

    everything, notes = judged_on()
    assert (everything, notes) == (len(WORDS) * 3, [])
    assert judged_on(*learnt[:40]) == (everything - 40, ["the verifier has learnt from 40 of the traces' prompts: left out"])
    count, notes = judged_on(recorded=False)
    assert count == everything
    assert "unknown: the verifier does not record its prompts" in notes[0]
    with raises_code("no_untouched_prompts"):
        judged_on(*learnt)
