"""What a fake engine is tuned on, and what was tuned, judged and deployed for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from draftwell.registry.gates import GateRecord
from draftwell.registry.releases import ReleaseVersion, find_release, gate_record
from draftwell.registry.store import Store
from draftwell.serving.artifacts.engine_config import EngineConfig

WORDS = [
    "man",
    "inn",
    "onion",
    "hand",
    "end",
    "hour",
    "men",
    "one",
    "thin",
    "hen",
    "other",
    "then",
    "ten",
]


def write_requests(file: Path, words: str = "the", count: int = 42) -> Path:
    """Different completions, as a gateway records them."""
    rows = [
        {"prompt": f"{words} {one} in the {two}"} for one in WORDS for two in WORDS if one != two
    ][:count]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def short_demo(pair: Path, prompts: Path, out: Path) -> str:
    """The command of a whole loop, small enough for seconds."""
    return (
        f"tune --engine vllm --pair {pair} --prompts {prompts} --device cpu "
        f"{tokens_of(8)} --set tune_prompts=8 --set bench_prompts=8 "
        f"--set out={out} --set methods=ngram,draft_model"
    )


def tokens_of(count: int) -> str:
    """The setting for answers of so many tokens."""
    return f"--set max_tokens={count}"


def settings_of(bundle: Path) -> dict[str, Any]:
    """What a bundle was built with."""
    return dict(json.loads((bundle / "manifest.json").read_text())["settings"])


def config_folder(folder: Path, *, sampled: bool = False) -> Path:
    """Folder of the choice, from the engine's folder in a workspace."""
    return folder.parent / "artifacts" / f"engine_config{'_sampled' * sampled}"


def tuned(folder: Path, *, sampled: bool = False) -> EngineConfig:
    """What was tuned last."""
    return EngineConfig.load(config_folder(folder, sampled=sampled))


def released(alias: str | int = "candidate", device: str = "cpu-vllm") -> ReleaseVersion:
    """A release of the tiny pair."""
    return find_release(Store(), "tiny", device, alias)


def verdict(alias: str | int = "candidate", device: str = "cpu-vllm") -> GateRecord | None:
    """The last verdict about a release."""
    return gate_record(released(alias, device))
