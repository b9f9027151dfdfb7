"""A near copy's module: the target's own, loaded once more, with fewer layers."""

from __future__ import annotations

from typing import Any

from torch import nn

from draftwell.serving.errors import DraftwellError


def drop_layers(module: Any, dropped: tuple[int, ...]) -> Any:
    """Leave layers out of a causal language model, in place; the others keep their order.

    Args:
        module: a `PreTrainedModel` whose body has `layers`.
        dropped: numbers of layers, counted from 0.
    Raises:
        DraftwellError: it has no such layers, or none would be left (`no_such_layer`).
    """
    layers = getattr(module.base_model, "layers", None)
    if layers is None:
        raise DraftwellError(
            f"{module.config.model_type} models keep their layers in a way that no near "
            "copy can be made of: name another "
            "draft",
            code="unsupported_architecture",
        )
    unknown = [number for number in dropped if not 0 <= number < len(layers)]
    if unknown or len(set(dropped)) >= len(layers):
        raise DraftwellError(
            f"a near copy cannot leave out layers {sorted(set(dropped))} of a target that "
            f"has {len(layers)}: correct "
            "drop_layers in the pair's YAML file",
            code="no_such_layer",
        )
    kept = [layer for number, layer in enumerate(layers) if number not in dropped]
    for number, layer in enumerate(kept):
        layer.self_attn.layer_idx = number  # where the library's own cache keeps its keys
    module.base_model.layers = nn.ModuleList(kept)
    config = module.config.get_text_config()
    if getattr(config, "layer_types", None):
        config.layer_types = [
            kind for number, kind in enumerate(config.layer_types) if number not in dropped
        ]
    config.num_hidden_layers = len(kept)
    return module
