"""`threads` of every command: a number, or auto."""

from __future__ import annotations

import pytest

from draftwell.flows.cli.options import read_thread_count


def test_threads_are_auto_or_a_number() -> None:
    assert [read_thread_count(text) for text in ("auto", "1", "16")] == [None, 1, 16]


@pytest.mark.parametrize("text", ["0", "-2", "1.5", "all", ""])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="auto"):
        read_thread_count(text)
