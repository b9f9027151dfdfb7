"""Where an engine is: its URL, its key, headers and certificates. A key is read from the
environment or a file alone, so that no list of processes shows it, and no repr."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import BaseModel, Field

from draftwell.serving.errors import DraftwellError

KEY_VARIABLE = "DRAFTWELL_ENGINE_KEY"
HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
"""A token of RFC 9110."""


@dataclass(frozen=True)
class EngineAddress:
    """Where an engine is, and how it is asked.

    Args:
        url: scheme://host:port[/prefix], without a slash at the end and without /v1.
        key: sent as a bearer token; None sends none.
        headers: (name, value) pairs that are sent besides.
        ca: file of certificates that its own is checked against; None takes the usual ones.
        model: the name it serves the model by; None: the only one.
    """

    url: str
    key: str | None = field(default=None, repr=False)
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    ca: Path | None = None
    model: str | None = None


class ReachSettings(BaseModel):
    """How engines at addresses are reached."""

    engine_key_file: Path | None = Field(
        None, strict=False, description="file of their key; None takes $DRAFTWELL_ENGINE_KEY"
    )
    engine_ca: Path | None = Field(
        None, strict=False, description="file of certificates that theirs are checked by"
    )
    engine_model: str | None = Field(
        None, description="name of the model there; None: the only one"
    )
    plain: str | None = Field(
        None,
        pattern="^https?://",
        description="address of the same model without speculation",
    )

    def address(self, url: str, headers: Sequence[str] = ()) -> EngineAddress:
        """A URL with key, certificates and model."""
        return parse_address(
            url,
            key_file=self.engine_key_file,
            headers=headers,
            ca=self.engine_ca,
            model=self.engine_model,
        )


def is_address(name: str) -> bool:
    """Whether the name of an engine is a URL.

    >>> is_address("http://127.0.0.1:8000/v1"), is_address("vllm")
    (True, False)
    """
    return "://" in name


def parse_address(
    url: str,
    *,
    key_file: Path | None = None,
    headers: Sequence[str] = (),
    ca: Path | None = None,
    model: str | None = None,
) -> EngineAddress:
    """An address as options name it; the key is what `key_file` holds, else
    `DRAFTWELL_ENGINE_KEY`.

    Args:
        headers: each `NAME:VALUE`.
    Raises:
        DraftwellError: no URL of http or https with a host, a password in it, a query, a file that
            cannot be read, a key or a header that HTTP cannot carry (`bad_engine_address`).

    >>> parse_address("http://127.0.0.1:8000/v1/").url
    'http://127.0.0.1:8000'
    """
    return EngineAddress(
        base_of(url),
        key=key_of(key_file),
        headers=tuple(map(header_of, headers)),
        ca=None if ca is None else file_of(ca, "--set engine_ca=…"),
        model=model,
    )


def bad(message: str) -> DraftwellError:
    """The error of an address."""
    return DraftwellError(message, code="bad_engine_address")


def base_of(url: str) -> str:
    """A URL without /v1 and slashes at its end."""
    try:
        parts = urlsplit(url.strip())
        port = parts.port
    except ValueError as error:
        raise bad(f"the address of the engine is not a URL: {error}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise bad(f"{shown(url)!r}: write the engine's address as http://HOST:PORT")
    if parts.username is not None or parts.password is not None:
        raise bad(
            f"the address of the engine at {parts.hostname} holds a password, which lists of "
            f"processes show: leave it out, and name a key by {KEY_VARIABLE} or --set "
            f"engine_key_file=…"
        )
    if parts.query or parts.fragment:
        raise bad(f"{shown(url)!r}: leave out what follows the path, such as ? or #")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    place = host if port is None else f"{host}:{port}"
    return f"{parts.scheme}://{place}{parts.path.rstrip('/').removesuffix('/v1').rstrip('/')}"


def shown(url: str) -> str:
    """A URL as a message may show it: without a query, which may hold a key."""
    return re.split(r"[?#]", url)[0].rpartition("@")[2]


def key_of(file: Path | None) -> str | None:
    """The key in a file, else that of the environment; None where there is neither."""
    if file is None:
        key, source = os.environ.get(KEY_VARIABLE, "").strip(), KEY_VARIABLE
        if not key:
            return None
    else:
        try:
            key, source = file.read_text(encoding="utf-8").strip(), str(file)
        except (OSError, UnicodeDecodeError) as error:
            raise bad(f"the file of the engine's key cannot be read: {file}: {why(error)}") from (
                error
            )
    if not key or not key.isascii() or not key.isprintable():
        raise bad(f"{source} holds no key: write one line of printable ASCII characters")
    return key


def header_of(text: str) -> tuple[str, str]:
    """`NAME:VALUE`; a message never shows the value, which may be a secret."""
    name, colon, value = (part.strip() for part in text.partition(":"))
    if not colon or not HEADER_NAME.fullmatch(name):
        raise bad("a header of the engine is written NAME:VALUE, such as X-Team:search")
    if not value.isascii() or not value.isprintable():
        raise bad(f"the header {name} of the engine holds what HTTP cannot carry: write ASCII")
    return name, value


def file_of(path: Path, option: str) -> Path:
    """A file that is there."""
    if not path.is_file():
        raise bad(f"{option} {path}: there is no such file")
    return path


def why(error: Exception) -> str:
    """A failed read in a few words."""
    return (error.strerror if isinstance(error, OSError) else None) or "it is no text in UTF-8"
