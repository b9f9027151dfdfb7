"""Model folders as publishers make them, in small: a Llama of two layers with a tokenizer of single
bytes, and what is done to its files."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.support.models.asking import answered

PROMPT = [70, 71, 72, 73, 40, 41, 42, 43, 44, 100]
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
SPECIAL = ["<s>", "</s>", "<pad>"]
VOCAB = len(SPECIAL) + len(BYTES)
WEIGHTS = "model.safetensors"
Tensors = dict[str, torch.Tensor]
Change = Callable[[Path], object]
"""What is done to a folder."""


def both(*changes: Change) -> Change:
    """One change after another."""
    return lambda folder: [change(folder) for change in changes]


def byte_tokenizer() -> Any:
    """A token for each byte, behind three special ones."""
    from transformers import PreTrainedTokenizerFast

    vocab = {token: number for number, token in enumerate([*SPECIAL, *BYTES])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )


def checkpoint(folder: Path, config: Any = None, **settings: Any) -> Path:
    """A model folder of transformers; `config`: of another kind than Llama; `settings`: of the
    Llama."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.3,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
    }
    module = AutoModelForCausalLM.from_config(config or LlamaConfig(**sizes | settings))
    with torch.no_grad():
        module.get_output_embeddings().weight[1] = 0  # the end token: texts seldom end
    module.float().save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def edit(file: Path, **changes: Any) -> None:
    """Change fields of a JSON file; `...` takes one out."""
    found = json.loads(file.read_text()) if file.is_file() else {}
    found = {key: value for key, value in (found | changes).items() if value is not ...}
    file.write_text(json.dumps(found))


def rewrite(folder: Path, change: Callable[[Tensors], Mapping[str, torch.Tensor]]) -> None:
    """Change the tensors of a folder with one file of weights."""
    tensors = {
        name: one.contiguous().clone() for name, one in change(load_file(folder / WEIGHTS)).items()
    }
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def greedy(folder: Path, count: int = 24) -> list[int]:
    """What transformers writes after `PROMPT`, in float32."""
    from transformers import AutoModelForCausalLM

    module: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = module.eval().generate(
        torch.tensor([PROMPT]), do_sample=False, max_new_tokens=count, pad_token_id=2
    )
    return [int(token) for token in found[0, len(PROMPT) :]]


def ours(folder: Path, count: int = 24) -> dict[str, list[int]]:
    """What plain decoding and vanilla_sd write after `PROMPT`, in float32; the draft is the target
    itself."""
    from draftwell.serving.artifacts.pair_files import PairFiles
    from draftwell.serving.runtime.pair import LoadSettings, load_pair
    from draftwell.serving.runtime.strategies import build_strategy

    pair = load_pair(
        PairFiles("tiny", folder, folder), LoadSettings(dtype="float32", slots=2), chat=False
    )
    strategies = {
        "plain": build_strategy("autoregressive"),
        "vanilla_sd": build_strategy("vanilla_sd", {"num_speculative_tokens": 3}),
    }
    settings: dict[str, Any] = {"stop_token_ids": pair.stop_tokens, "temperature": 0.0}
    with closing(pair.engine()) as engine:
        return {
            name: list(answered(engine, PROMPT, count, strategy, **settings).output)
            for name, strategy in strategies.items()
        }
