"""`requirements-engine.txt`: the exact versions of the environment that the gate measured an engine
in."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from draftwell.registry.bundles.hashes import recorded_hashes
from draftwell.registry.bundles.requirements import torch_index

HEAD = """\
# The environment that vLLM was measured in, package by package: pip install --no-deps -r requirements-engine.txt
"""  # noqa: E501
UNHASHED = "# Without hashes, because it is not recorded which files were installed of "
SHOWN = 3


def engine_lock(packages: Mapping[str, str], reports: Path) -> str:
    """The text of the file, with the sha256 of every package's file where all are known: pip takes
    hashes of all or of none. A build of PyTorch that PyPI has not, such as +cpu, comes with the
    index that has it.

    Args:
        packages: canonical name → version, of all that is installed in the engine's environment.
        reports: folder of pip's reports of that environment.
    """
    known = recorded_hashes(packages, reports)
    index = torch_index(packages["torch"]) if "torch" in packages else None
    head = HEAD + (f"--extra-index-url {index}\n" if index else "")
    missing = sorted(packages.keys() - known.keys())
    if not missing:
        return head + "".join(
            f"{name}=={version} --hash=sha256:{known[name]}\n"
            for name, version in sorted(packages.items())
        )
    more = f" and {len(missing) - SHOWN} more" if len(missing) > SHOWN else ""
    lines = "".join(f"{name}=={version}\n" for name, version in sorted(packages.items()))
    return f"{head}{UNHASHED}{', '.join(missing[:SHOWN])}{more}.\n{lines}"
