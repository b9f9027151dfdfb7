"""Where bundles are: a folder of a pair's bundles, one that is being built beside them, and the
link `current` to the one that is served.

Names of bundles are `<number>-<device>`, `.<n>` behind it where a release has several. A bundle
appears by a rename and is never changed.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from draftwell.registry.webhooks_out import send_event
from draftwell.serving.files import file_lock, make_folder, write_link

UNFINISHED = ".build."
"""How names of folders begin that are still being built, or that a killed deployment left."""
NAME = re.compile(r"(\d+)-(cpu|cuda)(?:\.(\d+))?")
MODEL_FILES = (".json", ".safetensors", ".model", ".txt", ".jinja")


class Standing(NamedTuple):
    """A bundle by its name: its release, and which of the release's bundles it is."""

    release: int
    build: int
    path: Path


def standing(home: Path, device: str) -> list[Standing]:
    """A pair's bundles for a device, the oldest first; some may have been removed from among
    them."""
    found = []
    for path in home.iterdir() if home.is_dir() else ():
        name = NAME.fullmatch(path.name)
        if name and name[2] == device and path.is_dir() and not path.is_symlink():
            found.append(Standing(int(name[1]), int(name[3] or 1), path))
    return sorted(found)


@contextmanager
def building(home: Path) -> Iterator[Path]:
    """A new folder in `home` to build in, which goes unless it is renamed. One build at a time,
    others wait; what a killed one left is removed."""
    make_folder(home)
    with file_lock(home):
        for left in home.glob(f"{UNFINISHED}*"):
            shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(
            dir=home, prefix=UNFINISHED, ignore_cleanup_errors=True
        ) as place:
            yield Path(place)


def copy_model(folder: Path, into: Path) -> None:
    """Copy a model's weights, tokenizer and configuration into a new folder."""
    into.mkdir(parents=True)
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.suffix in MODEL_FILES and not path.name.startswith("."):
            shutil.copyfile(path, into / path.name)


def set_rights(place: Path) -> None:
    """The same rights whatever the user's umask: all may read, and `serve.sh` may run."""
    place.chmod(0o755)
    for path in place.rglob("*"):
        path.chmod(0o755 if path.is_dir() or path.name == "serve.sh" else 0o644)


def link_current(home: Path, bundle: Path, device: str) -> None:
    """Let `home/current` lead to a bundle in the same folder, of a release for a device; where that
    is another than before, a webhook tells."""
    link = home / "current"
    before = link.readlink().name if link.is_symlink() else None
    write_link(link, bundle.name)
    if bundle.name != before:
        send_event(
            "release.deployed",
            {
                "pair": home.name,
                "device": device,
                "bundle": bundle.name,
                "before": before,
                "folder": str(home),
            },
        )


def bundle_bytes(bundle: Path) -> int:
    """Size of a bundle's files, those of its manifest included."""
    return sum(path.stat().st_size for path in bundle.rglob("*") if path.is_file())
