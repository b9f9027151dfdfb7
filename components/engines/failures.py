"""Why a process ended, by its exit code and the end of its log: one line with a code and what to
do."""

from __future__ import annotations

import re
import signal
from pathlib import Path

from draftwell.serving.errors import DraftwellError

LOG_BYTES = 20_000
"""Bytes at the end of a log that are looked through."""
ROOM = (
    "free memory, lower the slots, the context or VLLM_CPU_KVCACHE_SPACE (GiB), or name a smaller "
    "share of a GPU: DRAFTWELL_VLLM_MEMORY, for a bundle `--set memory=`"
)
OUT_OF_MEMORY = re.compile(
    r"Free memory on device [^\n]* is less than desired GPU memory utilization"
    r"|No available memory for the cache blocks|Available memory on node .* is less than desired"
    r"|KV cache is needed, which is larger than .*|Cannot allocate memory|can't allocate memory"
    r"|not enough memory|\bMemoryError\b|bad_alloc|OutOfMemoryError|CUDA out of memory"
)
"""How libraries word it."""
ADVICE = {
    "No module named": (
        "install what is named into the engine's environment, or leave that method out"
    ),
    "Address already in use": "end what listens there, or run it again: another port is chosen",
}
"""What to do about a last line, by words of it."""


def why_ended(label: str, log: Path, exit_code: int | None, code: str) -> DraftwellError:
    """The error for a process that ended by itself.

    Args:
        label: names it.
        log: all that it printed.
        exit_code: negative for a signal; None where it is not known.
        code: of the error, where memory was not the cause.
    """
    how = f"ended with exit code {exit_code}"
    if exit_code is not None and exit_code < 0:
        how = f"was ended by signal {-exit_code} ({signal_name(-exit_code)})"
    if found := OUT_OF_MEMORY.search(tail_of(log)):
        code, how = "engine_out_of_memory", f"{how} ({one_line(found[0])}): {ROOM}"
    elif exit_code == -signal.SIGKILL:
        code = "engine_killed"
        how += f", as the system does where memory runs out: {ROOM}; then run the same again"
    else:
        said = last_line(log)
        advice = [what for words, what in ADVICE.items() if words.lower() in said.lower()]
        how = ": ".join([f"{how} ({said})", *advice])
    return DraftwellError(f"{label} {how}; see {log}", code=code)


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
        file.seek(max(0, log.stat().st_size - LOG_BYTES))
        return file.read().decode(errors="replace")


def last_line(log: Path) -> str:
    """What a log says last: of a traceback the error."""
    lines = [line for line in tail_of(log).splitlines() if line.strip()]
    return one_line(lines[-1] if lines else "nothing was printed")


def one_line(text: str, letters: int = 160) -> str:
    """The beginning of a text, as one line."""
    words = " ".join(text.split())
    return words if len(words) <= letters else words[: letters - 1] + "…"
