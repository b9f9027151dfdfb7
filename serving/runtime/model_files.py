"""Model folders → modules and tokenizers of transformers."""

from __future__ import annotations

import copy
import importlib.util
import logging
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from draftwell.serving.artifacts.checkpoint import (
    CONFIG,
    FULL_WEIGHTS,
    GENERATION,
    INTEGERS,
    check_checkpoint,
    check_layout,
    quantisation,
    read_object,
)
from draftwell.serving.artifacts.distilled_draft import DistilledDraft, lent_names
from draftwell.serving.artifacts.pair_files import tokenizer_files
from draftwell.serving.errors import DraftwellError
from draftwell.serving.runtime.failures import room_for
from draftwell.serving.runtime.models.architecture import settled_length
from draftwell.serving.runtime.models.text_part import check_text_part, text_part
from draftwell.serving.runtime.models.transformers_model import PACKED
from draftwell.serving.runtime.models.unbatched_model import UNBATCHED

log = logging.getLogger(__name__)
LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
"""In the name of a tensor that belongs to a decoder layer; its number."""
BESIDE = re.compile(
    r"vis|image|audio|speech|mtp|(inv_freq|masked_bias|attn\.bias|(k|v|input|output)_scale)$"
)
"""In the names of tensors that decoding text does without: of other parts, of older versions of
transformers, or of a cache or activations in 8 bits."""
UNPACKED_BYTES = 64_000_000
"""Of the numbers that are unpacked at a time while packed weights are made full."""
BYTES_A_NUMBER = 24
"""What they take each: up to six tensors of 4 bytes."""
NEEDED = {
    "tiktoken.model": ("tiktoken",),
    "tokenizer.model": ("sentencepiece", "tiktoken"),
    "spiece.model": ("sentencepiece",),
}
"""File of a tokenizer → packages that read it; a tokenizer.model may be of either kind."""


def read_config(folder: Path) -> Any:
    """The configuration of a model folder whose weights can be read, as transformers has it.

    Raises:
        DraftwellError: as `check_checkpoint`; or transformers does not know the model
            (`unknown_model`), would have to run its code (`remote_code`), or it is none that
            continues a text here (`unsupported_architecture`).
    """
    from transformers import AutoConfig

    written = check_checkpoint(folder)
    try:
        config: Any = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # of any library that looks at a part of it
        raise _unreadable(folder, written, error) from error
    _check_continues(folder, config)
    method = quantisation(written)
    if config.get_text_config() is not config:
        check_text_part(config)
        if method is not None and method not in FULL_WEIGHTS:
            raise DraftwellError(
                f"{folder} is quantised with {method}, and the text part of {config.model_type} "
                "models is decoded with full weights: choose those, or FP8",
                code="unsupported_quantisation",
            )
    if method in FULL_WEIGHTS:
        holder = config if hasattr(config, "quantization_config") else config.text_config
        if method in INTEGERS:
            del holder.quantization_config
        else:
            holder.quantization_config |= {"dequantize": True}
    return config


def _check_continues(folder: Path, config: Any) -> None:
    """Refuse encoders, and models of other things than text: transformers would make a part up."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    known = config.model_type in PACKED | UNBATCHED
    mapped = (
        type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
        or type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    )
    # encoders are mapped as well, for those that were trained as decoders
    decoder = known or getattr(config, "is_decoder", True)
    if not mapped or not decoder or getattr(config, "is_encoder_decoder", False):
        raise DraftwellError(
            f"{folder} is a {config.model_type} model, which does not continue a text token by "
            "token: choose another model (docs/models.md names those that work)",
            code="unsupported_architecture",
        )


def load_module(folder: Path, dtype: torch.dtype, device: str) -> Any:
    """A causal language model from a folder with config and safetensors; of a model of images and
    text its text part.

    Quantised weights become full ones where these can be made of them; others stay in the
    layers of the package that brings them, and `module.hf_quantizer` is set.

    Raises:
        DraftwellError: as `read_config` and `check_tensors`; or a library cannot read it
            (`unreadable_model`).
    """
    from transformers import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        GenerationConfig,
    )

    config = read_config(folder)
    written = read_object(folder / CONFIG)
    packed = quantisation(written) in INTEGERS
    try:
        with room_for(f"the weights of {folder.name}", "choose a smaller dtype or another device"):
            of_text = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
            auto: Any = AutoModelForCausalLM if of_text else AutoModelForImageTextToText
            if packed:  # which takes no tensors
                auto = auto._model_mapping[type(config)]
            with errors_alone("transformers.modeling_utils"):  # else a table of such tensors
                loaded: Any = auto.from_pretrained(
                    None if packed else folder,
                    state_dict=full_tensors(folder, written, dtype) if packed else None,
                    config=config,
                    dtype=dtype,
                    use_safetensors=True,
                    trust_remote_code=False,
                    ignore_mismatched_sizes=True,  # refused below, by name
                    output_loading_info=True,
                )
            check_tensors(folder, config, loaded[1])
            if packed and (folder / GENERATION).is_file():
                loaded[0].generation_config = GenerationConfig.from_pretrained(folder)
            module = text_part(loaded[0]).to(device).eval()
            if hasattr(module, "hf_quantizer"):  # compressed-tensors unpacks at the first pass
                with torch.inference_mode():
                    module(torch.zeros(1, 1, dtype=torch.long, device=device))
            return module
    except DraftwellError:
        raise
    except Exception as error:  # of any library that reads a part of it
        raise _unreadable(folder, config.to_dict(), error) from error


def full_tensors(
    folder: Path, config: Mapping[str, Any], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """The tensors of a folder with weights of GPTQ or AWQ, each packed matrix as a full one."""
    stored = {name: one for file in check_layout(folder) for name, one in load_file(file).items()}
    settings = config.get("quantization_config") or config["text_config"]["quantization_config"]
    for name in [name for name in stored if name.endswith(".qweight")]:
        layer = name.removesuffix(".qweight")
        parts = {
            part: stored.pop(f"{layer}.{part}", None)
            for part in ("qweight", "qzeros", "scales", "g_idx")
        }
        stored[f"{layer}.weight"] = full_weight(parts, settings, dtype)
    return stored


def full_weight(
    parts: Mapping[str, Any], settings: Mapping[str, Any], dtype: torch.dtype
) -> torch.Tensor:
    """A matrix [outputs, inputs] of the parts in which GPTQ, or AWQ in its layout `gemm`, stores
    it: a scale and a zero for each group of inputs of an output.

    Args:
        parts: `qweight`, of int32 words with 32 / bits numbers each, the lowest bits first: of
            inputs in GPTQ's, of outputs in AWQ's, which interleaves them; `qzeros`, always of
            outputs, GPTQ's first layout with 1 less than they are; `scales` [groups, outputs];
            `g_idx` [inputs]: the group of each, or None where they are in order.
        settings: `quantization_config` of the model.
        dtype: that of the result, which is computed in float32.
    """
    bits, awq = settings["bits"], settings["quant_method"] == "awq"
    in_word, most = 32 // bits, 2**bits - 1
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)  # int64 would double what is unpacked
    if awq:
        shifts = shifts[[0, 4, 1, 5, 2, 6, 3, 7]]

    def numbers(words: torch.Tensor) -> torch.Tensor:
        unpacked: torch.Tensor = words[..., None] >> shifts & most
        return unpacked

    packed, packed_zeros, scales = (parts[part] for part in ("qweight", "qzeros", "scales"))
    inputs, outputs = len(packed) * (1 if awq else in_word), scales.shape[1]
    groups = parts["g_idx"]
    if groups is None:
        groups = torch.arange(inputs) // (inputs // len(scales))
    groups = groups.long()
    full = torch.empty(outputs, inputs, dtype=dtype)
    step = max(1, UNPACKED_BYTES // (inputs * in_word * BYTES_A_NUMBER)) * in_word
    for first in range(0, outputs, step):
        columns = slice(first, first + step)
        words = slice(first // in_word, (first + step) // in_word)
        zeros = numbers(packed_zeros[:, words]).flatten(1)
        if not awq and settings.get("checkpoint_format") != "gptq_v2":
            zeros = zeros + 1 & most
        whole = numbers(packed[:, words if awq else columns])
        whole = whole.flatten(1) if awq else whole.transpose(1, 2).flatten(0, 1)
        full[columns] = ((whole - zeros[groups]) * scales[:, columns].float()[groups]).T
    return full


@contextmanager
def errors_alone(logger: str) -> Iterator[None]:
    """While this lasts, a library logs errors and nothing less. By a filter: transformers checks
    and logs more where the level of its logger was set."""

    def is_error(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.ERROR

    found = logging.getLogger(logger)
    found.addFilter(is_error)
    try:
        yield
    finally:
        found.removeFilter(is_error)


def check_tensors(folder: Path, config: Any, found: Mapping[str, Collection[Any]]) -> None:
    """Refuse a checkpoint whose tensors are not those of its configuration: transformers makes up
    what is missing, and leaves out what it does not expect.

    Args:
        found: `missing_keys`, `unexpected_keys` and `mismatched_keys`, as transformers tells them.
    Raises:
        DraftwellError: a tensor is missing, has another shape, or is one of a decoder layer that
            the configuration does not have (`weights_do_not_fit`).
    """
    text = config.get_text_config()
    guesses = getattr(text, "num_nextn_predict_layers", None) or 0  # layers that draft, behind all
    known = range(text.num_hidden_layers, text.num_hidden_layers + guesses)
    strange = [name for name in found["unexpected_keys"] if not BESIDE.search(name)]
    layers = {name: match for name in strange if (match := LAYER.search(name))}
    wrong = {
        "lacks": list(found["missing_keys"]),
        "has in another shape than its config.json says": [n for n, *_ in found["mismatched_keys"]],
        "has, against its config.json,": [
            name for name, match in layers.items() if int(match[1]) not in known
        ],
    }
    for what, names in wrong.items():
        if names:
            more = f" and {len(names) - 1} more tensors" if len(names) > 1 else ""
            raise DraftwellError(
                f"{folder} {what} {min(names)}{more}: fetch the model again, config.json included",
                code="weights_do_not_fit",
            )
    if strange:
        log.warning("%s: %d tensors are not used, such as %s", folder, len(strange), min(strange))


def _unreadable(folder: Path, config: Mapping[str, Any], error: Exception) -> DraftwellError:
    """The line for what a library raised while it read a model."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    kind = config.get("model_type")
    if kind not in CONFIG_MAPPING_NAMES and config.get("auto_map"):
        return _remote_code(folder)
    if kind not in CONFIG_MAPPING_NAMES:
        return DraftwellError(
            f"{folder} is a model of the type {kind}, which transformers {transformers.__version__}"
            " does not know: pip install -U transformers, or choose another model",
            code="unknown_model",
        )
    return DraftwellError(
        f"{folder} holds no model that can be read ({reason_of(error)}): fetch or save it again",
        code="unreadable_model",
    )


def _remote_code(folder: Path) -> DraftwellError:
    return DraftwellError(
        f"{folder} needs Python code of its own (auto_map), which is never run: choose a model "
        "that transformers itself knows",
        code="remote_code",
    )


def reason_of(error: Exception) -> str:
    """A library's error as a part of one line."""
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words[:160]}{'…' * (len(words) > 160)}"


def context_within(config: Any, wanted: int | None) -> int | None:
    """Positions of a slot: as many as wanted, but no more than a model of this configuration was
    trained for, nor than its rotary factors are settled for. Beyond those of a draft or qualifier,
    the target is alone."""
    config = config.get_text_config()
    limits = getattr(config, "max_position_embeddings", None), settled_length(config)
    return None if wanted is None else min([wanted, *(one for one in limits if one is not None)])


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


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a model folder.

    Raises:
        DraftwellError: there is none (`no_tokenizer`), it needs a package (`missing_package`) or
            code of its own (`remote_code`), or it is damaged (`unreadable_tokenizer`).
    """
    from transformers import AutoTokenizer

    tokenizer_files(folder)  # for some kinds transformers makes one up where there are no files
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # tokenizers raises bare exceptions
        raise _unreadable_tokenizer(folder, error) from error


def _unreadable_tokenizer(folder: Path, error: Exception) -> DraftwellError:
    """The line for what a library raised while it read a tokenizer."""
    file = folder / "tokenizer_config.json"
    if file.is_file() and read_object(file).get("auto_map"):
        return _remote_code(folder)
    advice = "fetch or save it again"
    if not (folder / "tokenizer.json").is_file():
        needs = next((NEEDED[name] for name in NEEDED if (folder / name).is_file()), ())
        if missing := [name for name in needs if importlib.util.find_spec(name) is None]:
            return DraftwellError(
                f"{folder} has its tokenizer in a format that needs {' and '.join(missing)}: pip "
                f"install {' '.join(missing)}",
                code="missing_package",
            )
        if not file.is_file():
            advice = f"fetch its {file.name}, too, which says of what kind it is"
    return DraftwellError(
        f"{folder} holds no tokenizer that can be read ({reason_of(error)}): {advice}",
        code="unreadable_tokenizer",
    )
