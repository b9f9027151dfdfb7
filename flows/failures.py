"""What became of a step that failed: worth another try, a full disk, or a mistake that only a
person can fix."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from draftwell.registry.access import hidden
from draftwell.serving.artifacts.pair_files import draftwell_home
from draftwell.serving.errors import DraftwellError

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
WORDS_OF_FULL = ("no space left on device", "disk quota exceeded", "file too large", "disk is full")
"""How safetensors, SQLite and others say it, who hide the number."""
FIRST_ANSWER = 5.0
"""Seconds that Prefect may take to say which version it is."""
MISTAKES = (
    DraftwellError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    NameError,
    TypeError,
    ValueError,
)
"""What would happen again in the same way."""


class DiskFull(DraftwellError):
    """There was no room for a file; whatever was finished before is kept, and nothing half-written
    is read."""

    code = "disk_full"


@contextmanager
def disk_full_as_error() -> Iterator[None]:
    """Turn what any library raises for lack of room into one line that says where and what to do.

    Raises:
        DiskFull: a write found no room. Other errors pass as they are, including those that are one
            line already.
    """
    try:
        yield
    except DraftwellError:
        raise
    except Exception as error:
        if not is_full(error):
            raise
        raise DiskFull(
            f"no room left to write ({where(error)}): free some space or raise the quota, "
            "then run the same again; what was "
            "finished is kept, and it resumes there"
        ) from error


def chain(error: BaseException) -> Iterator[BaseException]:
    """An error, what it came from, and so on."""
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or seen.__context__


def is_full(error: BaseException) -> bool:
    """Whether an error, or one that it came from, says that a disk, a quota or a limit on files is
    full."""
    return any(
        (isinstance(each, OSError) and each.errno in FULL)
        or any(words in str(each).lower() for words in WORDS_OF_FULL)
        for each in chain(error)
    )


def where(error: BaseException) -> str:
    """The file that found no room, else the folder of all state with what is free there."""
    if isinstance(error, OSError) and error.filename:
        return str(error.filename)
    import shutil

    home = draftwell_home()
    try:
        return f"{home}, {shutil.disk_usage(home).free / 1e6:.1f} MB free"
    except OSError:
        return str(home)


def worth_retrying(task: Any, task_run: Any, state: Any) -> bool:
    """Whether Prefect may retry a failed task: not where a person must fix something first.

    A server or database that does not answer is worth waiting for, however its library words the
    error. (A plain function: Prefect takes any other callable for "never".)
    """
    from prefect.task_engine import TaskRunTimeoutError

    error = state.data
    if not isinstance(error, BaseException):
        return True
    # what hung for hours would hang again
    if is_full(error) or isinstance(error, TaskRunTimeoutError):
        return False
    return will_pass(error) or not isinstance(error, MISTAKES)


def will_pass(error: BaseException) -> bool:
    """Whether an error came from what may be well again in a minute: a connection, or a database
    that is locked or away."""
    from httpx import TransportError
    from requests import RequestException
    from sqlalchemy.exc import OperationalError

    passing = (ConnectionError, TimeoutError, RequestException, TransportError, OperationalError)
    return any(isinstance(each, passing) for each in chain(error))


def check_prefect() -> None:
    """Refuse, within seconds, an address in PREFECT_API_URL behind which no API of Prefect answers:
    a page, another service, or one that only leads on to it. What does not answer at all, or asks
    for a password, is left to Prefect.

    Raises:
        DraftwellError: with the address that is expected (`not_prefect`).
    """
    import httpx
    from prefect.settings import PREFECT_API_URL

    address = (PREFECT_API_URL.value() or "").rstrip("/")
    if not address or "api.prefect.cloud" in address:  # which has other questions
        return
    try:
        answer = httpx.get(f"{address}/admin/version", timeout=FIRST_ANSWER)
        if answer.status_code in (401, 403):
            return
        version = answer.json() if answer.is_success else None
        said = f"answers with status {answer.status_code}"
    except ValueError:
        version, said = None, "answers with a page"
    except (httpx.TimeoutException, httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
        version, said = None, f"does not answer ({type(error).__name__})"
    except httpx.TransportError:
        return
    if not isinstance(version, str):
        raise DraftwellError(
            f"PREFECT_API_URL={hidden(address)} {said}, not as Prefect's API does: name the "
            "address of `prefect server start` with /api at its end, such as "
            "http://127.0.0.1:4200/api",
            code="not_prefect",
        )


@contextmanager
def reaching_prefect() -> Iterator[None]:
    """Turn a Prefect server that does not answer, or refuses the request, into one line that names
    it."""
    import httpx

    check_prefect()
    try:
        yield
    except (RuntimeError, httpx.HTTPError) as error:
        if isinstance(error, RuntimeError) and "Failed to reach API" not in str(error):
            raise
        from prefect.settings import PREFECT_API_URL

        place = hidden(PREFECT_API_URL.value() or "this machine's own address")
        raise DraftwellError(
            f"Prefect's server at {place} does not answer: start it, check PREFECT_API_URL "
            "and PREFECT_API_AUTH_STRING, "
            "or unset PREFECT_API_URL to run without a server of your own",
            code="no_prefect_server",
        ) from error
