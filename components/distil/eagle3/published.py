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
import operator
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
from draftwell.serving.runtime.models.eagle3_layer import NORMS
from draftwell.serving.runtime.models.eagle3_model import architecture_of_head, rope_table
from draftwell.serving.runtime.models.unbatched_model import row_by_row

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
SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
SWITCHES = (
    "norm_before_residual",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
    "target_hidden_size",
)
READ_LAYERS = "eagle_aux_hidden_state_layer_ids"
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
    config, tensors = settings_of(folder), tensors_of(folder)
    count = target.num_hidden_layers
    layers = tuple(config.pop("layers") or (2, count // 2, count - 3))
    if config["num_hidden_layers"] != 1:
        raise refused(folder, "it has another number of layers than one, which is not known here")
    if row_by_row(target, None):
        raise refused(folder, f"{target.model_type} models keep no states for a head")
    if not all(0 <= layer < count for layer in layers):
        raise refused(folder, f"it reads the layers {list(layers)}, and the target has {count}")
    ids = ids_of(folder, tensors.pop("d2t", None), config["vocab_size"], target.vocab_size)
    check_tensors(folder, tensors, *shapes_of(config, len(ids), len(layers), target))
    if config["tie_word_embeddings"] and "embed_tokens.weight" in tensors:
        tensors.setdefault("lm_head.weight", tensors["embed_tokens.weight"][ids])
    ids, order = ids.sort()
    if "lm_head.weight" in tensors:
        tensors["lm_head.weight"] = tensors["lm_head.weight"][order]
    config |= {
        "vocab_size": target.vocab_size,
        "draft_vocab_size": len(ids),
        "target_hidden_size": target.hidden_size,
        "tie_word_embeddings": False,
        "torch_dtype": str(tensors["fc.weight"].dtype).removeprefix("torch."),
        READ_LAYERS: list(layers),
        "eagle_config": {READ_LAYERS: [layer - 1 for layer in layers]},
    }
    return Eagle3Head(tensors, config, ids, layers, donor, provenance)


def ids_of(folder: Path, shifts: Tensor | None, count: int, vocab: int) -> Tensor:
    """The target's id of each token of a head, `[count]`."""
    shifts = torch.zeros(count, dtype=torch.long) if shifts is None else shifts
    if shifts.dim() != 1 or shifts.is_floating_point() or not len(shifts):
        raise refused(folder, "its d2t is no list of offsets")
    ids = torch.arange(len(shifts)) + shifts
    if int(ids.min()) < 0 or int(ids.max()) >= vocab:
        raise refused(folder, f"its tokens lie beyond the {vocab} of the target")
    if len(ids.unique()) < len(ids):
        raise refused(folder, "its d2t names a token twice")
    return ids


Shape = tuple[int, ...]


def shapes_of(
    config: Mapping[str, Any], tokens: int, layers: int, target: Any
) -> tuple[dict[str, Shape], dict[str, Shape]]:
    """The shapes of the weights that a head must have, and of all that it may have, by name."""
    shape, hidden, wide = (
        architecture_of_head(dict(config)),
        config["hidden_size"],
        config["intermediate_size"],
    )
    states, queries, keys = (
        target.hidden_size * layers,
        shape.heads * shape.head_dim,
        shape.kv_heads * shape.head_dim,
    )
    needed: dict[str, Shape] = {
        "fc": (hidden, states),
        "norm": (hidden,),
        **{f"midlayer.self_attn.{one}_proj": (keys, 2 * hidden) for one in "kv"},
        "midlayer.self_attn.q_proj": (queries, 2 * hidden),
        "midlayer.self_attn.o_proj": (hidden, queries),
        **{f"midlayer.mlp.{one}_proj": (wide, hidden) for one in ("gate", "up")},
        "midlayer.mlp.down_proj": (hidden, wide),
        **{f"midlayer.{name}": (hidden,) for name in NORMS if name != "norm"},
    }
    if config.get("norm_before_fc"):
        needed["input_norm"] = (states,)
    if config.get("fc_norm"):
        needed |= {f"fc_norm.{i}": (target.hidden_size,) for i in range(layers)}
    rows: dict[str, Shape] = {
        "lm_head": (tokens, hidden),
        "embed_tokens": (target.vocab_size, hidden),
    }
    # the target's are of another width
    return (needed if hidden == target.hidden_size else needed | rows), needed | rows


def check_tensors(
    folder: Path,
    tensors: Mapping[str, Tensor],
    needed: Mapping[str, Shape],
    known: Mapping[str, Shape],
) -> None:
    """Refuse a head whose weights are not those that are needed, or may be there."""
    if missing := {f"{name}.weight" for name in needed} - tensors.keys():
        raise refused(folder, f"it lacks {min(missing)}")
    for name, tensor in sorted(tensors.items()):
        wanted = known.get(name.removesuffix(".weight"))
        if wanted is None or not name.endswith(".weight"):
            raise refused(folder, f"it has the tensor {name}, which is not known here")
        # embeddings may have more rows than the target: they are of its ids all the same
        fits = tensor.shape[:1] >= wanted[:1] and tensor.shape[1:] == wanted[1:]
        if tensor.shape != wanted and not (name == "embed_tokens.weight" and fits):
            raise refused(folder, f"its {name} is {list(tensor.shape)}, and {list(wanted)} fits")
        if tensor.dtype not in FLOATS:
            raise refused(folder, f"its {name} is {tensor.dtype}, which is not read here")


def refused(folder: Path, why: str) -> DraftwellError:
    """The error where a head cannot run here."""
    return DraftwellError(
        f"the head in {folder} cannot run beside this target: {why}; choose a head "
        "that was made for this target",
        code="unsupported_head",
    )


def settings_of(folder: Path) -> dict[str, Any]:
    """The configuration of a head as `LlamaForCausalLMEagle3` has it, from that of either kind."""
    try:
        found = json.loads((folder / CONFIG).read_text())
        layer = found.get("transformer_layer_config", found)
        settings = {name: layer[name] for name in COPIED if name in layer}
        settings.setdefault("num_key_value_heads", settings["num_attention_heads"])
        if any(type(settings[name]) is not int or settings[name] < 1 for name in SIZES):
            raise ValueError("sizes")
        settings.setdefault("max_position_embeddings", 8192)
        settings["rms_norm_eps"] = layer.get("rms_norm_eps", 1e-6)
        rope = layer.get("rope_parameters") or {}
        scaling = layer.get("rope_scaling") or (rope if "rope_type" in rope else None)
        switches = {name: found[name] for name in SWITCHES if found.get(name)}
        described: dict[str, Any] = {
            **settings,
            **switches,
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "num_hidden_layers": layer.get("num_hidden_layers", 1),
            "rope_theta": layer.get("rope_theta") or rope.get("rope_theta") or 10000.0,
            "rope_scaling": scaling,
            "tie_word_embeddings": bool(found.get("tie_word_embeddings")),
            "layers": layers_of(found),
        }
        head_dim = architecture_of_head(described).head_dim
        rope_table(described, head_dim, 1, torch.device("cpu"))
    except (OSError, ValueError, LookupError, AttributeError, TypeError) as error:
        raise DraftwellError(
            f"{folder} holds no EAGLE-3 head (its config.json has no layer that could be one): "
            "name the folder of a head, with config.json and model.safetensors",
            code="no_head",
        ) from error
    return described


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


def layers_of(found: Mapping[str, Any]) -> list[int]:
    """The layers whose input states a head reads, as its configuration names them; none where it
    names none."""
    if named := found.get(READ_LAYERS):
        return [operator.index(layer) for layer in named]
    named = (found.get("eagle_config") or {}).get(READ_LAYERS) or []
    return [operator.index(layer) + 1 for layer in named]
