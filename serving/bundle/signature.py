"""A bundle's signature: who built it. Digests say that nothing was changed by accident; a signature
says it of intent, too.

`cosign` signs `manifest.json`, which has the sha256 of every other file, and keeps signature and
proof in one file beside it. That file is the only one in a bundle that the manifest does not list,
as it comes after it.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from draftwell.serving.bundle.manifest import MANIFEST, BundleError

SIGNATURE = f"{MANIFEST}.sigstore.json"
COSIGN = "cosign"
SECONDS = 120.0


def signature_check(key: str, flags: str) -> Callable[[Path, bytes], None]:
    """`check_signature` with a key and with options as a user has typed them, for what opens
    bundles."""
    return partial(check_signature, key=key, flags=split_flags(flags, "--signature-flags"))


def check_signature(bundle: Path, manifest: bytes, key: str, flags: Sequence[str] = ()) -> None:
    """Refuse a bundle that was not signed with a key, before anything of it is parsed.

    Args:
        bundle: the folder.
        manifest: what its manifest holds. cosign gets these bytes, not the file, which may be
            exchanged before it is read again.
        key: the public key: a file, or an address that cosign knows (a key management service).
        flags: further options of `cosign verify-blob`, such as `--insecure-ignore-tlog` where no
            transparency log was used.
    Raises:
        BundleError: there is no signature (`unsigned_bundle`), it does not fit (`wrong_signature`),
            or cosign is not on PATH (`no_cosign`).
    """
    if not (bundle / SIGNATURE).is_file():
        raise BundleError(
            f"the bundle {bundle} has no signature ({SIGNATURE}): sign it where it is "
            "deployed (DRAFTWELL_COSIGN_KEY), or "
            "leave --signature-key out",
            code="unsigned_bundle",
        )
    if shutil.which(COSIGN) is None:
        raise BundleError(
            (
                f"the signature of {bundle} cannot be checked, cosign is not on PATH: install "
                "it, or leave --signature-key out"
            ),
            code="no_cosign",
        )
    problem = run_cosign(
        "verify-blob",
        "--key",
        key,
        "--bundle",
        str(bundle / SIGNATURE),
        *flags,
        "-",
        stdin=manifest,
    )
    if problem is not None:
        raise BundleError(
            (
                f"the signature of {bundle} does not fit the key {key} ({problem}): deploy "
                "again with its private key"
            ),
            code="wrong_signature",
        )


def split_flags(text: str, name: str) -> list[str]:
    """Options of cosign, as a shell splits them.

    Args:
        name: of what holds them, for the error.
    Raises:
        BundleError: a quote is open (`bad_value`).
    """
    try:
        return shlex.split(text)
    except ValueError as error:
        raise BundleError(
            f"{name}: {text!r} cannot be split into options ({error}): close the quote",
            code="bad_value",
        ) from error


def run_cosign(*words: str, stdin: bytes = b"") -> str | None:
    """Run cosign; the last line of what it said where it failed, None where it succeeded. It may
    ask nothing; the file `-` is its input."""
    try:
        done = subprocess.run(
            [COSIGN, *words],
            capture_output=True,
            input=stdin,
            timeout=SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no answer after {SECONDS:.0f} s"
    except OSError as error:
        return str(error)
    if done.returncode == 0:
        return None
    said = (done.stderr or done.stdout).decode(errors="replace").strip()
    return (said.splitlines() or ["no reason given"])[-1]
