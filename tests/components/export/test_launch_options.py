"""A way to speculate as each engine's own options."""

from __future__ import annotations

from typing import Any

import pytest

from draftwell.components.engines.launch_template import option_words
from draftwell.components.engines.port import LAUNCHED
from draftwell.components.export.export import problems
from draftwell.components.export.launch_options import launch_options
from tests.support.errors import raises_code

WAYS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3},
    "draft_model": {"method": "draft_model", "num_speculative_tokens": 2, "model": "draft.gguf"},
    "eagle3": {"method": "eagle3", "num_speculative_tokens": 3, "model": "/models/head"},
}


@pytest.mark.parametrize(
    ("engine", "method"),
    [(engine, name) for engine in ("sglang", "llama.cpp") for name in LAUNCHED[engine]],
)
def test_options_are_those_of_the_engines_documentation(engine: str, method: str) -> None:
    assert problems(engine, launch_options(engine, WAYS[method])) == []


def test_lengths_and_models_arrive() -> None:
    eagle = launch_options("sglang", WAYS["eagle3"])
    assert (eagle["speculative-num-steps"], eagle["speculative-num-draft-tokens"]) == (3, 4)
    assert eagle["speculative-draft-model-path"] == "/models/head"
    draft = option_words(launch_options("llama.cpp", WAYS["draft_model"]))
    assert draft[draft.index("--spec-draft-n-max") + 1] == "2"
    assert draft[draft.index("--spec-draft-model") + 1] == "draft.gguf"
    assert launch_options("vllm", WAYS["ngram"]) == {"speculative-config": WAYS["ngram"]}


@pytest.mark.parametrize("engine", LAUNCHED)
def test_plain_decoding_needs_no_options(engine: str) -> None:
    assert launch_options(engine, None) == {}


@pytest.mark.parametrize(
    ("engine", "way", "named"),
    [
        ("llama.cpp", WAYS["eagle3"], "eagle3"),
        ("llama.cpp", {**WAYS["draft_model"], "model": "folder"}, "GGUF"),
        (
            "sglang",
            {**WAYS["eagle3"], "num_speculative_tokens_per_batch_size": [[1, 8, 3]]},
            "--set levels=",
        ),
    ],
)
def test_what_an_engine_cannot_do_is_refused(engine: str, way: dict[str, Any], named: str) -> None:
    with raises_code("engine_option", named):
        launch_options(engine, way)
