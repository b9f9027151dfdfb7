"""One token by compiled layers equals the eager way; what is compiled is kept, and nothing is compiled unasked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from serving.number_format import WEIGHTS, Weights
from serving.runtime.commands import Forward
from serving.runtime.models import compiled_step
from serving.runtime.models.compiled_layer import OneToken
from serving.runtime.models.compiled_step import LIBRARY, CompiledStep, key, load
from serving.runtime.models.lean_layer import layer_weights
from serving.runtime.models.lean_llama import LeanLlama
from serving.runtime.models.transformers_model import TransformersModel
from tests.support.errors import raises_code
from tests.support.models.lean_families import CONFIGS, lean_family
from tests.support.models.llama_shapes import llama, random_tokens


class Uncompiled:
    """What a library computes, by torch; counts its calls."""

    def __init__(self, module: OneToken):
        self.module, self.calls = module, 0

    def run(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        self.calls += 1
        return [self.module((inputs[0], inputs[1], inputs[2]), (inputs[3], inputs[4]), (inputs[5], inputs[6], inputs[7]), inputs[8:])]


def with_step(model: LeanLlama) -> dict[int | None, Uncompiled]:
    """Give a model the step of compiled layers, less the compiler."""
    weights = [layer_weights(*pair) for pair in zip(model.layers, model.module.model.layers, strict=True)]
    windows = model.shape.windows
    runners = {window: Uncompiled(OneToken(model.layers[windows.index(window)], list(weights[windows.index(window)]), window))
               for window in set(windows)}
    model.step = CompiledStep(weights, windows, runners, model.slots)
    return runners


@pytest.mark.parametrize("name", CONFIGS)
def test_single_tokens_between_drafts_and_rollbacks_equal_the_plain_module(name: str) -> None:
    module = lean_family(name)
    text = random_tokens(14, 3)
    with torch.no_grad():
        expected = module(torch.tensor([text])).logits[0]
    model = LeanLlama(module, slots=3)
    runners = with_step(model)
    other, slot = model.open(), model.open()
    model.forward([Forward("target", other, random_tokens(20, 9))])
    model.forward([Forward("target", slot, text[:4]), Forward("target", other, (1,))])
    model.forward([Forward("target", slot, (9, 9, 9))])
    model.rollback(slot, 4)
    logits = [model.forward([Forward("target", slot, (token,))])[0].logits for token in text[4:12]]
    logits.append(model.forward([Forward("target", slot, text[12:], 2)])[0].logits)
    torch.testing.assert_close(torch.cat(logits), expected[4:], atol=1e-4, rtol=0)
    assert sum(runner.calls for runner in runners.values()) == 8 * module.config.num_hidden_layers


@pytest.mark.parametrize("weights", WEIGHTS)
def test_single_tokens_read_rounded_weights_as_the_eager_way_does(weights: Weights) -> None:
    model = LeanLlama(llama(hidden_size=64, intermediate_size=128, attention_bias=True), weights=weights, slots=2)
    text = random_tokens(9, 4)
    slot, other = model.open(), model.open()
    expected = [model.forward([Forward("target", slot, (token,))])[0].logits for token in text]
    (runner,) = with_step(model).values()
    logits = [model.forward([Forward("target", other, (token,))])[0].logits for token in text]
    torch.testing.assert_close(torch.cat(logits), torch.cat(expected), atol=1e-5, rtol=0)
    assert runner.calls == 2 * len(text)


def test_a_token_in_a_branch_goes_the_eager_way() -> None:
    """Branches are no part of the slots' tensors."""
    module = lean_family("llama")
    model, plain = LeanLlama(module, slots=1), TransformersModel(module, slots=1)
    (runner,) = with_step(model).values()
    outputs = []
    for each in (model, plain):
        slot = each.open()
        each.forward([Forward("target", slot, random_tokens(5))])
        branch = each.open_branch()
        each.fork(slot, branch, 4)
        outputs.append(each.forward([Forward("target", branch, (7,))])[0].logits)
    torch.testing.assert_close(*outputs, atol=1e-5, rtol=0)
    assert runner.calls == 0


def test_nothing_is_compiled_unasked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTWELL_HOME", str(tmp_path))
    monkeypatch.setattr(compiled_step, "build", lambda *_: pytest.fail("compiled"))
    assert LeanLlama(llama(torch.bfloat16), compiled="auto").step is None
    assert LeanLlama(llama(torch.bfloat16), compiled="off").step is None
    assert LeanLlama(llama(), compiled="on").step is None  # float32 is what transformers is compared with


def test_no_compiler_is_said_in_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTWELL_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with raises_code("no_compiler", "g++", "compile=off"):
        LeanLlama(llama(torch.bfloat16), compiled="on")


def test_a_library_that_cannot_be_loaded_is_left_out_unless_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                                            caplog: pytest.LogCaptureFixture) -> None:
    """A home may be shared with a machine of another C library: the default must serve there all the same."""
    monkeypatch.setenv("DRAFTWELL_HOME", str(tmp_path))
    broken = tmp_path / LIBRARY
    broken.write_text("no library")
    monkeypatch.setattr(compiled_step, "library", lambda *_: broken)
    assert LeanLlama(llama(torch.bfloat16), compiled="auto").step is None
    assert "cannot be loaded" in caplog.text
    with raises_code("broken_compiled_layer"):
        LeanLlama(llama(torch.bfloat16), compiled="on")


def test_a_broken_library_is_named(tmp_path: Path) -> None:
    file = tmp_path / LIBRARY
    file.write_text("no library")
    with raises_code("broken_compiled_layer", str(file), "delete"):
        load(file)


def test_a_library_is_shared_by_models_of_one_shape_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def of(model: LeanLlama) -> str:
        weights = layer_weights(model.layers[0], model.module.model.layers[0])
        return key(OneToken(model.layers[0], list(weights), model.shape.windows[0]), weights)

    def one(**changes: Any) -> LeanLlama:
        return LeanLlama(llama(torch.bfloat16, **changes))

    same = of(one())
    assert of(one(num_hidden_layers=1)) == of(LeanLlama(llama(torch.bfloat16), slots=7, max_context=9)) == same
    others = [of(one(**changes)) for changes in ({"intermediate_size": 64}, {"rms_norm_eps": 1e-3}, {"attention_bias": True})]
    model = one()
    monkeypatch.setattr(torch, "__version__", "9.9")
    assert len({same, of(model), *others}) == 5


def test_a_library_for_rounded_weights_is_another_one() -> None:
    keys = set()
    for weights in (None, *WEIGHTS):
        model = LeanLlama(llama(torch.bfloat16, hidden_size=64, intermediate_size=128), weights=weights)
        found = layer_weights(model.layers[0], model.module.model.layers[0])
        keys.add(key(OneToken(model.layers[0], list(found), None), found))
    assert len(keys) == 3


@pytest.mark.slow
@pytest.mark.skipif(compiled_step.compiler() is None, reason="no C++ compiler")
def test_a_compiled_model_says_what_the_eager_one_says_and_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One slot, the smallest of sizes that vary, and a start without a compiler from what is kept."""
    monkeypatch.setenv("DRAFTWELL_HOME", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    module, text = lean_family("qwen3", torch.bfloat16), random_tokens(12, 5)
    eager = LeanLlama(module)
    models = [LeanLlama(module, compiled="on")]
    assert len(list(tmp_path.glob(f"compiled/*/{LIBRARY}"))) == 1
    monkeypatch.setenv("CXX", "no-such-compiler")
    models.append(LeanLlama(module, slots=3, compiled="auto"))
    for model in models:
        assert model.step is not None
        mine, theirs = model.open(), eager.open()
        for token in text:
            logits = [one.forward([Forward("target", slot, (token,))])[0].logits for one, slot in ((model, mine), (eager, theirs))]
            torch.testing.assert_close(*logits, atol=0.15, rtol=0.05)
        eager.close(theirs)
