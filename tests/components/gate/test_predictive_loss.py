"""A worse verifier and a shuffled table are told from the champion's by a trace alone, every
time."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import draftwell.components.gate.predictions
from draftwell.components.calibrate.acceptance_table import build_acceptance_table
from draftwell.components.collect.plan import prompt_hashes
from draftwell.components.gate.predictions import (
    PredictiveLoss,
    incomparable,
    judge_predictions,
    predictions,
    scores_of,
)
from draftwell.components.prompts.prompt import Prompt
from draftwell.components.train.examples import Examples, read_examples, split_by_prompt
from draftwell.serving.artifacts.acceptance_table import AcceptanceTable
from draftwell.serving.artifacts.base import Provenance
from draftwell.serving.artifacts.verifier import Verifier
from draftwell.serving.bundle.verdict import FAILED, UNDECIDED, Check, Thresholds
from draftwell.serving.recording.trace import TraceSet
from tests.support.collecting import collect_traces
from tests.support.errors import raises_code
from tests.support.models.tiny import llama_pair

ORIGIN = Provenance(pair="tiny", fingerprint="f" * 64)
LIMIT = Thresholds(max_prediction_loss_ratio=1.05)
WORDS = [
    "abcab cabinet",
    "hello hello",
    "zebra",
    "one two three",
    "a quick fox",
    "banana",
    "mississippi",
    "level",
    "noon",
    "kayak",
    "racecar",
    "stats",
    "tenet",
    "civic",
    "radar",
    "rotor",
]


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> TraceSet:
    """Texts of the target, and of others, with what the draft knew at every position."""
    prompts = [
        Prompt(f"p{i}", None, [f"{text} {text[::-1]} {i}"]) for i, text in enumerate(WORDS * 3)
    ]
    return collect_traces(
        llama_pair(noise=0.02),
        prompts,
        tmp_path_factory.mktemp("t") / "traces",
        max_tokens=48,
        rollout=5,
        prefix_kinds=("target", "draft"),
    )


@pytest.fixture(scope="module")
def good(traces: TraceSet) -> dict[str, Any]:
    """A table made from the traces, and a verifier that was fitted to them."""
    examples = read_examples(traces)
    x, y = (
        torch.from_numpy(examples.features(("scalars",))),
        torch.from_numpy(examples.ratio <= 1.2).float(),
    )
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
    assert scores_of(verifier, examples)[0] == pytest.approx(
        float(torch.sigmoid(x[0] @ weight + bias)), abs=1e-5
    )
    return {"acceptance_table": build_acceptance_table(traces, ORIGIN), "verifier": verifier}


def judged(
    candidate: dict[str, Any], champion: dict[str, Any], traces: TraceSet
) -> dict[str, Check]:
    found, _ = predictions(candidate, champion, traces)
    return {check.name: check for check in judge_predictions(found, LIMIT).checks}


@pytest.mark.parametrize(
    ("losses", "result"),
    [
        ((0.5, 0.7, 0.6, 0.55) * 4, "passed"),
        ((0.5, 1.4, 0.6, 1.45) * 4, UNDECIDED),
        ((0.8, 1.5, 0.9, 1.45) * 4, UNDECIDED),
        ((1.6, 1.7, 1.5, 1.8) * 4, FAILED),
    ],
)
def test_a_ratio_on_both_sides_of_the_limit_neither_passes_nor_fails(
    losses: tuple[float, ...], result: str
) -> None:
    """The second is within the limit by its value and its lower end, the third by the latter
    alone: an end that suits either side decides nothing."""
    found = PredictiveLoss("verifier", losses, (1.0,) * 16, (1,) * 16, "the champion's")
    verdict = judge_predictions([found], LIMIT)
    assert verdict.result == result, verdict.checks
    (check,) = verdict.checks
    assert check.passed is (result == "passed")


def test_an_unchanged_candidate_has_a_ratio_of_one_every_time(
    good: dict[str, Any], traces: TraceSet
) -> None:
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
    shuffled = AcceptanceTable(
        [table.total[i] for i in order], [table.accepted[i] for i in order], ORIGIN
    )
    check = judged({"acceptance_table": shuffled}, good, traces)["acceptance_table predicts"]
    assert not check.passed, check.detail


def test_without_a_champion_an_empty_table_is_the_rival(
    good: dict[str, Any], traces: TraceSet
) -> None:
    assert judged(good, {}, traces)["acceptance_table predicts"].passed
    gloomy = AcceptanceTable([1000] * 20, [50] * 20, ORIGIN)
    assert not judged({"acceptance_table": gloomy}, {}, traces)["acceptance_table predicts"].passed


@pytest.mark.parametrize("seed", range(10))
def test_a_worse_verifier_is_caught(good: dict[str, Any], traces: TraceSet, seed: int) -> None:
    """A sign error, and noise. (Four features that say nearly the same: in a random direction some
    still tell something.)"""
    fine = good["verifier"]
    noise = torch.randn(4, generator=torch.Generator().manual_seed(seed)) * fine.weight.std() / 10
    worse = Verifier(noise - fine.weight, fine.bias, ("scalars",), 0.5, 1.2, ORIGIN)
    check = judged({"verifier": worse}, good, traces)["verifier predicts"]
    assert not check.passed, check.detail


def test_a_better_artifact_passes(good: dict[str, Any], traces: TraceSet) -> None:
    blunt = {
        "acceptance_table": AcceptanceTable([1000] * 20, [500] * 20, ORIGIN),
        "verifier": Verifier(torch.zeros(4), 0.0, ("scalars",), 0.5, 1.2, ORIGIN),
    }
    checks = judged(good, blunt, traces)
    assert all(check.passed and check.value < 1 for check in checks.values())


def test_a_first_verifier_is_held_against_a_constant(
    good: dict[str, Any], traces: TraceSet
) -> None:
    fine = good["verifier"]
    check = judged({"verifier": fine}, {}, traces)["verifier predicts"]
    assert check.passed
    assert check.value < 1
    assert "a constant's" in check.detail
    turned = Verifier(-fine.weight, -fine.bias, ("scalars",), 0.5, 1.2, ORIGIN)
    assert not judged({"verifier": turned}, {}, traces)["verifier predicts"].passed


def test_a_champion_that_cannot_be_compared_gives_way_to_a_constant(
    good: dict[str, Any], traces: TraceSet
) -> None:
    fine = good["verifier"]
    other = Verifier(-fine.weight, -fine.bias, fine.features, 0.5, 2.0, ORIGIN)
    found, notes = predictions({"verifier": fine}, {"verifier": other}, traces)
    assert [prediction.against for prediction in found] == ["a constant's"]
    assert (
        notes[0]
        == "verifier compared with a constant: the champion's label has lambda 2.0, this one's 1.2"
    )
    states = Verifier(torch.zeros(36), 0.0, ("before", "scalars"), 0.5, 1.2, ORIGIN)
    examples = read_examples(traces)
    poor = Examples(
        {"scalars": examples.parts["scalars"]}, examples.ratio, examples.confidence, examples.prompt
    )
    assert "feature before" in str(incomparable(fine, states, poor))
    assert incomparable(fine, fine, poor) is None


def test_a_verifier_that_cannot_be_scored_is_refused(
    good: dict[str, Any], traces: TraceSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    examples = read_examples(traces)
    poor = Examples(
        {"scalars": examples.parts["scalars"]}, examples.ratio, examples.confidence, examples.prompt
    )
    monkeypatch.setattr(draftwell.components.gate.predictions, "read_examples", lambda trace: poor)
    with raises_code("feature_missing", "feature before"):
        predictions(
            {"verifier": Verifier(torch.zeros(36), 0.0, ("before", "scalars"), 0.5, 1.2, ORIGIN)},
            {},
            traces,
        )


def test_a_verifier_is_judged_on_prompts_that_it_has_not_learnt_from(
    good: dict[str, Any], traces: TraceSet
) -> None:
    """One that knows what it has learnt by heart and nothing else would look good on all of the
    trace."""
    fine = good["verifier"]

    def made(**more: Any) -> Provenance:
        return Provenance(pair="tiny", fingerprint="f" * 64, **more)

    def tokens(origin: Provenance) -> int:
        mine = Verifier(fine.weight, fine.bias, fine.features, 0.5, 1.2, origin)
        found, _ = predictions({"verifier": mine}, {"verifier": fine}, traces)
        return sum(found[0].tokens)

    _, tested = split_by_prompt(read_examples(traces), 7)
    assert (
        tokens(made(trace_digest=traces.digest(), parameters={"seed": 7}))
        == len(tested)
        < len(read_examples(traces))
    )
    assert tokens(made(trace_digest="0" * 64, parameters={"seed": 7})) == len(
        read_examples(traces)
    ), "a foreign trace is all unseen"
    learnt = Verifier(
        fine.weight,
        fine.bias,
        fine.features,
        0.5,
        1.2,
        made(trace_digest=traces.digest(), parameters={"seed": 7, "test_trace": "1" * 64}),
    )
    found, notes = predictions({"verifier": learnt}, {}, traces)
    assert sum(found[0].tokens) == len(read_examples(traces))
    assert notes == ["the verifier has learnt from all of the traces that it is judged on"]


def test_a_sampled_trace_judges_no_table(good: dict[str, Any], tmp_path: Path) -> None:
    """Its rollouts begin with rejected tokens, so that the gloomiest table would predict them
    best."""
    sampled = collect_traces(
        llama_pair(noise=0.02),
        [Prompt("p", None, ["abcab"])],
        tmp_path,
        max_tokens=12,
        rollout=3,
        temperature=0.7,
    )
    with raises_code("sampled_trace", "temperature 0.7", "temperature 0 "):
        predictions({"acceptance_table": good["acceptance_table"]}, {}, sampled)


def test_a_verifier_is_not_judged_on_prompts_of_another_trace_that_it_has_learnt_from(
    good: dict[str, Any], traces: TraceSet
) -> None:
    """Another digest does not mean other prompts: a part of the same ones may have been collected
    again."""
    hashes = prompt_hashes(traces)
    assert hashes is not None
    fine, learnt = good["verifier"], sorted(hashes.values())

    def judged_on(*known: str, recorded: bool = True) -> tuple[int, list[str]]:
        origin = ORIGIN.model_copy(
            update={"trace_digest": "0" * 64, "training_prompts": list(known) if recorded else None}
        )
        found, notes = predictions(
            {"verifier": Verifier(fine.weight, fine.bias, fine.features, 0.5, 1.2, origin)},
            {},
            traces,
        )
        return len(found[0].tokens), notes

    everything, notes = judged_on()
    assert (everything, notes) == (len(WORDS) * 3, [])
    assert judged_on(*learnt[:40]) == (
        everything - 40,
        ["the verifier has learnt from 40 of the traces' prompts: left out"],
    )
    count, notes = judged_on(recorded=False)
    assert count == everything
    assert notes[0].startswith(
        "whether the verifier has learnt from prompts that it is judged on is unknown"
    )
    with raises_code("no_untouched_prompts"):
        judged_on(*learnt)


def made_on(artifact: Any, **provenance: Any) -> Any:
    """The same artifact, made from something else."""
    again = copy.copy(artifact)
    again.provenance = ORIGIN.model_copy(update=provenance)
    return again


def test_a_table_is_not_judged_on_what_it_has_counted(tmp_path: Path) -> None:
    """One that knows three texts by heart: on the very trace each prompt is predicted by the counts
    of the others."""
    prompts = [Prompt(f"p{i}", None, [f"{text} {text[::-1]}"]) for i, text in enumerate(WORDS[:3])]
    few = collect_traces(
        llama_pair(noise=0.02), prompts, tmp_path / "few", max_tokens=24, rollout=3
    )
    table = build_acceptance_table(few, ORIGIN)
    (seen,), _ = predictions({"acceptance_table": table}, {}, few)
    (honest,), notes = predictions(
        {"acceptance_table": made_on(table, trace_digest=few.digest())}, {}, few
    )
    assert notes == []
    assert sum(seen.losses) < sum(honest.losses), "its own prompts flatter it"
    assert honest.tokens == seen.tokens
    twice = build_acceptance_table(few, ORIGIN.model_copy(update={"trace_digest": few.digest()}))
    (alone,), _ = predictions(
        {"acceptance_table": made_on(AcceptanceTable.empty(), trace_digest=few.digest())}, {}, few
    )
    assert alone.losses == alone.reference, "less than nothing is nothing"
    (same,), _ = predictions({"acceptance_table": twice}, {"acceptance_table": twice}, few)
    assert same.losses == same.reference == honest.losses


def test_a_table_without_a_prompt_keeps_its_prior_weight(traces: TraceSet) -> None:
    """With a weight that outweighs all counts, a table predicts as an empty one, also where a
    prompt's own counts are taken away."""
    table = build_acceptance_table(
        traces, ORIGIN.model_copy(update={"trace_digest": traces.digest()})
    )
    table.prior_weight = 10**9
    (found,), _ = predictions({"acceptance_table": table}, {}, traces)
    assert found.losses == pytest.approx(found.reference)
    table.prior_weight = 10
    (found,), _ = predictions({"acceptance_table": table}, {}, traces)
    assert found.losses != pytest.approx(found.reference)


def test_prompts_that_a_table_has_counted_in_another_trace_are_left_out(
    good: dict[str, Any], traces: TraceSet
) -> None:
    hashes = prompt_hashes(traces)
    assert hashes is not None
    counted = sorted(hashes.values())
    table = made_on(good["acceptance_table"], trace_digest="0" * 64, training_prompts=counted[:20])
    (found,), notes = predictions({"acceptance_table": table}, {}, traces)
    assert (len(found.tokens), notes) == (
        len(counted) - 20,
        ["the acceptance_table has learnt from 20 of the traces' prompts: left out"],
    )
    with raises_code(
        "no_untouched_prompts",
        "acceptance_table",
        "draftwell step calibrate",
        "draftwell step collect --set fresh=true",
    ):
        predictions(
            {"acceptance_table": made_on(table, trace_digest="0" * 64, training_prompts=counted)},
            {},
            traces,
        )
    _, notes = predictions({"acceptance_table": made_on(table, training_prompts=None)}, {}, traces)
    assert "unknown" in notes[0]


@pytest.mark.parametrize("kind", ["acceptance_table", "verifier"])
def test_what_only_the_champions_has_learnt_from_is_left_out_while_others_are_left(
    good: dict[str, Any], traces: TraceSet, kind: str
) -> None:
    hashes = prompt_hashes(traces)
    assert hashes is not None
    every = sorted(hashes.values())
    mine = made_on(good[kind], trace_digest="0" * 64, training_prompts=every[:10])

    def beside(known: list[str]) -> tuple[PredictiveLoss, list[str]]:
        (found,), notes = predictions(
            {kind: mine},
            {kind: made_on(good[kind], trace_digest="1" * 64, training_prompts=known)},
            traces,
        )
        return found, notes

    found, notes = beside(every[5:30])
    assert (len(found.tokens), found.favours_champion) == (len(every) - 30, False)
    assert f"the champion's {kind} has learnt from 20 of the traces' prompts: left out" in notes
    found, notes = beside(every)
    assert (len(found.tokens), found.favours_champion) == (len(every) - 10, True)
    assert "favours it" in notes[-1]


def test_a_worse_prediction_on_the_champions_own_prompts_is_no_evidence() -> None:
    losses = PredictiveLoss(
        "verifier", (3.0, 3.1, 2.9), (1.0, 1.1, 0.9), (5, 5, 5), "the champion's"
    )
    assert judge_predictions([losses], LIMIT).result == FAILED
    assert judge_predictions([replace(losses, favours_champion=True)], LIMIT).result == UNDECIDED
    assert judge_predictions(
        [replace(losses, favours_champion=True, losses=losses.reference)], LIMIT
    ).passed


def test_a_champions_artifact_for_other_requests_is_no_rival(
    good: dict[str, Any], traces: TraceSet
) -> None:
    """A verifier of greedy traces is blind to the rest: to beat it on sampled ones is easy, and the
    other way round."""
    greedy = {
        kind: made_on(artifact, parameters={"temperature": 0.0}) for kind, artifact in good.items()
    }
    sampled = {
        kind: made_on(artifact, parameters={"temperature": 1.0}) for kind, artifact in good.items()
    }
    found, notes = predictions(greedy, sampled, traces)
    assert [one.against for one in found] == ["an empty table's", "a constant's"]
    assert sum("the champion's is for temperature 1, this one for 0" in note for note in notes) == 2
    found, _ = predictions(greedy, greedy, traces)
    assert {one.against for one in found} == {"the champion's"}
