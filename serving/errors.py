"""Errors that a person can act on. Each is one line that names what is wrong and how to fix it, and
carries a stable code.

The command line prints the line and exits with 2; the server answers with it. Tests and scripts
compare `code`, never the text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError


class DraftwellError(Exception):
    """A user's mistake or a refused input.

    Args:
        message: one line that names the cause and the fix.
        code: stable snake_case identifier of this mistake; default: the code of the class.

    >>> DraftwellError("no traces: run `draftwell step collect` first", code="no_traces").code
    'no_traces'
    """

    code: str = "invalid_input"

    def __init__(self, message: str, *, code: str | None = None):
        super().__init__(message)
        if code is not None:
            self.code = code


def first_wrong(error: ValidationError) -> str:
    """The first value that a model refused, where it stands and why, in one line."""
    first = error.errors(include_url=False)[0]
    place = ".".join(map(str, first["loc"]))
    return f"{place}{': ' if place else ''}{first['msg'].removeprefix('Value error, ')}"


def missing_package(
    what: str, package: str | None, extra: str, *, code: str = "missing_package"
) -> DraftwellError:
    """The error where a package is not installed.

    No index has the project, so no line may name it to pip: what an index has by that name is
    somebody else's.

    Args:
        what: what needs it, with its verb: "the server needs".
        extra: the extra of pyproject.toml that brings it.

    >>> print(missing_package("this needs", "gguf", "pipeline"))
    this needs the package gguf: in the checkout pip install -c constraints.txt -e '.[pipeline]'
    """
    bundle = ", beside a bundle pip install -r its requirements" if extra == "server" else ""
    return DraftwellError(
        f"{what} the package {package}: in the checkout pip install -c constraints.txt "
        f"-e '.[{extra}]'{bundle}",
        code=code,
    )


class InvalidRequest(DraftwellError):
    """A prompt or a sampling parameter that no model could serve."""

    code = "invalid_request"


class ContextTooLong(InvalidRequest):
    """Prompt plus requested tokens exceed what a model can read."""

    code = "context_too_long"


class VocabularyMismatch(DraftwellError):
    """Two models of a pair do not share a tokenizer."""

    code = "vocabulary_mismatch"


class NotFinite(DraftwellError):
    """A model returned NaN or infinite logits."""

    code = "not_finite"


class OutOfMemory(DraftwellError):
    """The device has no room for a forward pass or for the slots."""

    code = "out_of_memory"


class DeviceLost(DraftwellError):
    """The device has failed for good: everything that this process asks of it from now on fails
    too."""

    code = "device_lost"
