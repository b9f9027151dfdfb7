"""What peers in other processes read: model folders of transformers, GGUF files, and what the
libraries' own converters make of the folders. Written once, under `peers_root()`."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from draftwell.components.bench.peers.gguf_file import write_gguf, write_head_gguf
from draftwell.components.engines.environments import interpreter, peers_root
from draftwell.components.engines.failures import last_line
from draftwell.components.engines.process_group import engine_environment
from draftwell.serving.artifacts.eagle3_head import Eagle3Head
from draftwell.serving.errors import DraftwellError
from draftwell.serving.files import whole_folder
from draftwell.serving.number_format import Weights
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


def gguf_of(
    pair: LoadedPair,
    role: Role = "target",
    weights: Weights | None = None,
    *,
    vocabulary: bool = False,
) -> Path:
    """A model of the pair as GGUF.

    Args:
        vocabulary: with the target's words, where they are of byte pairs: the server needs some.
        weights: round the layers' matrices; None: they have the pair's dtype, which its fingerprint
            depends on.
    """

    kind = f"{weights or 'gguf'}{'-words' if vocabulary else ''}"

    def write(into: Path) -> None:
        words = model_folder(pair, "target") / "tokenizer.json"
        tokenizer = words if vocabulary and words.is_file() else None
        write_gguf(pair.modules[role], into / GGUF, weights=weights, tokenizer=tokenizer)

    return made_once(f"{pair.name}-{role}-{kind}-{pair.fingerprint[:12]}", write) / GGUF


def head_gguf(pair: LoadedPair, head: Eagle3Head) -> Path:
    """The pair's EAGLE-3 head as GGUF."""
    folder, words = head_folder(pair, head), model_folder(pair, "target") / "tokenizer.json"

    def write(into: Path) -> None:
        write_head_gguf(folder, head.layers, into / GGUF, words)

    return made_once(f"{folder.name}-gguf", write) / GGUF


def openvino_folder(folder: Path, name: str, weights: Weights | None = None) -> Path:
    """A model folder as optimum-intel converts it; whole weights stay float32 in the files, and are
    rounded to the dtype when they are loaded."""
    options = ["--task", "text-generation-with-past", "--weight-format", weights or "fp32"]
    # that an EAGLE-3 head's class is optimum's own is told as if it were the folder's
    command = ["-m", "optimum.commands.optimum_cli", "export", "openvino", "--trust-remote-code"]
    return converted(
        "openvino", f"{name}-{weights or 'whole'}", [*command, "-m", str(folder), *options]
    )


def onnx_folder(folder: Path, name: str, weights: Weights | None = None) -> Path:
    """A model folder as ONNX Runtime GenAI's builder converts it; whole weights become float32,
    because on CPUs it lacks operators in bfloat16."""
    command = ["-m", "onnxruntime_genai.models.builder", "-e", "cpu", "-p", weights or "fp32"]
    return converted(
        "onnxruntime", f"{name}-{weights or 'whole'}", [*command, "-i", str(folder), "-o"]
    )


def converted(peer: str, name: str, command: Sequence[str]) -> Path:
    """What a converter in a peer's environment makes in a folder, its last argument.

    Raises:
        DraftwellError: it failed (`not_converted`).
    """
    log = peers_root() / "logs" / f"{peer}-{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)

    def convert(into: Path) -> None:
        run = [str(interpreter(peer)), *command, str(into)]
        with log.open("wb") as out:
            code = subprocess.run(run, stdout=out, stderr=out, env=engine_environment(1)).returncode
        if code:
            raise DraftwellError(
                f"{peer} did not convert {name} ({last_line(log)}): see {log}", code="not_converted"
            )

    return made_once(f"{peer}-{name}", convert)


def made_once(name: str, make: Callable[[Path], None]) -> Path:
    """A folder under `peers_root()/models`, made complete or not at all; one that is there is
    kept."""
    folder = peers_root() / "models" / name
    if not folder.is_dir():
        with whole_folder(folder) as place:
            make(place)
    return folder
