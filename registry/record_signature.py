"""Signatures of gate records: whoever may write to MLflow can write a record, and only whoever has
the private key can sign one. Without keys nothing is signed or checked."""

from __future__ import annotations

import os
import tempfile
from functools import lru_cache
from pathlib import Path

from draftwell.serving.bundle.signature import run_cosign, split_flags
from draftwell.serving.errors import DraftwellError

PRIVATE, PUBLIC = "DRAFTWELL_COSIGN_KEY", "DRAFTWELL_COSIGN_PUBLIC"
"""Variables that name the private key and the public one; cosign's further options stand in
`DRAFTWELL_COSIGN_FLAGS` and `DRAFTWELL_COSIGN_PUBLIC_FLAGS`."""
FLAGS, PUBLIC_FLAGS = "DRAFTWELL_COSIGN_FLAGS", f"{PUBLIC}_FLAGS"


def sign_record(text: str) -> str | None:
    """The signature of a record; None where no private key is named.

    Raises:
        DraftwellError: cosign is missing or refuses (`not_signed`).
    """
    key = os.environ.get(PRIVATE)
    if not key:
        return None
    with tempfile.TemporaryDirectory() as place:
        made = Path(place) / "signature"
        problem = _cosign(text, made, "sign-blob", "--yes", "--key", key, flags=FLAGS)
        if problem is None and not made.is_file():
            problem = "it wrote no signature"
        if problem is not None:
            raise DraftwellError(
                f"cosign did not sign the gate record ({problem}): see {PRIVATE}, {FLAGS} and "
                "COSIGN_PASSWORD",
                code="not_signed",
            )
        return made.read_text()


def check_record(text: str, signature: str | None, name: str) -> None:
    """Refuse a record that was not signed with the key that `DRAFTWELL_COSIGN_PUBLIC` names, if it
    names one.

    Args:
        name: of the release, for the error.
    Raises:
        DraftwellError: it has no signature, or another key's (`gate_record_unsigned`).
    """
    if key := os.environ.get(PUBLIC):
        _check(text, signature, name, key)


@lru_cache(maxsize=256)  # what is refused is not kept
def _check(text: str, signature: str | None, name: str, key: str) -> None:
    problem: str | None = "it has no signature"
    if signature is not None:
        with tempfile.TemporaryDirectory() as place:
            kept = Path(place) / "signature"
            kept.write_text(signature)
            problem = _cosign(text, kept, "verify-blob", "--key", key, flags=PUBLIC_FLAGS)
    if problem is not None:
        raise DraftwellError(
            f"the gate record of {name} is not signed with {key} ({problem}): gate it again where "
            f"the private key is ({PRIVATE})",
            code="gate_record_unsigned",
        )


def _cosign(text: str, signature: Path, *words: str, flags: str) -> str | None:
    """Run cosign on a record; why it failed, or None."""
    file = signature.with_name("record.json")
    file.write_text(text)
    more = split_flags(os.environ.get(flags, ""), flags)
    return run_cosign(*words, "--bundle", str(signature), *more, str(file))
