"""The texts in a bundle that are meant for people, shells and Docker (`templates/`)."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import jinja2

from draftwell.registry.bundles.requirements import TORCH_FILE, Lock, requirements_name
from draftwell.serving.bundle.bundle import Manifest

PYTHON_IMAGES = {
    "3.11": "python:3.11.14-slim-bookworm@sha256:"
    "65a93d69fa75478d554f4ad27c85c1e69fa184956261b4301ebaf6dbb0a3543d"
}
"""Version of Python → the image that a bundle's is made from; for others the newest of the tag."""
TEMPLATES = Path(__file__).parent / "templates"
JINJA = jinja2.Environment(
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
JINJA.filters["quoted"] = lambda value: shlex.quote(str(value))
JINJA.filters["json"] = lambda value: json.dumps(value, sort_keys=True, ensure_ascii=False)


def render(template: Path, **values: Any) -> str:
    """A template's text. Its filter `quoted` makes a word for a shell, `json` a value for YAML."""
    return JINJA.from_string(template.read_text(encoding="utf-8")).render(**values)


def install_commands(device: str, wheel: str, lock: Lock) -> list[str]:
    """The commands that install the runtime, run in the bundle's folder: PyTorch's build from its
    own index, where it has one, and then the rest, which that index is not asked for.

    Args:
        wheel: file name of the runtime's wheel in it.
        lock: its requirements; those with hashes list the wheel too.
    """
    hashed = "--require-hashes " if "torch" in lock.hashes else ""
    torch = [f"pip install --no-deps {hashed}-r {TORCH_FILE}"] if lock.index else []
    if not lock.missing:
        return [*torch, f"pip install --require-hashes -r {requirements_name(device)}"]
    return [*torch, f"pip install -r {requirements_name(device)} ./{wheel}"]


def bundle_texts(manifest: Manifest, wheel: str, lock: Lock) -> dict[str, str]:
    """Name → text of README.md, serve.sh, Dockerfile and the requirements of PyTorch's own index
    of a bundle; arguments as in `install_commands`."""
    # the one that the bundle is built with, hence the one that its requirements surely fit
    python = ".".join(map(str, sys.version_info[:2]))
    values = {
        "manifest": manifest,
        "wheel": wheel,
        "index": lock.index,
        "python": python,
        "image": PYTHON_IMAGES.get(python, f"python:{python}-slim"),
        "requirements": requirements_name(manifest.device),
        "install": install_commands(manifest.device, wheel, lock),
        "docker": docker_commands(manifest),
        "bundled": is_whole(manifest),
    }
    texts = {path.stem: render(path, **values) for path in sorted(TEMPLATES.glob("*.j2"))}
    return texts | ({TORCH_FILE: lock.torch_text} if lock.torch_text else {})


def docker_commands(manifest: Manifest) -> str:
    """Build and run the bundle's container, on this machine's own address, with the file of API
    keys that $KEYS names."""
    name = f"draftwell-{manifest.pair}".lower()
    gpus = " --gpus all" if manifest.device == "cuda" else ""
    models = "" if is_whole(manifest) else ' -v "$DRAFTWELL_MODELS:/models:ro"'
    keys = '-v "$KEYS:/keys:ro"'
    return (
        f"docker build -t {name} . && docker run --rm -p 127.0.0.1:8000:8000 {keys}{gpus}{models} "
        f"{name} --api-key-file /keys"
    )


def is_whole(manifest: Manifest) -> bool:
    """Whether all weights are in the bundle."""
    return all(record.source == "bundled" for record in manifest.models.values())
