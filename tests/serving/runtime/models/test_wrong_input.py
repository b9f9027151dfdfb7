"""Wrong input: one typed line for whoever sent it, and exactly their own tokens for all others in
flight."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch

from draftwell.serving.errors import (
    ContextTooLong,
    DraftwellError,
    InvalidRequest,
    NotFinite,
    OutOfMemory,
    VocabularyMismatch,
)
from draftwell.serving.runtime.commands import Forward
from draftwell.serving.runtime.engine.engine import Engine, Job
from draftwell.serving.runtime.logits import Span
from draftwell.serving.runtime.model_files import load_module
from draftwell.serving.runtime.models.slots import Slots
from draftwell.serving.runtime.models.transformers_model import TransformersModel
from draftwell.serving.runtime.pair import over_slots
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.strategies import STRATEGIES, Strategy, build_strategy
from tests.support.cases import in_turn
from tests.support.errors import raises_code
from tests.support.models.resources import table_pair, table_resources
from tests.support.models.table_model import TableModel
from tests.support.models.tiny import VOCAB, llama, near
from tests.support.models.variants import VARIANTS

SICK = 7
"""The first token of the prompt that goes wrong."""
GOOD = [[1, 2], [3, 4, 1], [5, 1]]
ROLES = [(name, role) for name, strategy in STRATEGIES.items() for role in strategy.roles]


def build(name: str) -> Strategy:
    parameters = next((parameters for known, parameters in VARIANTS if known == name), {})
    return build_strategy(name, parameters, table_resources(8))


def models_of(strategy: Strategy) -> dict:
    """Table models for all roles of a strategy."""
    models = table_pair(vocab=8)
    for role in strategy.roles:
        if role not in models:
            noise = 0.5 * torch.randn(
                models["target"].table.shape, generator=torch.Generator().manual_seed(9)
            )
            models[role] = TableModel(models["target"].table + noise)
    return models


def sicken(
    model: TableModel,
    fault: Callable[[Sequence[Forward], set[int]], None],
    after: Callable[[Span], None] = lambda output: None,
) -> None:
    """Watch a model: `fault` sees every batch and the slots of sick requests, `after` their outputs
    behind the prompt."""
    original, sick = model.forward, set()

    def forward(rows: Sequence[Forward]) -> list[Span]:
        for row in rows:
            if row.prefill:
                (sick.add if row.tokens[0] == SICK else sick.discard)(row.slot)
        fault(rows, sick)
        outputs = original(rows)
        for row, output in zip(rows, outputs, strict=True):
            if row.slot in sick and not (row.prefill and row.model == "target"):
                after(output)
        return outputs

    model.forward = forward


def nothing(rows: Sequence[Forward], sick: set[int]) -> None:
    pass


def sampled(i: int, temperature: float, max_tokens: int = 14) -> Sampling:
    return Sampling(max_tokens=max_tokens + i, temperature=temperature, seed=i)


def run_with_a_sick_one(models: dict, name: str, temperature: float) -> tuple[Job, list[Job]]:
    """Submit the sick request between good ones and run until all are done; the good ones are
    checked here."""
    engine = Engine(models)
    good = [engine.submit(GOOD[0], sampled(0, temperature), build(name))]
    bad = engine.submit([SICK, 2], sampled(9, temperature), build(name))
    good += [
        engine.submit(prompt, sampled(i, temperature), build(name))
        for i, prompt in enumerate(GOOD[1:], 1)
    ]
    while engine.jobs:
        engine.step()
    engine.close()
    fresh = models_of(build(name))
    for i, (job, prompt) in enumerate(zip(good, GOOD, strict=True)):
        assert job.error is None
        assert (
            job.output
            == Engine(fresh).generate(prompt, sampled(i, temperature), build(name)).output
        )
    assert {len(model.slots._free) for model in models.values()} == {8}, "every slot came back"
    return bad, good


def check_line(error: BaseException | None, kind: type[DraftwellError], *words: str) -> None:
    assert type(error) is kind
    assert "\n" not in str(error)
    for word in words:
        assert word in str(error)


@pytest.mark.parametrize(
    ("name", "role", "bad_value", "temperature"), in_turn(ROLES, [math.nan, math.inf], [0.0, 1.0])
)
def test_logits_that_are_not_finite_end_their_own_request_only(name, role, bad_value, temperature):
    def spoil(output: Span) -> None:
        output.values[-1, 3] = bad_value  # the last kept row: the bonus's in a verification

    models = models_of(build(name))
    sicken(models[role], nothing, spoil)
    bad, _ = run_with_a_sick_one(models, name, temperature)
    if name == "prompt_lookup" and bad.error is None:
        pytest.fail("a forward was never read")
    check_line(bad.error, NotFinite, "NaN or infinite")


@pytest.mark.parametrize("name", [n for n, s in STRATEGIES.items() if "draft" in s.roles])
def test_not_finite_in_a_row_behind_a_rejection_is_found(name):
    """Even where no decision would have read it: numbers that are wrong in one row are not to be
    trusted in the next."""

    def spoil(output: Span) -> None:
        output.values[0, 0] = math.nan

    models = models_of(build(name))
    sicken(models["target"], nothing, spoil)
    bad, _ = run_with_a_sick_one(models, name, 0.0)
    check_line(bad.error, NotFinite)


class OnnxError(Exception):
    """ONNX Runtime's errors are no `RuntimeError`s."""


NO_ROOM = {
    "cuda": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    "host": lambda: RuntimeError(
        "[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: "
        "you tried to "
        "allocate 99 bytes. Error code 12 (Cannot allocate memory)"
    ),
    "python": MemoryError,
    "onnxruntime": lambda: OnnxError(
        "[ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : Failed to allocate memory for "
        "requested buffer"
    ),
}


@pytest.mark.parametrize(("name", "role", "library"), in_turn(ROLES, list(NO_ROOM)))
def test_a_request_that_finds_no_memory_ends_alone(name, role, library):
    def fault(rows: Sequence[Forward], sick: set[int]) -> None:
        if any(row.slot in sick and not row.prefill for row in rows):
            raise NO_ROOM[library]()

    models = models_of(build(name))
    sicken(models[role], fault)
    bad, _ = run_with_a_sick_one(models, name, 1.0)
    check_line(bad.error, OutOfMemory, "fewer slots", "shorter context")


@pytest.mark.parametrize(("name", "library"), in_turn(STRATEGIES, list(NO_ROOM)))
def test_a_batch_without_room_is_run_request_by_request(name, library):
    def fault(rows: Sequence[Forward], sick: set[int]) -> None:
        if len(rows) > 1:
            raise NO_ROOM[library]()

    models = models_of(build(name))
    sicken(models["target"], fault)
    bad, _ = run_with_a_sick_one(models, name, 1.0)
    assert bad.error is None, "each of them fits alone"


def test_slots_without_room_are_refused_with_the_mend():
    with pytest.raises(OutOfMemory) as caught:
        Slots(
            [(64, 128)],
            count=10**5,
            max_context=10**6,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )
    check_line(
        caught.value,
        OutOfMemory,
        "100000 slots of 1000000 positions",
        "fewer slots or a shorter context",
    )


def test_weights_without_room_are_not_called_broken(tmp_path, monkeypatch):
    import transformers

    def load(*args: object, **settings: object) -> None:
        raise NO_ROOM["host"]()

    llama(1).save_pretrained(tmp_path)
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", load)
    with raises_code("out_of_memory", tmp_path.name, "smaller dtype", error=OutOfMemory):
        load_module(tmp_path, torch.float32, "cpu")


def test_other_errors_keep_their_name():
    models = models_of(build("vanilla_sd"))

    def fault(rows: Sequence[Forward], sick: set[int]) -> None:
        if any(row.slot in sick for row in rows):
            raise RuntimeError("a kernel failed")

    sicken(models["target"], fault)
    bad, _ = run_with_a_sick_one(models, "vanilla_sd", 0.0)
    assert type(bad.error) is RuntimeError


SUBMITTED = {
    "empty prompt": ([], {}, InvalidRequest, "empty"),
    "token beyond the vocabulary": ([1, 8], {}, InvalidRequest, "token 8"),
    "negative token": ([1, -1], {}, InvalidRequest, "token -1"),
    "context": ([1] * 500, {"max_tokens": 20}, ContextTooLong, "shorten"),
    "bias beyond the vocabulary": ([1], {"logit_bias": {99: 1.0}}, InvalidRequest, "logit_bias"),
    "ban beyond the vocabulary": (
        [1],
        {"banned_token_ids": frozenset({-3})},
        InvalidRequest,
        "banned_token_ids",
    ),
    "everything banned": (
        [1],
        {"banned_token_ids": frozenset(range(8))},
        InvalidRequest,
        "all 8 tokens",
    ),
}


@pytest.mark.parametrize(("name", "case"), in_turn(STRATEGIES, list(SUBMITTED)))
def test_a_refused_request_takes_no_slot_and_hurts_nobody(name, case):
    prompt, settings, kind, word = SUBMITTED[case]
    models = models_of(build(name))
    engine = Engine(models)
    good = engine.submit(GOOD[0], sampled(0, 1.0), build(name))
    engine.step()
    with pytest.raises(kind) as caught:
        engine.submit(prompt, Sampling(**settings), build(name))
    check_line(caught.value, kind, word)
    engine.run([good])
    assert (
        good.output
        == Engine(models_of(build(name))).generate(GOOD[0], sampled(0, 1.0), build(name)).output
    )
    assert {len(model.slots._free) for model in models.values()} == {8}


def test_vocabularies_that_differ_are_refused_by_name():
    models = table_pair(vocab=8)
    models["draft"] = TableModel.random(vocab_size=5, seed=0)
    engine = Engine(models)
    with raises_code("vocabulary_mismatch", "draft knows 5", "target 8", error=VocabularyMismatch):
        engine.submit([1], Sampling(), build_strategy("vanilla_sd"))
    assert (
        len(engine.generate([1], Sampling(max_tokens=3), build_strategy("autoregressive")).output)
        == 3
    )


def lengths_of(name: str) -> list[tuple[str, int]]:
    """Whole-number parameters that must be at least 1."""
    schema = STRATEGIES[name].Config.model_json_schema().get("properties", {})
    return [
        (field, int(info["minimum"]))
        for field, info in schema.items()
        if info.get("type") == "integer" and info.get("minimum", 0) >= 1
    ]


@pytest.mark.parametrize("name", [n for n, s in STRATEGIES.items() if s.roles != ("target",)])
def test_gamma_zero_is_one_line(name):
    required = next((parameters for known, parameters in VARIANTS if known == name), {})
    for field, minimum in lengths_of(name):
        with raises_code("bad_parameter", field) as caught:
            build_strategy(name, {**required, field: minimum - 1})
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["vanilla_sd", "spide"])
@pytest.mark.parametrize("sick_role", ["target", "draft"])
@pytest.mark.parametrize("adapter", [TransformersModel, over_slots])
def test_a_real_network_that_overflows_hurts_only_its_request(name, sick_role, adapter):
    """NaN keys and values stay in the slot of the request that made them, and do not outlive it."""

    def pair(poisoned: bool) -> Engine:
        modules = {"target": near(llama(2), 0.0), "draft": near(llama(2), 0.06)}
        # the embedding is the head too: the token's own logit is NaN everywhere, and banned
        # everywhere
        if poisoned:
            modules[sick_role].get_input_embeddings().weight.data[SICK] = math.nan
        return Engine({role: adapter(module, slots=3) for role, module in modules.items()})

    def run(engine: Engine, prompts: list[list[int]]) -> list[Job]:
        sampling = Sampling(max_tokens=12, banned_token_ids=frozenset({SICK}))
        jobs = [
            engine.submit(prompt, sampling, build_strategy(name, {}, table_resources(VOCAB)))
            for prompt in prompts
        ]
        while engine.jobs:
            engine.step()
        return jobs

    alone = [run(pair(poisoned=False), [prompt])[0].output for prompt in GOOD]
    engine = pair(poisoned=True)
    first, sick, second = run(engine, [GOOD[0], [SICK, 5], GOOD[1]])
    again = run(engine, [GOOD[2], GOOD[0], GOOD[0]])
    assert type(sick.error) is NotFinite
    assert [first.output, second.output] == alone[:2]
    assert [job.output for job in again] == [alone[2], alone[0], alone[0]], (
        "a slot that held NaN is as good as new"
    )
