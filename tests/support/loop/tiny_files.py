"""A tiny pair on disk: two model folders with one tokenizer, and a YAML file that names them."""

from __future__ import annotations

import json
from pathlib import Path

from draftwell.flows.workspace import TURN
from tests.support.server.served_pair import tiny_pair

PROMPTS = (
    "the man in the inn",
    "an onion is in there",
    "on the other hand",
    "the end then",
    "in an hour",
    "none other",
    "ten men",
    "there the man",
    "one on one",
    "her other inn",
    "then on the",
    "a thin hen",
)


def write_pair(folder: Path, name: str = "tiny") -> Path:
    """Save the pair that the server's tests use; returns the YAML file."""
    pair = tiny_pair(1)
    for role, module in pair.modules.items():
        module.save_pretrained(folder / role)
        pair.tokenizer.save_pretrained(folder / role)
    file = folder / f"{name}.yaml"
    file.write_text(
        f"name: {name}\ndescription: two tiny models\nlicence: none\ndtype: float32\nchat: true\n"
        "target:\n  path: target\ndraft:\n  path: draft\n"
    )
    return file


def write_prompts(file: Path, count: int = len(PROMPTS)) -> Path:
    """A JSONL of prompts in both forms, `prompt` and `turns`."""
    rows = [
        {"prompt": text} if i % 2 else {"turns": [text, "and then"]}
        for i, text in enumerate(PROMPTS[:count])
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def snapshot(folder: Path) -> dict[str, int]:
    """Every file below a folder with its size, but for the lock of a workspace."""
    return {
        str(path.relative_to(folder)): path.stat().st_size
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != TURN
    }
