"""What became of an engine's process, by its exit code and the end of its log: one line with a code
and what to do."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import NamedTuple

from draftwell.serving.errors import DraftwellError

TAIL = 20_000
"""Bytes at the end of a log that are looked through."""
OUT_OF_MEMORY = "engine_out_of_memory"


class Known(NamedTuple):
    """A failure that libraries word in their own way."""

    pattern: str
    code: str
    advice: str
    traceback: bool = False
    """Whether it counts in the last traceback only: libraries warn of modules that they do
    without."""


INSTALL = "install what is named into the engine's environment, or leave that method out"
TRACEBACK = "Traceback (most recent call last)"
KNOWN = (
    Known(r"Arctic Inference is required", "engine_plugin_missing", INSTALL),
    Known(
        r"No module named '?[\w.]+'?|PackageNotFoundError: .*",
        "engine_plugin_missing",
        INSTALL,
        traceback=True,
    ),
    Known(
        r"[Aa]ddress already in use",
        "engine_port_taken",
        "end what listens there, or run it again: another port is chosen",
    ),
    Known(
        r"Free memory on device [^\n]* is less than desired GPU memory utilization",
        OUT_OF_MEMORY,
        (
            "end what else is on the GPU, or name a smaller share of its memory: "
            "DRAFTWELL_VLLM_MEMORY, for a bundle `--set memory=`"
        ),
    ),
    Known(
        r"No available memory for the cache blocks|Available memory on node .* is less than desired"
        r"|KV cache is needed, which is larger than .*|Cannot allocate memory"
        r"|can't allocate memory|not enough "
        r"memory|\bMemoryError\b|bad_alloc|OutOfMemoryError|CUDA out of memory",
        OUT_OF_MEMORY,
        (
            "lower the slots, the context or VLLM_CPU_KVCACHE_SPACE (GiB), or free memory; a "
            "GPU's share is DRAFTWELL_VLLM_MEMORY"
        ),
    ),
)


def why_ended(label: str, log: Path, code: int | None) -> DraftwellError:
    """The error for an engine that ended by itself.

    Args:
        label: of the engine.
        log: all that it printed.
        code: its exit code, negative for a signal; None where it is not known.
    """
    how = (
        f"was ended by signal {-code} ({signal_name(-code)})"
        if code is not None and code < 0
        else f"ended with exit code {code}"
    )
    cause = cause_in(tail_of(log))
    killed = code == -signal.SIGKILL
    if cause is not None and (not killed or cause[0].code == OUT_OF_MEMORY):
        return DraftwellError(
            f"{label} {how} ({one_line(cause[1])}): {cause[0].advice}; see {log}",
            code=cause[0].code,
        )
    if killed:
        return DraftwellError(
            f"{label} {how}, as the system does where memory runs out: lower the slots, "
            "the context or "
            f"VLLM_CPU_KVCACHE_SPACE (GiB), or free memory, then run the same again; see {log}",
            code="engine_killed",
        )
    return DraftwellError(
        f"{label} {how} ({last_line(log)}): see {log}, or leave it out", code="engine_failed"
    )


def cause_in(text: str) -> tuple[Known, str] | None:
    """The known failure that a log names last, and how it is worded there; None where it names
    none."""
    last = text.rfind(TRACEBACK)
    found = [
        (match.start(), known, match[0])
        for known in KNOWN
        for match in re.finditer(known.pattern, text)
        if not known.traceback or 0 <= last < match.start()
    ]
    return max(found, key=lambda one: one[0])[1:] if found else None


def signal_name(number: int) -> str:
    """SIGKILL for 9.

    >>> signal_name(9)
    'SIGKILL'
    """
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"


def tail_of(log: Path) -> str:
    """The end of a log."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - TAIL))
        return file.read().decode(errors="replace")


def last_line(log: Path) -> str:
    """What a log says last: of a traceback the error."""
    lines = tail_of(log).splitlines()
    return one_line(next((line for line in reversed(lines) if line.strip()), "nothing was printed"))


def one_line(text: str, letters: int = 160) -> str:
    """The beginning of a text, as one line."""
    words = " ".join(text.split())
    return words if len(words) <= letters else words[: letters - 1] + "…"
