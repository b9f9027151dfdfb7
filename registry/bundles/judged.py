"""Bundles that the gate judged: kept on this machine, so that a deployment serves exactly the bytes
that were judged.

The gate records the digest of the bundle's manifest, which covers every file, in the release's gate
record, and keeps the bundle of a release that passed, and the champion's, under
`$DRAFTWELL_HOME/judged/<pair>/<version>-<device>/`. Where that folder is missing (another machine
judged) or is of another gate run, a deployment builds the bundle again, and `deviation` says in a
line whether it differs from the judged one. The card of the tuning, which says what the verdict
was, is added after it and is no part of the comparison.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection
from pathlib import Path

from draftwell.registry.bundles.places import UNFINISHED, building, standing
from draftwell.registry.releases import ReleaseVersion, gate_record
from draftwell.serving.artifacts.pair_files import draftwell_home
from draftwell.serving.bundle.bundle import MANIFEST, BundleError, open_bundle
from draftwell.serving.bundle.card import without_card
from draftwell.serving.bundle.manifest import read_bundle_manifest
from draftwell.serving.errors import DraftwellError
from draftwell.serving.files import file_lock, put_folder, remove_folder


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
    with building(folder.parent) as place:
        copy_bundle(bundle, place)
        put_folder(place, folder)
        versions = (release.version, *others)
        for other in standing(folder.parent, release.device):
            if other.release not in versions:
                remove_folder(other.path, folder.parent / f"{UNFINISHED}{other.path.name}")
    return folder


def take_judged(release: ReleaseVersion, place: Path) -> bool:
    """Copy the bundle that the release's gate record names into an empty folder, every byte
    checked; False where this machine does not have it.

    Raises:
        DraftwellError: it was changed since it was judged.
    """
    record, folder = gate_record(release), judged_folder(release)
    if record is None or record.bundle_digest is None or not folder.is_dir():
        return False
    with file_lock(folder.parent):
        try:
            found = open_bundle(folder).manifest.digest
        except BundleError as error:
            raise DraftwellError(
                f"the bundle that the gate judged for {release.name} was changed since "
                f"({error}): run `draftwell gate --pair {release.pair} --device {release.device} "
                f"--release {release.version}` again, or remove {folder} to build it anyway",
                code="judged_bundle_changed",
            ) from error
        if found != record.bundle_digest:
            return False
        copy_bundle(folder, place)
    return True


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
    deployed = without_card(read_bundle_manifest(bundle))
    if record is None or not record.passed or record.bundle_digest in (None, deployed):
        return None
    return (
        f"{bundle} is not the bundle that the gate judged (digest {deployed[:12]}, judged "
        f"{str(record.bundle_digest)[:12]}): the "
        "judged one is not on this machine and the runtime or the options differ; "
        f"`draftwell gate --pair {release.pair} --device "
        f"{release.device} --release {release.version}` judges a bundle built here"
    )
