"""Recording a request: every position, the figures that both models really give, and nothing
changed by looking."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from draftwell.serving.recording import recorder as recording
from draftwell.serving.recording.recorder import PositionRecorder
from draftwell.serving.recording.shadow import MOST_UNREAD, read_along
from draftwell.serving.runtime.engine.engine import Engine, Job
from draftwell.serving.runtime.logits import Span
from draftwell.serving.runtime.models.cuda.cuda_llama import CudaLlama
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.sampling import warp
from draftwell.serving.runtime.strategies import STRATEGIES, build_strategy
from tests.support.cases import in_turn
from tests.support.models.counters import counters
from tests.support.models.llama_shapes import MODULES, random_tokens
from tests.support.models.resources import NEEDED, table_pair, table_resources
from tests.support.models.spans import all_rows

VOCAB, PROMPT = 8, [1, 2]
DRAFTING = [name for name, cls in STRATEGIES.items() if "draft" in cls.roles]
DRAFTLESS = [name for name in STRATEGIES if name not in DRAFTING]
MOST_MISSING = {"sprinter": 22}
"""Last positions that both models have not read when a text ends: its last bonus tokens, or a run
of SPRINTER's that no target saw."""


def run(
    name: str,
    *,
    recorded: bool,
    temperature: float = 0.0,
    seed: int = 3,
    models: dict[Any, Any] | None = None,
    max_tokens: int = 40,
    stops: frozenset[int] = frozenset(),
    shadow: bool = True,
) -> tuple[Job, PositionRecorder | None]:
    strategy = build_strategy(name, NEEDED.get(name, {}), table_resources(VOCAB))
    models = models or table_pair(VOCAB, noise=0.6)
    engine = Engine(models)
    sampling = Sampling(
        max_tokens=max_tokens, temperature=temperature, seed=seed, stop_token_ids=stops
    )
    job = engine.submit(PROMPT, sampling, strategy)
    recorder = (
        PositionRecorder(job.session, lossless=strategy.lossless, hidden=True) if recorded else None
    )
    if recorder and name in DRAFTLESS and shadow:
        read_along(job, models["draft"], recorder)
    engine.run([job])
    if recorder:
        recorder.finish()
    return job, recorder


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("name", STRATEGIES)
def test_every_position_is_recorded_as_both_models_see_it(name: str, temperature: float) -> None:
    """Also those that were not drafted, and those drafted behind what was rejected later: the
    tables say what is right."""
    models = table_pair(VOCAB, noise=0.6)
    job, recorder = run(name, recorded=True, temperature=temperature)
    assert recorder is not None
    assert not recorder.failed
    positions, output = recorder.positions, job.output
    missing = 0 if name in DRAFTLESS else MOST_MISSING.get(name, 3)
    assert len(output) - missing <= len(positions) <= len(output) == 40
    for i, position in enumerate(positions):
        behind = [*PROMPT, *output[:i]]
        q_logits, p_logits = (models[role].next_logits(behind) for role in ("draft", "target"))
        q, p, drafted = q_logits.softmax(-1), p_logits.softmax(-1), position["draft_token"]
        assert (position["position"], position["token"]) == (i, output[i])
        assert position["confidence"] == pytest.approx(float(q.max()), abs=1e-6)
        assert position["entropy"] == pytest.approx(float(torch.special.entr(q).sum()), abs=1e-5)
        assert (position["draft_raw_q"], position["draft_raw_p"]) == pytest.approx(
            (float(q[drafted]), float(p[drafted])), abs=1e-6
        )
        assert position["ratio"] == pytest.approx(float(q[drafted] / p[drafted]), rel=1e-4)
        assert position["rank"] == int((q > q[drafted]).sum())
        assert position["hidden_before"] == pytest.approx(q_logits.numpy(), abs=1e-2)
        if temperature == 0.0:
            chosen = int(p.argmax())
            assert (drafted, position["correction"]) == (int(q.argmax()), chosen)
            assert (position["draft_q"], position["draft_p"]) == (1.0, float(drafted == chosen))
        else:
            warped = [warp(logits, job.session.sampling) for logits in (q_logits, p_logits)]
            assert (position["draft_q"], position["draft_p"]) == pytest.approx(
                [float(w[drafted]) for w in warped], abs=1e-6
            )
            rejected = (warped[1] - warped[0]).clamp(min=0)
            assert float(rejected[position["correction"]]) > 0 or float(rejected.sum()) == 0


@pytest.mark.parametrize(("name", "temperature"), in_turn(STRATEGIES, [0.0, 0.8]))
def test_a_recorded_request_is_decoded_as_any_other(name: str, temperature: float) -> None:
    for seed in range(2 if temperature else 1):
        plain, recorded = (
            run(name, recorded=recorded, temperature=temperature, seed=seed)[0]
            for recorded in (False, True)
        )
        assert plain.output == recorded.output
        assert counters(plain.session.stats) == counters(recorded.session.stats)


@pytest.mark.parametrize(
    "name", ["vanilla_sd", "spide", "duo_decoding", "pyramid_fuzzy", "sprinter", "prompt_lookup"]
)
@pytest.mark.parametrize("at", [0, 1, 7])
def test_a_recorder_that_fails_hurts_nobody(
    name: str, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in the middle of an overlap, whose other side is on its way with rows that only the
    recorder asked for."""
    calls = itertools.count()
    position = PositionRecorder._position

    def broken(*arguments: Any) -> Any:
        if next(calls) >= at:
            raise RuntimeError("broken")
        return position(*arguments)

    plain, _ = run(name, recorded=False)
    monkeypatch.setattr(PositionRecorder, "_position", broken)
    job, recorder = run(name, recorded=True)
    assert recorder is not None
    assert recorder.failed
    assert recorder.positions == []
    assert job.output == plain.output
    assert counters(job.session.stats) == counters(plain.session.stats)
    assert all(lane.recorder is None for lane in job.session.lanes.values())


def test_texts_that_end_early_are_recorded_up_to_their_end() -> None:
    whole = run("vanilla_sd", recorded=False)[0].output
    for stop in set(whole):
        job, recorder = run("vanilla_sd", recorded=True, stops=frozenset({stop}))
        assert recorder is not None
        assert [p["token"] for p in recorder.positions] == job.output[: len(recorder.positions)]
        assert len(recorder.positions) >= len(job.output) - 1


def test_what_waits_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text that the draft never reads is given up, not collected."""
    monkeypatch.setattr(recording, "MOST_WAITING", 10)
    _, recorder = run("autoregressive", recorded=True, max_tokens=60, shadow=False)
    assert recorder is not None
    assert recorder.failed
    assert recorder._rows == {"target": {}, "draft": {}}


@pytest.mark.parametrize("guesses", [10, 16, 32])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_shadow_reads_now_and_then_however_many_guesses_are_rejected(
    guesses: int, temperature: float
) -> None:
    """The target's rows behind rejected guesses, several for one position, are not kept: they would
    fill what may wait."""
    models, strategy = (
        table_pair(30, noise=0.6),
        build_strategy("prompt_lookup", {"prompt_lookup_num_tokens": guesses}, table_resources(30)),
    )
    forward, calls = models["draft"].forward, itertools.count()
    models["draft"].forward = lambda commands: next(calls) >= 0 and forward(commands)
    engine = Engine(models)
    job = engine.submit(
        [i % 30 for i in range(60)],
        Sampling(max_tokens=200, temperature=temperature, seed=1),
        strategy,
    )
    recorder = PositionRecorder(job.session, lossless=True)
    read_along(job, models["draft"], recorder)
    engine.run([job])
    assert job.session.stats.judged - job.session.stats.accepted > 30, (
        "many are rejected, or the test proves nothing"
    )
    assert [position["token"] for position in recorder.finish()] == job.output
    assert next(calls) <= 2 + 200 / MOST_UNREAD


def test_a_shadow_reads_on_as_soon_as_enough_is_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    models = table_pair(VOCAB, noise=0.6)
    forward, read = models["draft"].forward, list[int]()

    def counted(commands: Any) -> Any:
        read.extend(len(command.tokens) for command in commands)
        return forward(commands)

    monkeypatch.setattr(models["draft"], "forward", counted)
    run("autoregressive", recorded=True, models=models)
    assert read[:-1] == [MOST_UNREAD] * 5


def test_many_rejected_drafts_are_recorded_too() -> None:
    models = table_pair(30, noise=3.0)
    strategy = build_strategy("vanilla_sd", {"num_speculative_tokens": 16}, table_resources(30))
    engine = Engine(models)
    job = engine.submit(PROMPT, Sampling(max_tokens=60), strategy)
    recorder = PositionRecorder(job.session, lossless=True)
    engine.run([job])
    assert len(recorder.finish()) >= 57


@pytest.mark.parametrize("name", DRAFTLESS)
@pytest.mark.parametrize("at", [0, 1])
def test_a_shadow_whose_draft_fails_hurts_nobody(
    name: str, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, _ = run(name, recorded=False, max_tokens=90)
    models = table_pair(VOCAB, noise=0.6)
    forward, calls = models["draft"].forward, itertools.count()

    def broken(commands: Any) -> Any:
        if next(calls) >= at:
            raise MemoryError("no room")
        return forward(commands)

    monkeypatch.setattr(models["draft"], "forward", broken)
    job, recorder = run(name, recorded=True, models=models, max_tokens=90)
    assert recorder is not None
    assert next(calls) == at + 1, "asked once more, and then no more"
    assert recorder.failed
    assert recorder.positions == []
    assert (job.error, job.output) == (None, plain.output)
    free = {models["draft"].open() for _ in range(models["draft"].slots.count)}
    assert len(free) == models["draft"].slots.count, "its slot is free again"


@pytest.mark.parametrize("name", ["vanilla_sd", "pearl"])
def test_drafts_that_a_model_chains_by_itself(name: str) -> None:
    """Where a model drafts several tokens in one command, a recorded request draws them one by one:
    each has a row."""

    def decode(recorded: bool) -> tuple[list[int], list[dict[str, Any]]]:
        engine = Engine({role: CudaLlama(module, slots=1) for role, module in MODULES.items()})  # type: ignore[misc]
        job = engine.submit(
            random_tokens(5),
            Sampling(max_tokens=24),
            build_strategy(name, {"num_speculative_tokens": 4}, table_resources(8)),
        )
        recorder = PositionRecorder(job.session, lossless=True) if recorded else None
        engine.run([job])
        return job.output, recorder.finish() if recorder else []

    plain, (output, positions) = decode(False)[0], decode(True)
    assert output == plain
    assert len(output) - 3 <= len(positions)
    assert [p["token"] for p in positions] == output[: len(positions)]
    assert 0 < sum(p["draft_p"] for p in positions) < len(positions)


def test_what_waits_holds_its_own_rows_and_not_the_batch() -> None:
    """Forwards give views of the logits of all requests; a row that is kept for long must not keep
    all those."""
    strategy = build_strategy("autoregressive", {}, table_resources(VOCAB))
    engine = Engine(table_pair(VOCAB, noise=0.6))
    model = engine.models["target"]
    forward = model.forward

    def in_batches(rows: Any) -> list[Span]:
        outputs = []
        for output in forward(rows):
            batch = torch.cat([output.values, torch.zeros(100, VOCAB)])
            states = (
                torch.cat([output.states, torch.zeros(100, output.states.shape[1])])
                if output.states is not None
                else None
            )
            outputs.append(
                all_rows(
                    batch[: len(output)], states[: len(output)] if states is not None else None
                )
            )
        return outputs

    model.forward = in_batches  # type: ignore[method-assign]
    job = engine.submit(PROMPT, Sampling(max_tokens=20), strategy)
    recorder = PositionRecorder(job.session, lossless=True, hidden=True)
    engine.run([job])
    kept = [
        row.span for of_role in recorder._rows.values() for rows in of_role.values() for row in rows
    ]
    assert len(kept) > 10
    for output in kept:
        assert output.values.untyped_storage().nbytes() == VOCAB * 4
        assert (
            output.states is None
            or output.states.untyped_storage().nbytes()
            == output.states.numel() * output.states.element_size()
        )
