"""Conversion to safetensors, done once per model: from a GGUF file, or from pickled PyTorch
weights."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

from draftwell.serving.errors import DraftwellError, missing_package


def convert_gguf(file: Path, into: Path) -> None:
    """Write the model and tokenizer of a GGUF file as float32 safetensors: dequantised weights are
    not exact in bfloat16."""
    try:
        import accelerate  # noqa: F401
        import gguf  # noqa: F401
    except ImportError as error:
        raise missing_package(f"converting {file.name} needs", error.name, "pipeline") from error
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    from draftwell.serving.runtime.model_files import check_tensors, reason_of

    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            str(file.parent),
            gguf_file=file.name,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
            ignore_mismatched_sizes=True,  # refused below, by name
            output_loading_info=True,
        )
        tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
    except Exception as error:  # of any library that reads a part of the file
        raise DraftwellError(
            f"{file} cannot be converted ({reason_of(error)}): take the model's safetensors, or a "
            "GGUF file of an architecture that transformers reads",
            code="unreadable_model",
        ) from error
    model = loaded[0]
    check_tensors(file, model.config, loaded[1])
    vars(model.config).pop("_model_name_or_path", None)
    model.save_pretrained(into)
    tokenizer.save_pretrained(into)


def convert_pickled(folder: Path, into: Path) -> None:
    """Copy a model folder whose weights are `pytorch_model*.bin`, each of them as safetensors.

    Only tensors are read (`weights_only`): no code of the file is run. One shard is in memory at a
    time.
    """
    import torch
    from safetensors.torch import save_file

    shards = sorted(folder.glob("pytorch_model*.bin"))
    if not shards:
        raise DraftwellError(
            f"{folder} holds neither safetensors nor pytorch_model*.bin: choose another revision",
            code="no_weights",
        )
    where: dict[str, str] = {}
    size = 0
    for shard in shards:
        name = shard.name.replace("pytorch_model", "model").replace(".bin", ".safetensors")
        try:
            state = torch.load(shard, map_location="cpu", weights_only=True, mmap=True)
        except pickle.UnpicklingError as error:
            raise DraftwellError(
                (
                    f"{shard} holds more than tensors and is not read: choose a revision with "
                    "safetensors"
                ),
                code="pickled_objects",
            ) from error
        tensors = {key: tensor.contiguous().clone() for key, tensor in state.items()}
        save_file(tensors, into / name, metadata={"format": "pt"})
        where |= dict.fromkeys(tensors, name)
        size += sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    if set(where.values()) != {"model.safetensors"}:
        index = {"metadata": {"total_size": size}, "weight_map": where}
        (into / "model.safetensors.index.json").write_text(
            json.dumps(index, indent=2, sort_keys=True) + "\n"
        )
    for path in sorted(folder.iterdir()):
        kept = path.suffix in (".json", ".model", ".txt", ".jinja") and not path.name.endswith(
            ".bin.index.json"
        )
        if kept and path.is_file():
            shutil.copyfile(path, into / path.name)
