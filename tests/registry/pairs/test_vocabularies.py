"""Every pair of the catalogue by the published facts of its tokenizers: what the rule of pairs
makes of them, and that it knows families apart.

Names of ordinary tokens are made up, the same within a family: what is checked is the numbers of
rows and tokens and the special tokens that are given, not which family a model belongs to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest

from draftwell.registry.pairs import find_pair, list_pairs
from draftwell.serving.runtime.vocabulary import Names, check_alike, not_shared
from tests.support.errors import raises_code


@dataclass(frozen=True)
class Facts:
    """A published model.

    Args:
        rows: of its embeddings, `vocab_size` in its config.json.
        family: of its tokenizer; names of ordinary tokens are the same within one.
        tokens: what `len(tokenizer)` is.
        source: where the numbers are from; "": config.json and tokenizer_config.json on the hub.
        special: tokens that other models of the family may call otherwise.
    """

    rows: int
    family: str
    tokens: int
    source: str = ""
    special: Mapping[int, str] = field(default_factory=dict)

    @property
    def names(self) -> Names:
        return {i: f"{self.family} {i}" for i in range(self.tokens)} | dict(self.special)


def llama3() -> dict[int, str]:
    """Llama 3's 256 special tokens (meta-llama/llama3#133)."""
    named = {0: "begin_of_text", 1: "end_of_text", 6: "start_header_id", 7: "end_header_id"}
    named[9] = "eot_id"
    reserved = (i for i in range(256) if i not in named)
    return {128000 + i: name for i, name in named.items()} | {
        128000 + i: f"reserved_special_token_{number}" for number, i in enumerate(reserved)
    }


def llama31() -> dict[int, str]:
    """Those of Llama 3.1 and 3.2: three are in use, and the numbers after them move up
    (belladoreai/llama3-tokenizer-js#8 and #10)."""
    named = {0: "begin_of_text", 1: "end_of_text", 4: "finetune_right_pad_id"}
    named |= {6: "start_header_id", 7: "end_header_id", 8: "eom_id", 9: "eot_id", 10: "python_tag"}
    reserved = (i for i in range(256) if i not in named)
    return {128000 + i: name for i, name in named.items()} | {
        128000 + i: f"reserved_special_token_{number}" for number, i in enumerate(reserved)
    }


LLAMA1 = Facts(32000, "llama", 32000)
QWEN25 = Facts(152064, "qwen", 151665, "QwenLM/Qwen3#466, vllm-project/vllm#13849")
QWEN3 = Facts(151936, "qwen", 151669)
DEEPSEEK = Facts(32256, "deepseek-coder", 32022)
GPT2 = Facts(50257, "gpt2", 50257, "dottxt-ai/outlines#236")
SMOLLM2 = Facts(49152, "smollm2", 49152)
LLAMA32 = Facts(128256, "llama3", 128256, special=llama31())
PYTHIA = "EleutherAI/pythia#68"
PUBLISHED = {
    "deepseek-ai/deepseek-coder-33b-instruct": DEEPSEEK,
    "deepseek-ai/deepseek-coder-1.3b-instruct": DEEPSEEK,
    "EleutherAI/gpt-neo-1.3B": GPT2,
    "EleutherAI/gpt-neo-125m": GPT2,
    "openai-community/gpt2-xl": GPT2,
    "openai-community/gpt2": GPT2,
    "meta-llama/Llama-2-7b-hf": LLAMA1,
    "JackFram/llama-68m": LLAMA1,
    "meta-llama/Meta-Llama-3-70B-Instruct": Facts(128256, "llama3", 128256, special=llama3()),
    "meta-llama/Llama-3.1-8B-Instruct": LLAMA32,
    "meta-llama/Llama-3.2-3B-Instruct": LLAMA32,
    "meta-llama/Llama-3.2-1B-Instruct": LLAMA32,
    "EleutherAI/pythia-12b": Facts(50688, "pythia", 50277, PYTHIA),
    "EleutherAI/pythia-160m": Facts(50304, "pythia", 50277, PYTHIA),
    "Qwen/Qwen2.5-72B-Instruct": QWEN25,
    "Qwen/Qwen2.5-7B-Instruct": QWEN25,
    "Qwen/Qwen3-32B": QWEN3,
    "Qwen/Qwen3-1.7B": QWEN3,
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": SMOLLM2,
    "HuggingFaceTB/SmolLM2-360M-Instruct": SMOLLM2,
    "HuggingFaceTB/SmolLM2-135M-Instruct": SMOLLM2,
    # four tokens to fill in the middle, which the weights have no rows for
    "codellama/CodeLlama-34b-Instruct-hf": Facts(
        32000, "llama", 32004, "huggingface/transformers#26714"
    ),
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": LLAMA1,
    "lmsys/vicuna-33b-v1.3": LLAMA1,
    "lmsys/vicuna-13b-v1.3": Facts(32000, "llama", 32000, "lm-sys/FastChat#2076"),
    "lmsys/vicuna-7b-v1.3": LLAMA1,
    "double7/vicuna-160m": LLAMA1,
    "double7/vicuna-68m": LLAMA1,
}
FROM_HUB = [spec for spec in list_pairs() if spec.target.hub]
DIFFERING = {"llama3-1b-70b": 249, "pythia-160m-12b": 384}
"""Pairs whose draft does not share all ids, and how many it lacks; all others share all."""


def differing(target: Facts, small: Facts) -> list[int]:
    """What the rule says of two models that it accepts."""
    check_alike("draft d", small.names, "target t", target.names)
    return not_shared(target.names, target.rows, small.names, small.rows)


@pytest.mark.parametrize("spec", FROM_HUB, ids=lambda spec: spec.name)
def test_a_pair_of_the_catalogue_shares_what_its_models_publish(spec) -> None:
    sources = spec.sources()
    target = PUBLISHED[sources.pop("target").hub or ""]
    for source in sources.values():
        found = differing(target, PUBLISHED[source.hub or ""])
        assert len(found) == DIFFERING.get(spec.name, 0)


def test_the_facts_are_those_of_the_catalogue() -> None:
    named = {source.hub for spec in FROM_HUB for source in spec.sources().values()}
    assert named == PUBLISHED.keys()


def test_llama_3_and_3_2_share_what_conversations_are_made_of() -> None:
    spec = find_pair("llama3-1b-70b")
    target, draft = (PUBLISHED[one.hub or ""] for one in spec.sources().values())
    found = differing(target, draft)
    assert found == [128004, 128005, 128008, *range(128010, 128256)]
    assert target.names[128255] == "reserved_special_token_250"
    assert draft.names[128255] == "reserved_special_token_247"
    assert "249" in (spec.notes or "")
    pythia = find_pair("pythia-160m-12b")
    assert "384" in (pythia.notes or "")


class Further(NamedTuple):
    """Two models that people pair, and how many ids the draft does not share."""

    target: Facts
    draft: Facts
    count: int


FURTHER = {
    "Qwen2.5 72B with 0.5B (vllm-project/vllm#13849)": Further(
        QWEN25, Facts(151936, "qwen", 151665), 128
    ),
    "Qwen2.5 0.5B with 7B": Further(Facts(151936, "qwen", 151665), QWEN25, 0),
    "Qwen3 32B with Qwen2.5 0.5B": Further(QWEN3, Facts(151936, "qwen", 151665), 4),
    "CodeLlama 7B with TinyLlama": Further(Facts(32016, "llama", 32016), LLAMA1, 16),
    "Vicuna with a padding token of its own": Further(LLAMA1, Facts(32001, "llama", 32001), 0),
    "Phi-2 with GPT-2 (CodeGen's spaces)": Further(Facts(51200, "gpt2", 50295), GPT2, 943),
}


@pytest.mark.parametrize("name", FURTHER)
def test_further_pairs_that_people_use(name: str) -> None:
    further = FURTHER[name]
    assert len(differing(further.target, further.draft)) == further.count


@pytest.mark.parametrize("other", [QWEN3, PUBLISHED["EleutherAI/pythia-12b"], LLAMA1, GPT2])
def test_other_families_are_refused(other: Facts) -> None:
    with raises_code("vocabulary_mismatch", "draft d", "target t", "`draftwell step distil`"):
        differing(LLAMA32, other)
