"""Signing a bundle where it is deployed, with cosign, if there is one and a key is named; else one
line says that it was not."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from draftwell.registry.bundles.hashes import UNHASHED
from draftwell.serving.bundle.manifest import MANIFEST
from draftwell.serving.bundle.signature import COSIGN, SIGNATURE, run_cosign, split_flags
from draftwell.serving.errors import DraftwellError
from draftwell.serving.files import move_file

KEY, FLAGS = "DRAFTWELL_COSIGN_KEY", "DRAFTWELL_COSIGN_FLAGS"
"""Variables that name the private key (a file, or an address that cosign knows) and further options
of `cosign sign-blob`."""


def sign(bundle: Path) -> None:
    """Sign a finished bundle, where a key is named. A signature that is there may be of an old key,
    or damaged: it is replaced.

    Raises:
        DraftwellError: a key is named, but cosign is missing or refuses (`not_signed`), or the
            requirements have no hashes, so that others than the gate's packages could be installed
            under the signature (`unlocked_requirements`); the bundle is left as it was.
    """
    key = os.environ.get(KEY)
    if not key:
        return
    if shutil.which(COSIGN) is None:
        raise DraftwellError(
            f"{KEY} names a key, but cosign is not on PATH: install it, or unset the variable",
            code="not_signed",
        )
    if remark := hashes_remark(bundle):
        raise DraftwellError(
            f"{bundle} is not signed with the key of {KEY}: {remark}", code="unlocked_requirements"
        )
    made = bundle.parent / f".{bundle.name}.sigstore"
    try:
        flags = split_flags(os.environ.get(FLAGS, ""), FLAGS)
        problem = run_cosign(
            "sign-blob",
            "--yes",
            "--key",
            key,
            "--bundle",
            str(made),
            *flags,
            str(bundle / MANIFEST),
        )
        if problem is None and not made.is_file():
            problem = "it wrote no signature"
        if problem is not None:
            raise DraftwellError(
                f"cosign did not sign {bundle} ({problem}): see {KEY}, {FLAGS} and COSIGN_PASSWORD",
                code="not_signed",
            )
        made.chmod(0o644)
        move_file(made, bundle / SIGNATURE)
    finally:
        made.unlink(missing_ok=True)


def signature_remark(bundle: Path) -> str | None:
    """Why a deployed bundle has no signature, in a line; None where it has one."""
    if (bundle / SIGNATURE).is_file():
        return None
    if shutil.which(COSIGN) is None:
        return "the bundle is not signed: cosign is not on PATH"
    return f"the bundle is not signed: name a key with {KEY} (cosign generate-key-pair makes one)"


def hashes_remark(bundle: Path) -> str | None:
    """Why a deployed bundle's requirements have no hashes, in a line; None where they have."""
    for path in sorted(bundle.glob("requirements-*.txt")):
        how = "`make peers` in a new folder" if "engine" in path.name else "`make hashes`"
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.startswith(UNHASHED):
                return f"{path.name} has no hashes ({line[2:]}): {how}, then gate again"
    return None
