"""EAGLE-3 heads that were trained elsewhere, as artifacts: folders of SafeAILab's EAGLE, SpecForge
and SGLang (`LlamaForCausalLMEagle3`, a layer called `midlayer`), and of speculators
(`speculators_model_type: eagle3`, a layer called `layers.0`).

`d2t` holds offsets in both: a draft index plus its value is the target's id. The layers whose input
states a head reads are named by vLLM's and speculators' `eagle_aux_hidden_state_layer_ids`, and
by SGLang's, in `eagle_config`, as the layers before them; they are 2, n // 2 and n - 3 of n where
neither is there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from draftwell.serving.artifacts.base import Provenance
from draftwell.serving.artifacts.eagle3_head import CONFIG, Eagle3Head
from draftwell.serving.errors import DraftwellError

COPIED = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "max_position_embeddings",
    "vocab_size",
    "bos_token_id",
    "eos_token_id",
)
"""Settings of the layer that are taken over."""
SWITCHES = (
    "norm_before_residual",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
    "target_hidden_size",
)
LAYER = (
    *(f"self_attn.{one}_proj" for one in "qkvo"),
    *(f"mlp.{one}_proj" for one in ("gate", "up", "down")),
    *("input_layernorm", "hidden_norm", "post_attention_layernorm"),
)
NEEDED = {f"{name}.weight" for name in ("fc", "norm", *(f"midlayer.{one}" for one in LAYER))}
OPTIONAL = re.compile(r"(input_norm|fc_norm\.\d|lm_head|embed_tokens)\.weight")
"""With `NEEDED` all that the model beside the target computes with."""
IGNORED = re.compile(r"verifier_.*|.*rotary_emb\.inv_freq|t2d")


def read_published(folder: Path, target: Any, donor: str, provenance: Provenance) -> Eagle3Head:
    """A head from a folder with `config.json` and safetensors.

    Args:
        target: the configuration of the target's text part (transformers).
        donor: sha256 of the target's weights.
    Raises:
        DraftwellError: no head (`no_head`), weights in another format (`no_weights`), parts that
            are not known here, or a head of another target (`unsupported_head`).
    """
    config = settings_of(folder)
    tensors = tensors_of(folder)
    shifts = tensors.pop("d2t", None)
    unknown = [name for name in tensors.keys() - NEEDED if not OPTIONAL.fullmatch(name)]
    if unknown or config["num_hidden_layers"] != 1:
        what = f"the tensor {min(unknown)}" if unknown else "another number of layers than one"
        raise refused(folder, f"it has {what}, which is not known here")
    if missing := NEEDED - tensors.keys():
        raise refused(folder, f"it lacks {min(missing)}")
    layers = layers_of(config, target.num_hidden_layers)
    width = len(layers) * target.hidden_size
    if tensors["fc.weight"].shape[1] != width:
        raise refused(
            folder,
            f"it reads {tensors['fc.weight'].shape[1]} numbers, and {len(layers)} layers of the "
            f"target have {width}: it was made for another target",
        )
    count = len(shifts) if shifts is not None else config["vocab_size"]
    ids = torch.arange(count) + (shifts if shifts is not None else 0)
    if int(ids.min()) < 0 or int(ids.max()) >= target.vocab_size:
        raise refused(folder, f"its tokens lie beyond the {target.vocab_size} of the target")
    if config["tie_word_embeddings"] and "embed_tokens.weight" in tensors:
        tensors.setdefault("lm_head.weight", tensors["embed_tokens.weight"][ids])
    ids, order = ids.sort()
    if "lm_head.weight" in tensors:
        tensors["lm_head.weight"] = tensors["lm_head.weight"][order]
    config |= {
        "vocab_size": target.vocab_size,
        "draft_vocab_size": count,
        "tie_word_embeddings": False,
        "torch_dtype": str(tensors["fc.weight"].dtype).removeprefix("torch."),
        "eagle_aux_hidden_state_layer_ids": list(layers),
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in layers]},
    }
    return Eagle3Head(tensors, config, ids, layers, donor, provenance)


def refused(folder: Path, why: str) -> DraftwellError:
    """The error where a head cannot run here."""
    return DraftwellError(
        f"the head in {folder} cannot run beside this target: {why}; train one with `draftwell "
        "train --kind eagle3_head`",
        code="unsupported_head",
    )


def settings_of(folder: Path) -> dict[str, Any]:
    """The configuration of a head as `LlamaForCausalLMEagle3` has it, from that of either kind."""
    try:
        found = json.loads((folder / CONFIG).read_text())
        layer = found.get("transformer_layer_config", found)
        settings = {name: layer[name] for name in COPIED if name in layer}
        settings.setdefault("num_key_value_heads", settings["num_attention_heads"])
        settings.setdefault("max_position_embeddings", 8192)
        settings["rms_norm_eps"] = layer.get("rms_norm_eps", 1e-6)
        rope = layer.get("rope_parameters") or {}
        scaling = layer.get("rope_scaling") or (rope if "rope_type" in rope else None)
        switches = {name: found[name] for name in SWITCHES if found.get(name)}
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise DraftwellError(
            f"{folder} holds no EAGLE-3 head (its config.json has no layer that could be one): "
            "name the folder of a head, with config.json and model.safetensors",
            code="no_head",
        ) from error
    named = {
        name: found[name]
        for name in ("eagle_aux_hidden_state_layer_ids", "eagle_config")
        if found.get(name)
    }
    return {
        **settings,
        **switches,
        **named,
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": layer.get("num_hidden_layers", 1),
        "rope_theta": layer.get("rope_theta") or rope.get("rope_theta") or 10000.0,
        "rope_scaling": scaling,
        "tie_word_embeddings": bool(found.get("tie_word_embeddings")),
    }


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder, by the names of `LlamaForCausalLMEagle3`."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise DraftwellError(
            f"{folder} holds no safetensors weights (files of pickled tensors such as "
            "pytorch_model.bin are not read): save its tensors with safetensors.torch.save_file",
            code="no_weights",
        )
    found: dict[str, Tensor] = {}
    try:
        for file in files:
            found |= load_file(file)
    except (OSError, SafetensorError) as error:
        raise DraftwellError(
            f"{folder} holds weights that cannot be read ({type(error).__name__}): fetch the head "
            "again",
            code="unreadable_model",
        ) from error
    names = {
        name: name.removeprefix("model.").replace("layers.0.", "midlayer.", 1) for name in found
    }
    return {known: found[name] for name, known in names.items() if not IGNORED.fullmatch(known)}


def layers_of(config: Mapping[str, Any], count: int) -> tuple[int, ...]:
    """The layers whose input states a head reads, of a target with `count` layers."""
    if named := config.get("eagle_aux_hidden_state_layer_ids"):
        return tuple(named)
    if named := config.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids"):
        return tuple(layer + 1 for layer in named)
    return 2, count // 2, count - 3
