"""Reading evidence: whose a file is, is found out by what is in it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from draftwell.components.engines.port import Message
from draftwell.components.gate.evidence_files import (
    aiperf,
    guidellm,
    llama_cpp,
    specdec_bench,
    vllm_bench,
)
from draftwell.components.gate.evidence_files.run import BenchmarkRun, bad
from draftwell.serving.errors import DraftwellError
from draftwell.serving.files import read_text, sha256_file

Reader = Callable[[list[tuple[Path, Any]]], list[BenchmarkRun]]
READERS: dict[str, Reader] = {
    vllm_bench.TOOL: vllm_bench.read_runs,
    guidellm.TOOL: guidellm.read_runs,
    aiperf.TOOL: aiperf.read_runs,
    specdec_bench.TOOL: specdec_bench.read_runs,
    llama_cpp.TOOL: llama_cpp.read_runs,
}
"""Tool → what makes runs of the documents that are its own, and none of others'."""
MOST_FILES = 100
"""Of a folder: more are not the results of one benchmark."""


class Evidence(Message):
    """What was read, and what from."""

    runs: tuple[BenchmarkRun, ...]
    digests: dict[str, str]
    """sha256 → name of the file, without its folders."""


def read_evidence(paths: Sequence[Path]) -> Evidence:
    """The runs in files, and in folders that a tool writes.

    Raises:
        DraftwellError: a path cannot be read (`unreadable_file`), a file is cut off or a value in
            it is wrong (`bad_evidence`), or it is of none of `READERS` (`unknown_evidence`).
    """
    runs: list[BenchmarkRun] = []
    digests: dict[str, str] = {}
    for path in paths:
        documents = [(file, document) for file in files_of(path) for document in documents_of(file)]
        found = [run for reader in READERS.values() for run in reader(documents)]
        if not found:
            raise DraftwellError(
                f"{path} holds no results of {', '.join(READERS)}: name what one of them saved",
                code="unknown_evidence",
            )
        runs += found
        digests |= {sha256_file(file): file.name for file, _ in documents}
    return Evidence(runs=tuple(runs), digests=digests)


def files_of(path: Path) -> list[Path]:
    """The file, or the folder's files of JSON and of lines of JSON."""
    if not path.is_dir():
        return [path]
    found = sorted(file for file in path.iterdir() if file.suffix in (".json", ".jsonl"))
    if len(found) > MOST_FILES:
        raise bad(path, f"it has more than {MOST_FILES} files: name one of them")
    return found


def documents_of(file: Path) -> list[Any]:
    """The JSON in a file, or in each of its lines."""
    try:
        text = read_text(file)
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "not UTF-8 text"
        raise DraftwellError(
            f"cannot read {file} ({why}): name a file that a benchmark's tool saved",
            code="unreadable_file",
        ) from error
    try:
        return [json.loads(text)]
    except (ValueError, RecursionError):
        pass
    try:
        return [json.loads(line) for line in text.splitlines() if line.strip()]
    except (ValueError, RecursionError) as error:
        raise bad(file, "it is neither JSON nor lines of JSON, or it was cut off") from error
