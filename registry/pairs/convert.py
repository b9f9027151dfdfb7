"""Conversion to safetensors, done once per model: from a GGUF file, or from pickled PyTorch
weights."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path

from draftwell.serving.errors import DraftwellError, missing_package


def convert_gguf(file: Path, into: Path) -> None:
    """Write the model and tokenizer of a GGUF file as float32 safetensors.

    The object that transformers reads from GGUF refuses `save_pretrained` and keeps packed weights,
    so its state dict is copied into a fresh model. float32 because dequantised weights are not
    exact in bfloat16; a tied head is stored once.
    """
    try:
        import accelerate  # noqa: F401
        import gguf  # noqa: F401
    except ImportError as error:
        raise missing_package(f"converting {file.name} needs", error.name, "pipeline") from error
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(
        str(file.parent), gguf_file=file.name, dtype=torch.float32
    )
    state = {name: tensor.float().clone() for name, tensor in loaded.state_dict().items()}
    ours = ("quantization_config", "_name_or_path", "_model_name_or_path")
    config = LlamaConfig(
        **{key: value for key, value in loaded.config.to_dict().items() if key not in ours}
    )
    del loaded
    model = LlamaForCausalLM(config).float()
    model.load_state_dict(state)
    model.tie_weights()
    model.save_pretrained(into)
    AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name).save_pretrained(into)


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
    if len(shards) > 1:
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
