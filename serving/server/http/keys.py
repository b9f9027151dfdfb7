"""API keys: where they come from, what each may do, and a file that is read again when it
changes."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import threading
from dataclasses import dataclass, field
from pathlib import Path

from draftwell.serving.errors import DraftwellError
from draftwell.serving.files import read_text

log = logging.getLogger(__name__)
security_log = logging.getLogger("draftwell.serving.security")
"""Who was refused, and what changed about who may do what: `security: event=…`, a line each."""

KEY_VARIABLE = "DRAFTWELL_API_KEY"
ANSWERS, METRICS = "answers", "metrics"
SCOPES = frozenset({ANSWERS, METRICS})
SHORT_KEY = 16
"""Keys of fewer characters are warned of: they can be guessed."""
CHECK_SECONDS = 1.0
"""Between two looks at the file."""


def tenant_named(name: bytes) -> str:
    """Under which the state and the recorded requests of a key's name are kept."""
    return hashlib.sha256(b"draftwell tenant " + name).hexdigest()[:32]


def digest_of(key: bytes) -> str:
    """What the log calls a key."""
    return hashlib.sha256(b"draftwell key " + key).hexdigest()[:8]


@dataclass(frozen=True)
class Access:
    """What the holder of a key may do.

    Args:
        scopes: some of `SCOPES`.
        name: the tenant's, which several keys may share; None: the key itself.
    """

    key: bytes = field(repr=False)
    scopes: frozenset[str] = SCOPES
    name: bytes | None = field(default=None, repr=False)

    @property
    def tenant(self) -> str:
        """See `tenant_named`."""
        return tenant_named(self.name or self.key)


class Keys:
    """A server's keys; false where it needs none.

    Those of a file follow it from `start` on, by a thread of their own: no request waits for the
    file's disk. A file that is gone, empty or wrong then changes nothing, and is logged: a server
    with keys never becomes one without.

    Raises:
        DraftwellError: as `read_file`.
    """

    def __init__(self, *known: Access, file: Path | None = None):
        self._known, self._complaint = known, ""
        self._over = threading.Event()
        self._file: Path | None = None
        self._stamp: tuple[int, ...] = ()
        if file is not None:
            self._stamp, self._known = stamp_of(file), read_file(file)
            self._file = file if file.is_file() else None  # a pipe can be read but once

    @classmethod
    def of(cls, *keys: str) -> Keys:
        """Keys that may do everything."""
        return cls(*(Access(key.encode()) for key in keys))

    def __bool__(self) -> bool:
        return bool(self._known)

    def find(self, presented: bytes) -> Access | None:
        """What a key may do; None: it is not one of these. All are compared, each in constant
        time."""
        found = None
        for access in self._known:
            if hmac.compare_digest(presented, access.key):
                found = access
        return found

    def start(self) -> None:
        """Follow the file until `close`."""
        if self._file is not None:
            threading.Thread(target=self._run, name="draftwell-keys", daemon=True).start()

    def close(self) -> None:
        """Follow it no longer."""
        self._over.set()

    def _run(self) -> None:
        while not self._over.wait(CHECK_SECONDS):
            self.follow()

    def follow(self) -> None:
        """Read the file again if it has changed."""
        file = self._file
        if file is None:
            return
        stamp = stamp_of(file)
        if stamp == self._stamp:
            self._complaint = ""
            return
        try:
            known = read_file(file)
        except Exception as error:  # whatever it is, the thread goes on to read the next one
            if str(error) != self._complaint:
                security_log.error("security: event=keys_kept: %s", error)
            self._complaint = str(error)
            return
        security_log.info(
            "security: event=keys_reloaded added=%s removed=%s",
            _digests(set(known) - set(self._known)),
            _digests(set(self._known) - set(known)),
        )
        self._known, self._stamp, self._complaint = known, stamp, ""


def _digests(changed: set[Access]) -> str:
    """A key whose scopes or name changed is both added and removed."""
    return ",".join(sorted(digest_of(access.key) for access in changed)) or "none"


def read_keys(file: Path | None = None) -> Keys:
    """Keys of a file or, without a file, of DRAFTWELL_API_KEY, which may do everything (separated
    by commas).

    Raises:
        DraftwellError: as `read_file`, or the variable holds no key (`no_keys`): a server that is
            meant to need keys must not start without one.
    """
    if file is not None:
        return Keys(file=file)
    value = os.environ.get(KEY_VARIABLE)
    if value is None:
        return Keys()
    words = [word.strip() for word in value.split(",")]
    return Keys(*_checked([Access(word.encode()) for word in words if word], KEY_VARIABLE))


def read_file(file: Path) -> tuple[Access, ...]:
    """Keys of a file: `KEY [SCOPES] [NAME]` in a line, SCOPES `answers` (the default), `metrics` or
    `answers,metrics`. Empty lines and those that begin with # are left out.

    Raises:
        DraftwellError: the file cannot be read (`unreadable_keys`), holds a line of another kind
            (`wrong_key_line`), a key twice (`duplicate_key`) or no key (`no_keys`).
    """
    try:
        lines = read_text(file).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DraftwellError(
            f"cannot read the API keys in {file} "
            f"({getattr(error, 'strerror', None) or 'not text'}): name a text file "
            "with one key per line",
            code="unreadable_keys",
        ) from error
    found: list[Access] = []
    lines_of: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        key, *more = line.split() or ["#"]
        if key.startswith("#"):
            continue
        scopes = frozenset(more[0].split(",")) if more else frozenset({ANSWERS})
        if len(more) > 2 or not scopes <= SCOPES:
            raise DraftwellError(
                f"line {number} of {file} is no API key: write the key, what it may do (answers, "
                "metrics, or answers,metrics) and a name, with a space between",
                code="wrong_key_line",
            )
        if (first := lines_of.setdefault(key, number)) != number:
            raise DraftwellError(
                f"line {number} of {file} has the API key of line {first}: write each key once, "
                "with all that it may do",
                code="duplicate_key",
            )
        found.append(Access(key.encode(), scopes, more[1].encode() if len(more) > 1 else None))
    return _checked(found, str(file))


def _checked(found: list[Access], source: str) -> tuple[Access, ...]:
    if not found:
        raise DraftwellError(
            f"{source} holds no API key: add one, or leave it out to serve without keys",
            code="no_keys",
        )
    if short := sum(len(access.key) < SHORT_KEY for access in found):
        log.warning(
            "%d API keys in %s have fewer than %d characters and can be guessed",
            short,
            source,
            SHORT_KEY,
        )
    return tuple(found)


def stamp_of(file: Path) -> tuple[int, ...]:
    """What changes with the file; empty: it is not there."""
    try:
        found = file.stat()
    except OSError:
        return ()
    # a new mode changes the last alone
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
