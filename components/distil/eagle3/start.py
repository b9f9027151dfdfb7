"""Where training of a head starts: at the target's last layer, fed with the state that a linear map
finds for it.

`fc` is a ridge regression from the three layers' states to the state that enters the target's last
layer; the head's layer begins as that layer, reading the state, and its output norm as the
target's. The weights that read the embedding begin at small random values: the target's layer has
none for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from draftwell.components.distil.corpus import Conversation
from draftwell.components.distil.eagle3.network import Eagle3Network
from draftwell.components.distil.writers import states_of
from draftwell.serving.errors import DraftwellError
from draftwell.serving.runtime.models.architecture import architecture_of
from draftwell.serving.runtime.pair import over_slots

RIDGE = 1e-3
"""Share of the features' mean square that is added to the diagonal."""
SAMPLE = 24
"""Conversations that the regression is fitted on."""
SMALL = 0.02
"""Standard deviation of weights without a model, Llama's own."""


def check_startable(target: Any) -> None:
    """Refuse a target whose last layer is not one that a head, a plain layer of Llama's, can begin
    as.

    Llama, Mistral and Qwen 2 have one (of Qwen 2 the biases are left out). Phi 3 keeps several
    matrices in one, Qwen 3 has norms of queries and keys, and Gemma norms and an activation of its
    own.

    Raises:
        DraftwellError: with the kind of model.
    """
    shape, attention = architecture_of(target.config), target.model.layers[-1].self_attn
    plain = (
        shape is not None
        and not shape.sandwich
        and shape.activation == "silu"
        and set(shape.ropes) == {None}
    )
    if not plain or not hasattr(attention, "q_proj") or hasattr(attention, "q_norm"):
        raise DraftwellError(
            "heads are trained for targets like Llama, not for "
            f"{target.config.model_type}: distil a draft with "
            "`draftwell step distil` instead",
            code="unsupported_architecture",
        )


@torch.no_grad()
def start_from_target(
    network: Eagle3Network, target: Any, corpus: Sequence[Conversation], seed: int = 0
) -> None:
    """Set all weights of a head; the same for the same seed.

    Args:
        target: the target's module, Llama-shaped.
        corpus: written with features.
    """
    generator = torch.Generator().manual_seed(seed)
    sample = corpus[:: max(1, len(corpus) // SAMPLE)][:SAMPLE]
    features = torch.cat([s.hidden[:, : 3 * network.config["hidden_size"]].float() for s in sample])
    wanted = torch.cat(entering_last(target, [s.ids[:-1] for s in sample]))
    network.fc.weight.copy_(ridge(features, wanted))
    copy_layer(network, target, generator)


@torch.no_grad()
def entering_last(target: Any, texts: Sequence[Tensor]) -> list[Tensor]:
    """`[ids, hidden]` float32 for each text, the states that enter the target's last layer."""
    attention = target.config._attn_implementation
    model: Any = over_slots(target, max_context=max(map(len, texts)))
    model.keep_hidden_states((len(target.model.layers) - 1,))
    states = [states_of(model, ids.tolist(), features=1) for ids in texts]
    target.set_attn_implementation(attention)
    return [each[:, : each.shape[-1] // 2].float() for each in states]


def ridge(x: Tensor, y: Tensor) -> Tensor:
    """W `[outputs, inputs]` that minimises ‖x Wᵀ − y‖² + λ‖W S‖², λ being `RIDGE`, S the scale of
    each input.

    Tokens are weighted by the inverse of their output's size: the first token's states are a
    hundred times larger than those of all others, and the norm after it divides by the size anyway.
    """
    weight = y.norm(dim=-1, keepdim=True).reciprocal()
    x, y = x * weight, y * weight
    scale = x.square().mean(0).sqrt().clamp(min=1e-12)
    x = x / scale
    gram = x.T @ x
    gram.diagonal().add_(RIDGE * len(x))
    return (torch.linalg.solve(gram, x.T @ y) / scale[:, None]).T.contiguous()


def copy_layer(network: Eagle3Network, target: Any, generator: torch.Generator) -> None:
    """The target's last layer and final norm as the head's; the half that reads embeddings at
    random."""
    layer, source = network.midlayer, target.model.layers[-1]
    hidden = network.config["hidden_size"]
    for name in ("q_proj", "k_proj", "v_proj"):
        weight = getattr(layer.self_attn, name).weight
        weight[:, :hidden].copy_(SMALL * torch.randn(weight[:, :hidden].shape, generator=generator))
        weight[:, hidden:].copy_(getattr(source.self_attn, name).weight)
    layer.self_attn.o_proj.weight.copy_(source.self_attn.o_proj.weight)
    for name in ("gate_proj", "up_proj", "down_proj"):
        getattr(layer.mlp, name).weight.copy_(getattr(source.mlp, name).weight)
    layer.hidden_norm.weight.copy_(source.input_layernorm.weight)
    layer.post_attention_layernorm.weight.copy_(source.post_attention_layernorm.weight)
    layer.input_layernorm.weight.fill_(1.0)
    network.norm.weight.copy_(target.model.norm.weight)
