"""Model files that cannot be decoded: every command that loads a pair says so in one line, before
anything is stored but the digests of weights."""

from __future__ import annotations

import shutil
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from draftwell.serving.artifacts.pair_files import SIDECAR
from tests.support.cases import quick_only
from tests.support.loop.tiny_files import snapshot
from tests.support.models.checkpoints import Change, edit


def no_tokenizer(role: Path) -> None:
    for file in role.glob("tokenizer*"):
        file.unlink()


def stored(folder: Path) -> dict[str, int]:
    return {name: size for name, size in snapshot(folder).items() if not name.endswith(SIDECAR)}


FAULTS: dict[str, tuple[str, Change, str]] = {
    "packed": (
        "target",
        lambda role: edit(role / "config.json", quantization_config={"quant_method": "exl2"}),
        "exl2",
    ),
    "cut off": (
        "draft",
        lambda role: (role / "model.safetensors").write_bytes(b"12345678"),
        "cut off",
    ),
    "no tokenizer": ("target", no_tokenizer, "tokenizer.json"),
    "no weights": ("target", lambda role: (role / "model.safetensors").unlink(), "save_pretrained"),
}


COMMANDS = ("generate --prompt hello", "bench", "step collect", "step calibrate", "step choose")


@pytest.mark.parametrize(
    ("fault", "command"), quick_only(product(FAULTS, COMMANDS), "packed", "cut off")
)
def test_it_is_one_line_and_nothing_is_stored(
    run: Any, pair_file: Path, own_stores: Path, command: str, fault: str
) -> None:
    role, change, named = FAULTS[fault]
    folder = shutil.copytree(pair_file.parent, own_stores / "files")
    change(folder / role)
    before = stored(own_stores)
    done = run(command, f"--pair {folder / pair_file.name}")
    assert done.exit_code == 2, done.output
    assert "Traceback" not in done.output
    errors = [line for line in done.stderr.splitlines() if line.startswith("Error:")]
    assert len(errors) == 1, done.output
    assert named in errors[0]
    assert stored(own_stores) == before
