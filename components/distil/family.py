"""A shallower model out of a deeper one, for any decoder of transformers.

Where a model keeps its layers is found by structure, not by name: the one `ModuleList` with as many
modules as the configuration has layers. Everything else (embeddings, positions, final norm, head)
is copied as it is. Tried with Llama, Qwen2, Qwen3, Gemma, Gemma2, Gemma3 (text), GPT-NeoX and GPT-2
(tests/components/distil/test_families.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftwell.serving.artifacts.distilled_draft import lent_names
from draftwell.serving.errors import DraftwellError
from draftwell.serving.runtime.models.module_model import logit_scaling

PER_LAYER = ("layer_types", "mlp_layer_types", "no_rope_layers", "layers_block_type")
"""Settings that hold a value for each layer. By name: a list of end-of-text ids may be as long as
the model is deep."""
NOT_OF_THE_DRAFT = frozenset(
    {"_name_or_path", "_model_name_or_path", "architectures", "transformers_version", "dtype"}
)
"""Settings that describe the target's files and not its function."""


def layers_of(module: Any) -> str:
    """What the names of the weights of a causal language model's layers begin with, such as
    `model.layers.`.

    Raises:
        DraftwellError: it has no such list, or several, or reads more than text.
    """
    config = module.config
    refuse_unless_text_only(config)
    found = [
        name
        for name, child in module.named_modules()
        if isinstance(child, nn.ModuleList)
        and len(child) == config.num_hidden_layers
        # those inside a layer are its experts
        and not any(part.isdigit() for part in name.split("."))
    ]
    if len(found) != 1:
        raise DraftwellError(
            f"{config.model_type} models keep their layers in an unknown way: choose another "
            "target",
            code="unknown_architecture",
        )
    return f"{found[0]}."


def refuse_unless_text_only(config: Any) -> None:
    """Refuse a configuration of transformers whose model reads images or sound, too."""
    if config.get_text_config() is not config:
        raise DraftwellError(
            f"{config.model_type} models read more than text: name a text-only target",
            code="not_text_only",
        )


def default_layers(count: int) -> tuple[int, ...]:
    """The first two and the last two layers; of a target with four or fewer, the first and the
    last.

    >>> default_layers(30), default_layers(4), default_layers(2)
    ((0, 1, 28, 29), (0, 3), (0,))
    """
    if count < 2:
        raise DraftwellError(
            "the target has one layer: no shallower draft can be made of it", code="one_layer"
        )
    if count == 2:
        return (0,)
    return (0, count - 1) if count <= 4 else (0, 1, count - 2, count - 1)


def check_layers(layers: Sequence[int], count: int) -> tuple[int, ...]:
    """`layers` as a tuple, checked to be ascending and among the target's `count` layers.

    Raises:
        DraftwellError: they are not.
    """
    text = ",".join(map(str, layers))
    if not layers or list(layers) != sorted(set(layers)):
        raise DraftwellError(
            (
                f"layers {text or '(none)'}: name each layer once, in ascending order, such "
                f"as 0,1,{count - 2},{count - 1}"
            ),
            code="bad_layers",
        )
    if layers[0] < 0 or layers[-1] >= count:
        raise DraftwellError(
            f"--set layers={text}: the target has {count} layers, numbered 0 to {count - 1}",
            code="bad_layers",
        )
    return tuple(layers)


def draft_config(module: Any, layers: Sequence[int]) -> Any:
    """The target's configuration with these layers only; the windows and kinds of the kept layers
    stay theirs."""
    from transformers import AutoConfig

    config = module.config
    settings = {
        key: value for key, value in config.to_dict().items() if key not in NOT_OF_THE_DRAFT
    }
    count = config.num_hidden_layers
    settings[config.attribute_map.get("num_hidden_layers", "num_hidden_layers")] = len(layers)
    for name in PER_LAYER:
        values = settings.get(name)
        if isinstance(values, (list, tuple)) and len(values) == count:
            settings[name] = [values[layer] for layer in layers]
    return AutoConfig.for_model(settings.pop("model_type"), **settings)


def keep_layers(module: Any, layers: Sequence[int]) -> Any:
    """A float32 copy of a few of a module's layers on the module's device, in evaluation mode:
    drafting uses no dropout.

    Trainable are the layers and the final norm. Embeddings of tokens (the target's, lent to the
    draft) and of positions are frozen.

    Args:
        layers: numbers of the target's layers, in the order that the draft runs them.
    Raises:
        DraftwellError: an architecture whose layers are not alike, or depend on their number.
    """
    from transformers import AutoModelForCausalLM

    prefix = layers_of(module)
    if getattr(module.config, "scale_attn_by_inverse_layer_idx", False):
        raise DraftwellError(
            f"this {module.config.model_type} scales attention by a layer's number, which "
            "a draft would change: "
            "choose another target",
            code="numbered_layers",
        )
    draft: Any = AutoModelForCausalLM.from_config(draft_config(module, layers), dtype=torch.float32)
    donor = module.state_dict()
    try:
        draft.load_state_dict(
            {name: donor[source_of(name, prefix, layers)] for name in draft.state_dict()}
        )
    except (KeyError, RuntimeError) as error:
        raise DraftwellError(
            f"the layers of this {module.config.model_type} are not alike, so that a few "
            "of them make no model: "
            "choose another target",
            code="unlike_layers",
        ) from error
    draft.to(module.device).eval()
    lent = lent_names(draft)
    tables = {id(child.weight) for child in draft.modules() if isinstance(child, nn.Embedding)}
    for name, parameter in draft.named_parameters(remove_duplicate=False):
        parameter.requires_grad_(name not in lent and id(parameter) not in tables)
    return draft


def grow(shallow: Any, target: Any, layers: Sequence[int], at: int) -> Any:
    """A deeper draft that starts out as a shallow, trained one: new layers add nothing until they
    are trained.

    Args:
        shallow: a trained draft, Llama-shaped.
        layers: the target's layers that are inserted after the first `at` layers of `shallow`;
            their two output projections start at zero, so that at first every new layer returns its
            input unchanged.
    """
    old = shallow.config.num_hidden_layers
    # the right shapes; the old layers are filled in below
    deep = keep_layers(target, [*range(at), *layers, *range(old - at)])
    trained = shallow.state_dict()
    state = {name: t for name, t in trained.items() if ".layers." not in name}
    for i in range(old):
        place = i if i < at else i + len(layers)
        source = f"model.layers.{i}."
        state |= {
            name.replace(source, f"model.layers.{place}.", 1): t
            for name, t in trained.items()
            if name.startswith(source)
        }
    deep.load_state_dict(state, strict=False)
    for layer in deep.model.layers[at : at + len(layers)]:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    return deep


def source_of(name: str, prefix: str, layers: Sequence[int]) -> str:
    """The name in the target of a weight of the draft.

    >>> source_of("model.layers.1.mlp.up_proj.weight", "model.layers.", (0, 29))
    'model.layers.29.mlp.up_proj.weight'
    """
    if not name.startswith(prefix):
        return name
    number, _, rest = name.removeprefix(prefix).partition(".")
    return f"{prefix}{layers[int(number)]}.{rest}"


@dataclass(frozen=True)
class Head:
    """From normalised hidden states to the logits of some tokens, as the target computes them.

    Args:
        ids: `[head]` tokens that are covered, ascending.
        weight: `[head, hidden]` their rows of the output embedding.
        bias: `[head]`, or None.
        scale: the architecture's scaling of logits (Cohere multiplies, Granite divides), or None.
        softcap: Gemma2's bound on the logits, or None.
    """

    ids: Tensor
    weight: Tensor
    bias: Tensor | None = None
    scale: Callable[[Tensor], Tensor] | None = None
    softcap: float | None = None

    @classmethod
    def of(cls, module: Any, ids: Tensor) -> Head:
        """The head of a module over `ids`, in bfloat16 on the module's device."""
        output = module.get_output_embeddings()
        chosen = ids.to(output.weight.device)
        bias = getattr(output, "bias", None)
        return cls(
            ids,
            output.weight.detach()[chosen].bfloat16(),
            None if bias is None else bias.detach()[chosen].bfloat16(),
            logit_scaling(module.config),
            getattr(module.config, "final_logit_softcapping", None),
        )

    def __call__(self, states: Tensor) -> Tensor:
        """`[n, hidden]` → `[n, head]` float32."""
        logits = F.linear(states, self.weight, self.bias)
        if self.scale is not None:
            logits = self.scale(logits)
        logits = logits.float()
        if self.softcap:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits
