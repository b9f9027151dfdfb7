"""Expecting an error by its stable code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from draftwell.serving.errors import DraftwellError


@contextmanager
def raises_code(
    code: str, *names: str, error: type[DraftwellError] = DraftwellError
) -> Iterator[pytest.ExceptionInfo[DraftwellError]]:
    """The block raises a `DraftwellError` with this code, whose message names every one of `names`
    (a file, a figure, a command).

    Never compare the prose: messages may be reworded, codes and the things named may not.
    """
    with pytest.raises(error) as caught:
        yield caught
    assert caught.value.code == code, (
        f"code {caught.value.code!r} instead of {code!r}: {caught.value}"
    )
    missing = [name for name in names if name not in str(caught.value)]
    assert not missing, f"{missing} not in: {caught.value}"
