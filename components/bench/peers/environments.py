"""Which peers there are, and where `make peers` installs those that need an environment of their own."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from serving.artifacts.pair_files import draftwell_home
from serving.errors import DraftwellError

DRIVERS = {name: Path(__file__).parent / "drivers" / f"{file}.py" for name, file in
           (("vllm", "vllm_driver"), ("llama.cpp", "llama_cpp_driver"))}
"""Peers in environments of their own → the script that runs there."""
VLLM_COMMAND = Path(__file__).parent / "drivers" / "vllm_command.py"
"""The `vllm` command, for the interpreter of the peer `vllm`."""
PEERS = ("transformers", *DRIVERS)
INSTALLED = ".stamp"
"""Written by `make peers` when an environment is complete."""


def peers_root() -> Path:
    """Folder of the peers' environments: `$DRAFTWELL_PEERS`, by default `peers` in the home."""
    return Path(os.environ.get("DRAFTWELL_PEERS") or draftwell_home() / "peers").absolute()


def interpreter(name: str) -> Path:
    """The Python of a peer's environment.

    Raises:
        DraftwellError: it is not installed (`peer_not_installed`).
    """
    folder = peers_root() / name
    if not (folder / INSTALLED).is_file():
        raise DraftwellError(f"the peer {name} is not installed in {folder}: run `make peers`", code="peer_not_installed")
    return folder / "bin" / "python"


def check_peers(names: Sequence[str], *, device: str = "cpu", temperature: float = 0.0, padded: bool = False) -> None:
    """Refuse, before models are loaded, peers that could not be measured as the strategies are.

    Raises:
        DraftwellError: an unknown name (`unknown_peer`), one that is not installed, a name twice, or a bench that is not a greedy one of
            the pair as it is on the CPU (`peer_settings`).
    """
    for name in names:
        if name not in PEERS:
            raise DraftwellError(f"unknown peer {name!r}: choose from {', '.join(PEERS)}", code="unknown_peer")
        if names.count(name) > 1:
            raise DraftwellError(f"--peer {name} is named twice: leave one out", code="named_twice")
        if name in DRIVERS:
            interpreter(name)
            for wrong, what in ((device != "cpu", "on the CPU (--device cpu)"), (temperature > 0, "greedily (--temperature 0)"),
                                (padded, "on the target as it is (without --pad-target)")):
                if wrong:
                    raise DraftwellError(f"the peer {name} is measured {what} only: change that or leave out --peer {name}",
                                         code="peer_settings")
