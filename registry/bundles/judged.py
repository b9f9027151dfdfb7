"""Bundles that the gate judged: kept on this machine, so that a deployment serves exactly the bytes
that were judged.

The gate records the digest of the bundle's manifest, which covers every file, in the release's gate
record, and keeps the bundle of a release that passed, and the champion's, under
`$DRAFTWELL_HOME/judged/<pair>/<version>-<device>/`. Where that folder is missing (another machine
judged) or is of another gate run, a deployment builds the bundle again, and `deviation` says in a
line whether it differs from the judged one.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Collection
from pathlib import Path

from draftwell.registry.releases import ReleaseVersion, gate_record
from draftwell.serving.artifacts.pair_files import draftwell_home
from draftwell.serving.bundle.bundle import MANIFEST, BundleError, open_bundle
from draftwell.serving.errors import DraftwellError
from draftwell.serving.files import file_lock, replace_folder

UNFINISHED = ".keep."


def judged_folder(release: ReleaseVersion) -> Path:
    """Where the judged bundle of a release is kept."""
    return draftwell_home() / "judged" / release.pair / f"{release.version}-{release.device}"


def keep_judged(bundle: Path, release: ReleaseVersion, *, others: Collection[int] = ()) -> Path:
    """Keep a bundle that passed the gate; those of other releases for the same device are removed,
    `deploy` can build them again.

    Args:
        others: further versions whose bundles stay: the champion's, which a rollback may need.
    """
    folder = judged_folder(release)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with file_lock(folder.parent):
        for left in folder.parent.glob(f"{UNFINISHED}*"):  # of a gate that was killed
            shutil.rmtree(left, ignore_errors=True)
        place = Path(tempfile.mkdtemp(dir=folder.parent, prefix=UNFINISHED))
        try:
            copy_bundle(bundle, place)
            replace_folder(place, folder)
        finally:
            shutil.rmtree(place, ignore_errors=True)
        kept = {folder.name, *(f"{version}-{release.device}" for version in others)}
        for other in folder.parent.glob(f"[0-9]*-{release.device}"):
            if other.name not in kept:
                shutil.rmtree(other, ignore_errors=True)
    return folder


def take_judged(release: ReleaseVersion, place: Path) -> bool:
    """Copy the bundle that the gate judged into an empty folder; False where this machine does not
    have it.

    Raises:
        DraftwellError: it was changed since it was judged.
    """
    folder = judged_folder(release)
    if not folder.is_dir():
        return False
    with file_lock(folder.parent):
        judged = find_judged(release)
        if judged is not None:
            copy_bundle(judged, place)
    return judged is not None


def find_judged(release: ReleaseVersion) -> Path | None:
    """The bundle that the release's gate record names, every byte checked; None where this machine
    does not have it.

    Raises:
        DraftwellError: it was changed since it was judged.
    """
    record, folder = gate_record(release), judged_folder(release)
    if record is None or record.bundle_digest is None or not folder.is_dir():
        return None
    try:
        found = open_bundle(folder).manifest.digest
    except BundleError as error:
        raise DraftwellError(
            f"the bundle that the gate judged for {release.name} was changed since "
            f"({error}): run `draftwell gate --pair "
            f"{release.pair} --device {release.device} --release {release.version}` again, "
            f"or remove {folder} to build it "
            "anyway",
            code="judged_bundle_changed",
        ) from error
    return folder if found == record.bundle_digest else None


def copy_bundle(bundle: Path, place: Path) -> None:
    """Copy the files that a bundle's manifest lists, and the manifest, into an empty folder."""
    listed = json.loads((bundle / MANIFEST).read_text())["files"]
    for name in (*listed, MANIFEST):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(bundle / name, place / name)


def deviation(bundle: Path, release: ReleaseVersion) -> str | None:
    """Why a deployed bundle is not the one that the gate judged, in a line; None where it is, or
    where the record names none."""
    record = gate_record(release)
    deployed = json.loads((bundle / MANIFEST).read_text())["digest"]
    if record is None or not record.passed or record.bundle_digest in (None, deployed):
        return None
    return (
        f"{bundle} is not the bundle that the gate judged (digest {deployed[:12]}, judged "
        f"{str(record.bundle_digest)[:12]}): the "
        "judged one is not on this machine and the runtime or the options differ; "
        f"`draftwell gate --pair {release.pair} --device "
        f"{release.device} --release {release.version}` judges a bundle built here"
    )
