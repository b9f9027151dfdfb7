"""Exports to other engines: documented keys only, a note for everything left out, and transformers
decodes with its export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from draftwell.components.distil.eagle3.network import Eagle3Network, head_config
from draftwell.components.export.checkpoint import save_head
from draftwell.components.export.export import ENGINES, export_config, problems, schema
from draftwell.components.export.speculation import Weights
from draftwell.serving.artifacts.base import Provenance
from draftwell.serving.artifacts.eagle3_head import Eagle3Head
from draftwell.serving.artifacts.pair_files import weights_digest
from draftwell.serving.runtime.strategies import STRATEGIES
from tests.support.errors import raises_code
from tests.support.models.tiny import llama, near

WEIGHTS = Weights("org/target", "org/draft", "abc", head="folder/head")
HEADS = {"vllm", "sglang"}
SETTINGS: dict[str, dict[str, Any]] = {
    "adaedl": {"threshold": 0.5, "max_draft": 6},
    "pearl": {"num_speculative_tokens": 4},
    "duo_decoding": {"num_speculative_tokens": 4},
}
THREE_MODELS = {"pyramid_assisted", "pyramid_fuzzy"}
REFUSED = THREE_MODELS | {"swift", "medusa", "rest"}
LOSSY = {name for name, cls in STRATEGIES.items() if not cls.lossless}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("strategy", sorted(set(STRATEGIES) - REFUSED))
def test_every_document_keeps_to_what_the_engine_documents(engine: str, strategy: str) -> None:
    if strategy == "eagle3" and engine not in HEADS:
        with raises_code("not_exportable"):
            export_config(engine, strategy, {}, WEIGHTS)
        return
    document = export_config(engine, strategy, SETTINGS.get(strategy, {}), WEIGHTS, draft_tokens=3)
    assert problems(engine, document["settings"]) == []
    assert document["engine_version"] == schema(engine)["version"]
    if strategy != "autoregressive":
        assert document["settings"]
        for value in document["settings"].values():
            assert str(value) in document["usage"]
    assert any("lossy" in note for note in document["notes"]) == (strategy in LOSSY)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "wrong",
    [{"max_draft": 3}, {"num_speculative_tokens": 0, "method": "draft_model", "model": "x"}],
)
def test_the_schemas_refuse_what_is_not_documented(engine: str, wrong: dict[str, Any]) -> None:
    assert problems(engine, wrong)


@pytest.mark.parametrize(
    ("engine", "expected"),
    [
        (
            "vllm",
            {
                "method": "draft_model",
                "model": "org/draft",
                "revision": "abc",
                "num_speculative_tokens": 4,
            },
        ),
        (
            "sglang",
            {
                "speculative-algorithm": "STANDALONE",
                "speculative-draft-model-path": "org/draft",
                "speculative-num-steps": 4,
                "speculative-eagle-topk": 1,
                "speculative-num-draft-tokens": 5,
                "speculative-draft-model-revision": "abc",
            },
        ),
        (
            "llama.cpp",
            {
                "spec-type": "draft-simple",
                "spec-draft-model": "draft.gguf",
                "spec-draft-n-max": 4,
                "spec-draft-n-min": 0,
                "spec-draft-p-min": 0.0,
            },
        ),
        (
            "transformers",
            {
                "num_assistant_tokens": 4,
                "num_assistant_tokens_schedule": "constant",
                "assistant_confidence_threshold": 0.0,
            },
        ),
    ],
)
def test_vanilla_in_every_engines_settings(engine: str, expected: dict[str, Any]) -> None:
    assert (
        export_config(engine, "vanilla_sd", {"num_speculative_tokens": 4}, WEIGHTS)["settings"]
        == expected
    )


@pytest.mark.parametrize(
    ("engine", "usage"),
    [
        ("vllm", "vllm serve org/target --revision v1"),
        ("sglang", "--model-path org/target --revision v1"),
        (
            "transformers",
            "model = AutoModelForCausalLM.from_pretrained('org/target', revision='v1')",
        ),
    ],
)
@pytest.mark.parametrize("strategy", ["autoregressive", "vanilla_sd", "prompt_lookup"])
def test_the_targets_revision_is_named_whatever_drafts(
    engine: str, strategy: str, usage: str
) -> None:
    pinned = Weights("org/target", "org/draft", target_revision="v1")
    assert usage in export_config(engine, strategy, {}, pinned)["usage"]
    assert (
        "revision"
        not in export_config(engine, strategy, {}, Weights("org/target", "org/draft"))["usage"]
    )


@pytest.mark.parametrize("strategy", ["autoregressive", "vanilla_sd", "prompt_lookup"])
def test_llama_cpp_is_told_in_a_note_which_target_to_convert(strategy: str) -> None:
    notes = export_config(
        "llama.cpp", strategy, {}, Weights("org/target", "org/draft", target_revision="v1")
    )["notes"]
    assert sum("target was tuned at revision v1" in note for note in notes) == 1


def test_draft_lengths_by_requests_at_once_in_the_form_of_engines_that_have_them() -> None:
    table = {1: 5, 2: 3, 4: 3, 8: 0}
    found = {
        engine: export_config(
            engine,
            "eagle3",
            {"num_speculative_tokens": 4},
            WEIGHTS,
            draft_length_by_batch=table,
        )
        for engine in HEADS
    }
    assert found["vllm"]["settings"]["num_speculative_tokens_per_batch_size"] == [
        [1, 1, 4],
        [2, 4, 3],
        [5, 8, 0],
    ]
    (note,) = [note for note in found["sglang"]["notes"] if "adaptive.json" in note]
    assert '"1": {"candidate_steps": [4]}, "2": {"candidate_steps": [3]}' in note
    assert '"5": {"candidate_steps": [0]}' in note, "a key is the lowest load of its lengths"
    suffix = export_config("vllm", "suffix", {}, WEIGHTS, draft_length_by_batch=table)
    assert "num_speculative_tokens_per_batch_size" not in suffix["settings"], "it has one length"


@pytest.mark.parametrize(
    ("strategy", "parameters", "draft_tokens"),
    [
        ("eagle3", {"num_speculative_tokens": 3, "top_k": 2, "tree_tokens": 7}, None),
        ("svip", {}, 5),
    ],
    ids=["a tree", "a rule that is left out"],
)
def test_lengths_of_something_else_than_a_chain_are_left_out(
    strategy: str, parameters: dict[str, int], draft_tokens: int | None
) -> None:
    found = export_config(
        "vllm",
        strategy,
        parameters,
        WEIGHTS,
        draft_tokens=draft_tokens,
        draft_length_by_batch={1: 7, 2: 4, 8: 0},
    )
    assert "num_speculative_tokens_per_batch_size" not in found["settings"]


def test_a_head_in_the_settings_of_engines_that_load_one() -> None:
    vllm = export_config("vllm", "eagle3", {"num_speculative_tokens": 3}, WEIGHTS)
    assert vllm["settings"] == {
        "method": "eagle3",
        "model": "folder/head",
        "num_speculative_tokens": 3,
    }
    sglang = export_config("sglang", "eagle3", {"num_speculative_tokens": 3, "top_k": 2}, WEIGHTS)
    assert sglang["settings"] == {
        "speculative-algorithm": "EAGLE3",
        "speculative-draft-model-path": "folder/head",
        "speculative-num-steps": 3,
        "speculative-eagle-topk": 1,
        "speculative-num-draft-tokens": 4,
    }
    assert any("chain" in note for note in sglang["notes"])
    with raises_code("no_head_to_export"):
        export_config("vllm", "eagle3", {}, Weights("org/target", "org/draft"))


@pytest.mark.parametrize(
    ("engine", "model"), [("vllm", "model"), ("sglang", "speculative-draft-model-path")]
)
def test_hybrid_drafts_from_a_head_where_the_engine_loads_one(engine: str, model: str) -> None:
    """The head brings most of its speed: n-grams alone can be slower than plain decoding."""
    alone = Weights("org/target", "org/draft")
    assert (
        export_config(engine, "hybrid", {}, WEIGHTS)["settings"]
        == export_config(engine, "eagle3", {}, WEIGHTS)["settings"]
    )
    assert export_config(engine, "hybrid", {"max_draft": 2}, WEIGHTS) != export_config(
        engine, "hybrid", {}, WEIGHTS
    )
    assert (
        export_config(engine, "hybrid", {}, WEIGHTS, draft_tokens=5)["usage"]
        == export_config(engine, "eagle3", {"num_speculative_tokens": 5}, WEIGHTS)["usage"]
    )
    for parameters, weights in (
        ({}, alone),
        ({"drafter": "none"}, WEIGHTS),
        ({"drafter": "draft"}, WEIGHTS),
    ):
        assert model not in export_config(engine, "hybrid", parameters, weights)["settings"]
    assert any("save_head=" in note for note in export_config(engine, "hybrid", {}, alone)["notes"])
    assert (
        export_config("llama.cpp", "hybrid", {}, WEIGHTS)["settings"]["spec-type"] == "ngram-simple"
    ), "it loads no heads"


def test_a_head_as_a_folder_that_other_engines_load(tmp_path: Path) -> None:
    """What they find in the folder: their configuration, and the weights with the rows that the
    head borrows."""
    module = llama()
    module.save_pretrained(tmp_path / "target")
    network = Eagle3Network(head_config(module.config, 4, (0, 1, 1)))
    ids = torch.tensor([1, 5, 7, 9])
    donor = weights_digest(tmp_path / "target")
    head = Eagle3Head(
        dict(network.state_dict()),
        network.config,
        ids,
        (0, 1, 1),
        donor,
        Provenance(pair="p", fingerprint="0" * 64),
    )
    save_head(tmp_path / "target", head, tmp_path / "head")
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    tensors = load_file(tmp_path / "head" / "model.safetensors")
    assert sorted(path.name for path in (tmp_path / "head").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert (
        tensors["lm_head.weight"]
        .float()
        .equal(module.get_output_embeddings().weight[ids].bfloat16().float())
    )
    assert (tensors["d2t"] + torch.arange(4)).tolist() == ids.tolist()
    assert tensors["t2d"].nonzero().flatten().tolist() == ids.tolist()
    with raises_code("folder_exists"):
        save_head(tmp_path / "target", head, tmp_path / "head")
    other = Eagle3Head(head.state, head.config, ids, head.layers, "e" * 64, head.provenance)
    with raises_code("another_donor"):
        save_head(tmp_path / "target", other, tmp_path / "another")


def test_prompt_lookup_needs_no_draft() -> None:
    tuned = {"prompt_lookup_num_tokens": 7, "max_matching_ngram_size": 2}
    alone = Weights("org/target")
    assert export_config("vllm", "prompt_lookup", tuned, alone)["settings"] == {
        "method": "ngram",
        "num_speculative_tokens": 7,
        "prompt_lookup_max": 2,
        "prompt_lookup_min": 1,
    }
    assert export_config("transformers", "prompt_lookup", tuned, alone)["settings"] == tuned
    assert (
        export_config("llama.cpp", "prompt_lookup", tuned, alone)["settings"][
            "spec-ngram-simple-size-n"
        ]
        == 2
    )
    assert (
        export_config("sglang", "prompt_lookup", tuned, alone)["settings"][
            "speculative-num-draft-tokens"
        ]
        == 8
    )


def test_lookahead_looks_up_what_follows_a_single_token() -> None:
    settings = export_config("vllm", "lookahead", {"ngram": 4}, Weights("org/target"))["settings"]
    assert (settings["num_speculative_tokens"], settings["prompt_lookup_max"]) == (3, 1)


def test_suffix_decoding_is_vllms_own_and_prompt_lookup_elsewhere() -> None:
    tuned, alone = {"alpha": 2.0, "max_draft": 6, "min_probability": 0.2}, Weights("org/target")
    assert export_config("vllm", "suffix", tuned, alone)["settings"] == {
        "method": "suffix",
        "num_speculative_tokens": 6,
        "suffix_decoding_max_spec_factor": 2.0,
        "suffix_decoding_min_token_prob": 0.2,
    }
    found = export_config("transformers", "suffix", tuned, alone)
    assert found["settings"] == {"prompt_lookup_num_tokens": 6, "max_matching_ngram_size": 3}
    assert any("suffix decoding" in note for note in found["notes"])
    with raises_code("not_exportable", "draftwell deploy"):
        export_config("vllm", "rest", {}, alone)


@pytest.mark.parametrize("engine", ["llama.cpp", "transformers"])
def test_engines_with_a_threshold_get_it(engine: str) -> None:
    settings = export_config(engine, "hf_dynamic", {"threshold": 0.6, "max_draft": 9}, WEIGHTS)[
        "settings"
    ]
    assert sorted(v for v in settings.values() if isinstance(v, int | float) and v > 0) == [0.6, 9]


@pytest.mark.parametrize(
    ("engine", "strategy", "code", "fix"),
    [
        *(
            (engine, strategy, "no_constant_length", "--set draft_tokens=")
            for engine, strategy in (
                ("vllm", "hf_dynamic"),
                ("sglang", "draft_verify"),
                ("transformers", "svip"),
                ("llama.cpp", "sprinter"),
            )
        ),
        ("vllm", "pyramid_fuzzy", "not_exportable", "draftwell deploy"),
        ("tgi", "vanilla_sd", "unknown_engine", "vllm"),
    ],
)
def test_what_cannot_be_said_is_refused_with_the_mend(
    engine: str, strategy: str, code: str, fix: str
) -> None:
    with raises_code(code, fix):
        export_config(engine, strategy, {}, WEIGHTS)


@pytest.mark.parametrize("strategy", ["vanilla_sd", "fuzzy_sd"])
def test_no_engine_gets_the_draft_model_in_the_qualifiers_place(strategy: str) -> None:
    with raises_code("not_exportable", "draftwell deploy"):
        export_config("vllm", strategy, {"drafter": "qualifier"}, WEIGHTS)
    notes = export_config("vllm", "vanilla_sd", {"draft_first": True}, WEIGHTS)["notes"]
    assert any("before anything is drafted" in note for note in notes)


def test_a_draft_that_no_engine_reads_is_refused_and_a_wrong_setting_named() -> None:
    with raises_code("no_draft_to_export", "--set draft_model=", "--set save_draft="):
        export_config("vllm", "vanilla_sd", {}, Weights("org/target"))
    with raises_code("unknown_parameter", "'gamma'"):
        export_config("vllm", "vanilla_sd", {"gamma": 4}, WEIGHTS)


class Counting:
    """Counts the tokens of a module's forwards."""

    def __init__(self, module: Any):
        self.lengths: list[int] = []
        self.handle = module.register_forward_pre_hook(
            lambda _, args, kwargs: self.lengths.append(kwargs["input_ids"].shape[1]),
            with_kwargs=True,
        )


@pytest.mark.parametrize(
    ("strategy", "tuned"),
    [
        ("vanilla_sd", {"num_speculative_tokens": 3}),
        ("hf_dynamic", {"threshold": 0.3, "max_draft": 6}),
        ("prompt_lookup", {"prompt_lookup_num_tokens": 4, "max_matching_ngram_size": 2}),
        ("csd", {"num_speculative_tokens": 2}),
    ],
)
def test_transformers_runs_what_is_exported(strategy: str, tuned: dict[str, Any]) -> None:
    """Plain greedy tokens; and with a constant length every full verification has that length,
    whatever the draft's confidence."""
    from transformers import GenerationConfig

    # not the one that other tests share: they give it attention of their own
    target = llama.__wrapped__(2)
    draft = near(target, 0.06)
    settings = export_config("transformers", strategy, tuned, WEIGHTS)["settings"]
    config = GenerationConfig(**settings)
    config.validate(strict=True)
    assert {name: getattr(config, name) for name in settings} == settings
    prompt = torch.tensor([[5, 7, 9, 5, 7, 9, 5]])
    asked = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    plain = target.generate(prompt, **asked)
    counting = Counting(target)
    try:
        if "prompt_lookup_num_tokens" in settings:
            out = target.generate(prompt, **asked, **settings)
        else:
            draft.generation_config.update(**settings)
            out = target.generate(prompt, **asked, assistant_model=draft)
    finally:
        counting.handle.remove()
    assert torch.equal(out, plain)
    assert max(counting.lengths[1:]) > 1  # it did speculate
    if "num_speculative_tokens" in tuned:  # the first forward pass reads the prompt too
        assert set(counting.lengths[1:-3]) == {tuned["num_speculative_tokens"] + 1}
