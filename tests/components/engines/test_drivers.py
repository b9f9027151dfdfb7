"""What the drivers of OpenVINO, ONNX Runtime and xllamacpp ask of their libraries, and what they
read; no library is there."""

from __future__ import annotations

import sys
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest

from draftwell.components.engines.environments import DRIVERS

REQUEST: dict[str, Any] = {
    "prompts": [[1, 2], [3]],
    "max_tokens": 8,
    "stop_token_ids": [0, 2],
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 0.9,
    "seed": 5,
    "logprobs": None,
}
GREEDY = {**REQUEST, "temperature": 0.0}


def driver(name: str, patch: pytest.MonkeyPatch) -> Any:
    """A driver's module, imported as it runs."""
    patch.syspath_prepend(str(DRIVERS[name].parent))
    for module in ("peer_protocol", DRIVERS[name].stem):
        patch.delitem(sys.modules, module, raising=False)
    return import_module(DRIVERS[name].stem)


def test_openvino_draws_only_where_it_is_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    options_of = driver("openvino", monkeypatch).options_of
    assert options_of(GREEDY, 0, {}) == {"max_new_tokens": 8, "stop_token_ids": {0, 2}}
    found = options_of(REQUEST, 1, {"tokens": 5, "ngram": 3})
    assert found["do_sample"]
    assert found["rng_seed"] == 6, "each prompt of a group has a seed of its own"
    assert "top_k" not in found, "0 is no limit, which it knows by no number"
    assert (found["num_assistant_tokens"], found["max_ngram_size"]) == (5, 3)


def test_openvino_rounds_keys_and_values_only_beside_rounded_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    properties_of = driver("openvino", monkeypatch).properties_of
    settings = {"dtype": "bfloat16", "threads": 2}
    whole = properties_of({**settings, "weights": None})
    assert whole["INFERENCE_PRECISION_HINT"] == whole["KV_CACHE_PRECISION"] == "bf16"
    assert "KV_CACHE_PRECISION" not in properties_of({**settings, "weights": "int8"})


def test_onnx_runtime_gets_room_for_prompt_and_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    options_of = driver("onnxruntime", monkeypatch).options_of
    assert options_of(2, GREEDY) == {"max_length": 10, "do_sample": False}
    assert options_of(2, REQUEST)["random_seed"] == 5


@pytest.mark.parametrize(
    ("speculation", "kind"),
    [
        (None, None),
        ({"tokens": 5, "ngram": 3}, "NGRAM_SIMPLE"),
        ({"tokens": 4, "draft": "d.gguf", "eagle3": False}, "DRAFT_SIMPLE"),
        ({"tokens": 4, "draft": "h.gguf", "eagle3": True}, "DRAFT_EAGLE3"),
    ],
)
def test_llama_cpps_server_has_room_for_all_requests_and_one_way_to_speculate(
    speculation: dict[str, Any] | None, kind: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Fields(SimpleNamespace):
        """Has every field that is asked for."""

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            setattr(self, name, Fields())
            return getattr(self, name)

    names = ("NGRAM_SIMPLE", "DRAFT_SIMPLE", "DRAFT_EAGLE3")
    kinds = SimpleNamespace(**{f"COMMON_SPECULATIVE_TYPE_{name}": name for name in names})
    library = SimpleNamespace(CommonParams=Fields, common_speculative_type=kinds)
    settings = {"model": "m", "slots": 8, "context": 100, "threads": 2, "speculation": speculation}
    found = driver("xllamacpp", monkeypatch).params_of(library, settings)
    assert (found.n_parallel, found.n_ctx, found.cpuparams_batch.n_threads) == (8, 800, 2)
    assert found.speculative.__dict__.get("types") == (kind and [kind])
    if speculation and "draft" in speculation:
        assert found.speculative.draft.mparams.path == speculation["draft"]
        assert found.speculative.draft.cpuparams.n_threads == 2


def test_llama_cpps_stream_gives_all_tokens_and_the_one_that_ends_the_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = driver("xllamacpp", monkeypatch)
    tokens = module.Tokens()
    lines = [
        b'data: {"tokens": [7, 8], "stop": false}\n',
        b"\n",
        b'data: {"tokens": [9], "stop": false}\n',
        b'data: {"tokens": [], "stop": true, "stop_type": "eos"}\n',
        b"data: [DONE]\n",
    ]
    module.read(lines, GREEDY, tokens)
    assert tokens.ids == [7, 8, 9, 0]
    assert module.body_of(REQUEST, 1)["seed"] == 6
    assert module.body_of(REQUEST, 1)["prompt"] == [3]
