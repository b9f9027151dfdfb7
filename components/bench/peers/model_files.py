"""What peers in other processes read: model folders of transformers, and a GGUF file. Written once,
under `peers_root()`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from draftwell.components.bench.peers.gguf_file import write_gguf
from draftwell.components.engines.environments import peers_root
from draftwell.serving.artifacts.eagle3_head import Eagle3Head
from draftwell.serving.files import whole_folder
from draftwell.serving.runtime.commands import Role
from draftwell.serving.runtime.pair import LoadedPair

GGUF = "model.gguf"


def model_folder(pair: LoadedPair, role: Role) -> Path:
    """The folder that a model was loaded from; one that was made in memory (a distilled draft,
    which borrows the target's embeddings) is saved first, whole."""
    module = pair.modules[role]
    folder = Path(module.name_or_path or ".").absolute()
    if (folder / "config.json").is_file():
        return folder

    def save(into: Path) -> None:
        module.save_pretrained(into)
        pair.tokenizer.save_pretrained(into)

    return made_once(f"{pair.name}-{role}-{pair.fingerprint[:12]}", save)


def head_folder(pair: LoadedPair, head: Eagle3Head) -> Path:
    """An EAGLE-3 head with the rows that it borrows of the target's output embedding."""
    rows = pair.modules["target"].get_output_embeddings().weight[head.head_tokens]
    return made_once(
        f"{pair.name}-head-{str(head.digest)[:12]}", lambda into: head.write_standalone(into, rows)
    )


def gguf_of(pair: LoadedPair) -> Path:
    """The pair's target as GGUF, in the pair's dtype (the fingerprint depends on it)."""

    def write(into: Path) -> None:
        write_gguf(pair.modules["target"], into / GGUF)

    return made_once(f"{pair.name}-gguf-{pair.fingerprint[:12]}", write) / GGUF


def made_once(name: str, make: Callable[[Path], None]) -> Path:
    """A folder under `peers_root()/models`, made complete or not at all; one that is there is
    kept."""
    folder = peers_root() / "models" / name
    if not folder.is_dir():
        with whole_folder(folder) as place:
            make(place)
    return folder
