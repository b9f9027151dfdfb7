"""Model folders → modules and tokenizers of transformers."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from draftwell.serving.artifacts.distilled_draft import DistilledDraft, lent_names
from draftwell.serving.errors import DraftwellError
from draftwell.serving.runtime.failures import room_for
from draftwell.serving.runtime.models.text_part import text_part

BROKEN = (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError)
"""What the libraries raise on truncated, garbled or unknown files (a tokenizer library adds bare
exceptions of its own)."""


def load_module(folder: Path, dtype: torch.dtype, device: str) -> Any:
    """A causal language model from a folder with config and safetensors; of a model of images and
    text its text part."""
    from transformers import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
    )

    if not (folder / "config.json").is_file():
        raise DraftwellError(
            (
                f"{folder} holds no model (no config.json): check the pair's paths with "
                "`draftwell pairs`"
            ),
            code="no_model",
        )
    try:
        with room_for(f"the weights of {folder.name}", "choose a smaller dtype or another device"):
            of_text = type(AutoConfig.from_pretrained(folder)) in MODEL_FOR_CAUSAL_LM_MAPPING
            auto: Any = AutoModelForCausalLM if of_text else AutoModelForImageTextToText
            module: Any = auto.from_pretrained(folder, dtype=dtype, use_safetensors=True)
            return text_part(module).to(device).eval()
    except BROKEN as error:
        raise DraftwellError(
            (
                f"{folder} holds no model that can be read ({type(error).__name__}): fetch or "
                "save it again"
            ),
            code="unreadable_model",
        ) from error


def context_within(module: Any, wanted: int | None) -> int | None:
    """Positions of a slot of a draft or qualifier: as many as wanted, but no more than it was
    trained for. Beyond, the target is alone."""
    trained = getattr(module.config.get_text_config(), "max_position_embeddings", None)
    return wanted if wanted is None or trained is None else min(wanted, trained)


class ReadOnce(nn.ModuleList):
    """Decoder layers that are gone through once, in order: each gives up its projections when the
    next is asked for."""

    def __iter__(self) -> Iterator[nn.Module]:
        for layer in super().__iter__():
            yield layer
            for part in layer.modules():
                if isinstance(part, nn.Linear):
                    part.weight.data = part.weight.data.new_empty(0)


def own_memory(module: nn.Module, layers: nn.ModuleList, lender: nn.Module | None = None) -> None:
    """Copy what survives a release: embeddings, head and norms, but no projection of a layer.

    On a CPU they are parts of the weight file, which stays mapped, with all pages that were read,
    until no part is left.

    Args:
        lender: what it has lent stays where it is: a copy would be a second one, because the lender
            reads them there.
    """
    projections = {part.weight for part in layers.modules() if isinstance(part, nn.Linear)}
    lent = set() if lender is None else set(lender.parameters())
    for parameter in set(module.parameters()) - projections - lent:
        if parameter.device.type == "cpu":
            parameter.data = parameter.data.clone()


@contextmanager
def released_as_read(module: Any, lender: Any = None) -> Iterator[None]:
    """While this lasts, whoever brings a model's layers into a layout of its own, one after
    another, holds only one of them twice.

    Afterwards the module's layers cannot run any more; its embeddings, norms and head are as they
    were, but no views of the mapped file.

    Args:
        lender: the module whose embeddings it uses, if any.
    """
    body = module.base_model
    layers = body.layers
    own_memory(module, layers, lender)
    body.layers = ReadOnce(layers)
    try:
        yield
    finally:
        body.layers = layers


def build_distilled(draft: DistilledDraft, target: Any, device: str | None = None) -> Any:
    """A module with the draft's layers and the target's own embeddings; a copy of them, if on
    another `device`."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    settings = dict(draft.config)
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    # every weight is lent or loaded below: drawing random ones took as long as all the rest
    with torch.device("cpu"), no_init_weights():
        module = AutoModelForCausalLM.from_config(config, dtype=target.dtype)
    place = torch.device(device or target.device)
    lent = target.get_input_embeddings(), target.get_output_embeddings()
    if place.type != target.device.type:
        lent = copy.deepcopy(lent)  # moving the draft must not move the target
    module.base_model.set_input_embeddings(lent[0])
    module.set_output_embeddings(lent[1])
    missing, unexpected = module.load_state_dict(draft.state, strict=False)
    if unexpected or set(missing) - lent_names(module):
        raise DraftwellError(
            (
                "the distilled draft does not fit its own config "
                f"({[*unexpected, *missing][:2]} …): distil it again"
            ),
            code="weights_do_not_fit",
        )
    # weights have the target's dtype already; rotary frequencies stay float32, as the target's are
    return module.to(place).eval()


def load_draft_tokenizer(folder: Path) -> Any:
    """The tokenizer of a draft or a qualifier, which says what its ids mean."""
    if (
        not (folder / "tokenizer.json").is_file()
        and not (folder / "tokenizer_config.json").is_file()
    ):
        raise DraftwellError(
            (
                f"draft {folder.name} brings no tokenizer, so nobody knows what its ids mean: "
                "save one next to its weights"
            ),
            code="no_tokenizer",
        )
    return load_tokenizer(folder)


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a model folder."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder)
    except BROKEN as error:
        raise DraftwellError(
            (
                f"{folder} holds no tokenizer that can be read ({type(error).__name__}): fetch "
                "or save it again"
            ),
            code="unreadable_tokenizer",
        ) from error
