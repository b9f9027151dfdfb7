"""What every command prints when it refuses: one line, exit code 2, no traceback."""

from __future__ import annotations

from typing import Any


def line(done: Any) -> str:
    """The line behind all that was told before."""
    assert done.exit_code == 2, (done.output, done.exception)
    return str(done.stderr.strip().splitlines()[-1])


def refused(done: Any, *words: str) -> str:
    """Check a refusal: exit code 2, one line that has the words, no traceback; progress may have
    been told before it."""
    assert done.exit_code == 2, (done.output, done.exception)
    assert done.stdout == ""
    *progress, line = done.stderr.strip().splitlines()
    assert line.startswith("Error: ")
    assert not [told for told in progress if told.startswith(("Error", "Traceback", " "))]
    for word in words:
        assert word in line
    return str(line)
