"""Why a process ended, by its exit code and the end of its log: one line with a code and what to
do."""

from __future__ import annotations

import re
import signal
from pathlib import Path

from draftwell.serving.errors import DraftwellError

TAIL = 20_000
"""Bytes at the end of a log that are looked through."""
OUT_OF_MEMORY = "engine_out_of_memory"
TRACEBACK = "Traceback (most recent call last)"
MISSING_MODULE = r"No module named '?[\w.]+'?|PackageNotFoundError: .*"
"""Counts in the last traceback only: libraries warn of modules that they do without."""
INSTALL = "install what is named into the engine's environment, or leave that method out"
ROOM = (
    "free memory, lower the slots, the context or VLLM_CPU_KVCACHE_SPACE (GiB), or name a smaller "
    "share of a GPU: DRAFTWELL_VLLM_MEMORY, for a bundle `--set memory=`"
)
KNOWN = {
    r"Arctic Inference is required": ("engine_plugin_missing", INSTALL),
    MISSING_MODULE: ("engine_plugin_missing", INSTALL),
    r"[Aa]ddress already in use": (
        "engine_port_taken",
        "end what listens there, or run it again: another port is chosen",
    ),
    r"Free memory on device [^\n]* is less than desired GPU memory utilization"
    r"|No available memory for the cache blocks|Available memory on node .* is less than desired"
    r"|KV cache is needed, which is larger than .*|Cannot allocate memory|can't allocate memory"
    r"|not enough memory|\bMemoryError\b|bad_alloc|OutOfMemoryError|CUDA out of memory": (
        OUT_OF_MEMORY,
        ROOM,
    ),
}
"""How libraries word a failure → its code, and what to do."""


def why_ended(label: str, log: Path, exit_code: int | None, code: str) -> DraftwellError:
    """The error for a process that ended by itself.

    Args:
        label: names it.
        log: all that it printed.
        exit_code: negative for a signal; None where it is not known.
        code: of the error, where the log names no known failure.
    """
    how = f"ended with exit code {exit_code}"
    if exit_code is not None and exit_code < 0:
        how = f"was ended by signal {-exit_code} ({signal_name(-exit_code)})"
    killed, cause = exit_code == -signal.SIGKILL, cause_in(tail_of(log))
    if killed and (cause is None or cause[0] != OUT_OF_MEMORY):
        code, how = (
            "engine_killed",
            f"{how}, as the system does where memory runs out: {ROOM}; then run the same again",
        )
    elif cause is not None:
        code, how = cause[0], f"{how} ({one_line(cause[1])}): {cause[2]}"
    else:
        how = f"{how} ({last_line(log)})"
    return DraftwellError(f"{label} {how}; see {log}", code=code)


def cause_in(text: str) -> tuple[str, str, str] | None:
    """The known failure that a log names last: its code, how it is worded there, and what to do;
    None where it names none."""
    last = text.rfind(TRACEBACK)
    found = [
        (match.start(), code, match[0], advice)
        for pattern, (code, advice) in KNOWN.items()
        for match in re.finditer(pattern, text)
        if pattern is not MISSING_MODULE or 0 <= last < match.start()
    ]
    return max(found)[1:] if found else None


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
    lines = [line for line in tail_of(log).splitlines() if line.strip()]
    return one_line(lines[-1] if lines else "nothing was printed")


def one_line(text: str, letters: int = 160) -> str:
    """The beginning of a text, as one line."""
    words = " ".join(text.split())
    return words if len(words) <= letters else words[: letters - 1] + "…"
