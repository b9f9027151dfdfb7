"""Whether a model folder holds a checkpoint that can be decoded: told from its small files and from
the headers of its weights, before any weight is read.

What is quantised is either turned into full weights while it is loaded, or computed by layers that
a package brings; anything else is refused, because packed numbers that are taken for
weights give text, too.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from draftwell.serving.errors import DraftwellError

CONFIG = "config.json"
GENERATION = "generation_config.json"
INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"

INTEGERS: Mapping[str, tuple[tuple[int, ...], str, tuple[str, ...]]] = {
    "gptq": ((2, 4, 8), "checkpoint_format", ("gptq", "gptq_v2")),
    "awq": ((4,), "version", ("gemm",)),
}
"""Formats of packed integers that are made full here (`model_files.full_tensors`) → their bits, the
setting that names the layout, and the layouts; the first is the default."""
FULL_WEIGHTS = frozenset({"fp8", "mxfp4", *INTEGERS})
"""Quantised formats that become full weights while they are loaded."""
PACKAGES: Mapping[str, tuple[str, ...]] = {
    "awq": (),
    "bitsandbytes": ("bitsandbytes", "accelerate"),
    "compressed-tensors": ("compressed-tensors",),
    "fp8": ("accelerate",),
    "gptq": (),
    "mxfp4": (),
}
"""Quantised formats that are decoded → what they need from PyPI."""
FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
_SIZES = {"I16": 2, "U16": 2, "I32": 4, "U32": 4, "I64": 8, "U64": 8}
MATRICES = (".weight", ".qweight", ".weight_packed", "_blocks")
"""How the names of matrices end, packed ones included."""


class Stored(NamedTuple):
    """A tensor as a safetensors header describes it."""

    dtype: str
    shape: tuple[int, ...]


def check_checkpoint(folder: Path) -> dict[str, Any]:
    """The configuration of a model folder whose weights can be read.

    Raises:
        DraftwellError: it is no model of transformers (`no_model`), an adapter (`adapter`), without
            safetensors (`no_weights`), damaged (`unreadable_model`), or quantised in a way that is
            not decoded (`unsupported_quantisation`) or needs a package (`missing_package`).
    """
    files = check_layout(folder)
    config = read_object(folder / CONFIG)
    generation = read_object(folder / GENERATION) if (folder / GENERATION).is_file() else {}
    for name, settings in ((CONFIG, config), (GENERATION, generation)):
        _check_end_tokens(folder / name, settings.get("eos_token_id"))
    if (elsewhere := config.get("transformers_weights")) is not None:
        raise DraftwellError(
            f"{folder / CONFIG} takes the weights from {elsewhere!r} (transformers_weights), of "
            f"which nothing is checked: name that file {WEIGHTS} and take the setting out",
            code="no_weights",
        )
    method = quantisation(config)
    if method is not None:
        _check_quantisation(folder, method, _settings(config))
    tensors: dict[str, Stored] = {}
    for file in files:
        tensors |= _header(file)
    if method is None:
        _check_full(folder, tensors)
    elif method == "fp8":
        _check_blocks(folder, tensors, _settings(config).get("weight_block_size"))
    return config


def check_layout(folder: Path) -> list[Path]:
    """The files of a model folder that transformers takes the weights from; whether it can decode
    them is another question (`check_checkpoint`).

    Raises:
        DraftwellError: `no_model`, `adapter` or `no_weights`, as `check_checkpoint`.
    """
    _check_kind(folder)
    return _weight_files(folder)


def packages_of(folder: Path) -> tuple[str, ...]:
    """What the weights of a model folder need from PyPI beside the runtime's own packages."""
    config = read_object(folder / CONFIG) if (folder / CONFIG).is_file() else {}
    return PACKAGES.get(quantisation(config) or "", ())


def computed_bytes(folder: Path, number: int) -> int:
    """Bytes of a model's weights as they are computed with, by the headers of its files.

    Args:
        number: bytes of one of them in the dtype of the computation; quantised ones that are made
            full (`FULL_WEIGHTS`) have that size, too, others keep their own.
    """
    config = read_object(folder / CONFIG) if (folder / CONFIG).is_file() else {}
    full = quantisation(config) in FULL_WEIGHTS
    settings = _settings(config)
    bits = settings.get("bits") if isinstance(settings, dict) else None
    found = 0
    for file in folder.glob("*.safetensors"):
        for name, (dtype, shape) in _header(file).items():
            each = number if full or dtype in FLOATS else _SIZES.get(dtype, 1)
            halves = 2 if full and name.endswith("_blocks") else 1  # of MXFP4: two in a byte
            words = 32 // bits if full and bits and name.endswith(".qweight") else 1
            found += math.prod(shape) * each * halves * words
    return found


def read_object(file: Path) -> dict[str, Any]:
    """A JSON object of a model folder."""
    try:
        found = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise DraftwellError(
            f"{file} cannot be read ({type(error).__name__}): fetch the model again",
            code="unreadable_model",
        ) from error
    if not isinstance(found, dict):
        raise DraftwellError(
            f"{file} holds no JSON object: fetch the model again", code="unreadable_model"
        )
    return found


def quantisation(config: Mapping[str, Any]) -> str | None:
    """The format that a configuration says its weights are quantised in; None: in none."""
    settings = _settings(config)
    if not settings:
        return None
    if not isinstance(settings, dict):
        return str(settings)
    if settings.get("load_in_8bit"):
        return "bitsandbytes (8 bits)"
    if settings.get("load_in_4bit"):
        return "bitsandbytes"
    return str(settings.get("quant_method") or "a method without a name (no quant_method)")


def _settings(config: Mapping[str, Any]) -> Any:
    """What a configuration, or the one of its text part, says about quantisation."""
    text = config.get("text_config")
    inner = text.get("quantization_config") if isinstance(text, dict) else None
    return config.get("quantization_config") or inner or {}


def _weight_files(folder: Path) -> list[Path]:
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if (folder / INDEX).is_file():
        where = read_object(folder / INDEX).get("weight_map")
        if not isinstance(where, dict) or not where:
            raise DraftwellError(
                f"{folder / INDEX} names no weights: fetch the model again", code="unreadable_model"
            )
        files = [folder / name for name in sorted({str(name) for name in where.values()})]
        if absent := [file.name for file in files if not file.is_file()]:
            raise DraftwellError(
                f"{folder} lacks {len(absent)} of {len(files)} files that {INDEX} names, the first "
                f"of them {absent[0]}: fetch the model again",
                code="no_weights",
            )
        return files
    raise DraftwellError(f"{folder} has {_other_weights(folder)}", code="no_weights")


def _check_kind(folder: Path) -> None:
    """Refuse what is no model of transformers."""
    if (folder / "adapter_config.json").is_file():
        raise DraftwellError(
            f"{folder} holds an adapter (adapter_config.json): merge it into its base model with "
            "peft's merge_and_unload, save that with save_pretrained, and name its folder",
            code="adapter",
        )
    if (folder / CONFIG).is_file():
        return
    if any((folder / name).exists() for name in ("params.json", "original")):
        raise DraftwellError(
            f"{folder} has its publisher's own layout and no {CONFIG}: fetch the model's files for "
            "transformers, or convert it with the script of its family in transformers",
            code="no_model",
        )
    raise DraftwellError(
        f"{folder} holds no model (no {CONFIG}): check the pair's paths with `draftwell list "
        f"pairs`",
        code="no_model",
    )


def _other_weights(folder: Path) -> str:
    """What a folder has instead of weights, and what to do."""
    if any(folder.glob("consolidated*")):
        return (
            "its publisher's own weights alone (consolidated), not transformers': fetch "
            f"{WEIGHTS}, or convert it with the script of its family in transformers"
        )
    if found := sorted(file.name for file in folder.glob("*.safetensors")):
        return f"{found[0]} and no {INDEX} that says what is in it: fetch the model again"
    convert = "AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER)"
    if any(next(folder.glob(ending), None) for ending in ("*.bin", "*.pt", "*.pth")):
        return (
            "pickled weights, which are never read, and no safetensors weights: convert them once "
            f"with transformers, if you trust them: {convert}"
        )
    return f"no safetensors weights: fetch the model again, or convert it with {convert}"


def _check_end_tokens(file: Path, found: Any) -> None:
    ids = found if isinstance(found, list) else [found]
    if not all(one is None or type(one) is int for one in ids):
        raise DraftwellError(
            f"{file} has the end token {json.dumps(found)}, which is no number nor a list of "
            "numbers: correct eos_token_id",
            code="unreadable_model",
        )


def _check_quantisation(folder: Path, method: str, settings: Any) -> None:
    """Refuse a format that is not decoded, a layout of it, or one whose packages are missing."""
    if method in INTEGERS:
        bits, key, layouts = INTEGERS[method]
        given = settings if isinstance(settings, dict) else {}
        layout = str(given.get(key) or layouts[0]).lower()
        if given.get("bits") not in bits or layout not in layouts:
            raise DraftwellError(
                f"{folder} is quantised with {method} of {given.get('bits')} bits in the layout "
                f"{layout}, and {' or '.join(map(str, bits))} bits in {' or '.join(layouts)} are "
                "decoded: choose such weights, or the model's full ones",
                code="unsupported_quantisation",
            )
    if method not in PACKAGES:
        raise DraftwellError(
            f"{folder} is quantised with {method}, which is not decoded here: choose the model's "
            "full weights, or FP8, MXFP4, GGUF, compressed-tensors, GPTQ, AWQ or bitsandbytes in "
            "4 bits",
            code="unsupported_quantisation",
        )
    if missing := [name for name in PACKAGES[method] if not _installed(name)]:
        raise DraftwellError(
            f"{folder} is quantised with {method}, which needs {' and '.join(missing)}: pip "
            f"install {' '.join(missing)}",
            code="missing_package",
        )


def _installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _header(file: Path) -> dict[str, Stored]:
    """The tensors of a safetensors file, by name; its length is checked against them."""
    try:
        with safe_open(file, framework="np") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            return {
                name: Stored(one.get_dtype(), tuple(one.get_shape()))
                for name, one in slices.items()
            }
    except (OSError, SafetensorError) as error:
        raise DraftwellError(
            f"{file} is cut off, or no safetensors file ({' '.join(str(error).split())}): fetch "
            "the model again",
            code="unreadable_model",
        ) from error


def _check_full(folder: Path, tensors: Mapping[str, Stored]) -> None:
    """Refuse packed matrices of which no configuration says how to read them."""
    for name, (dtype, shape) in tensors.items():
        if name.endswith(MATRICES) and len(shape) > 1 and dtype not in FLOATS:
            raise DraftwellError(
                f"{folder} stores {name} as {dtype}, and {CONFIG} names no quantisation that says "
                "how to read it: choose the model's full weights",
                code="unsupported_quantisation",
            )


def _check_blocks(folder: Path, tensors: Mapping[str, Stored], block: Any) -> None:
    """Refuse matrices of several FP8 blocks of which the last is not full: transformers takes all
    blocks to be of one size, and reads other weights, or none."""
    for name, (_, scales) in tensors.items():
        matrix = tensors.get(name.removesuffix("_scale_inv"))
        if matrix is None or not name.endswith("_scale_inv") or not isinstance(block, list):
            continue
        sizes = zip(matrix.shape, scales, block, strict=False)
        if any(blocks > 1 and size != blocks * wide for size, blocks, wide in sizes):
            raise DraftwellError(
                f"{folder} stores {name.removesuffix('_scale_inv')} {list(matrix.shape)} in FP8 "
                f"blocks of {block} that it does not fill, which transformers cannot turn into "
                "full weights: choose the model's full weights",
                code="unsupported_quantisation",
            )
