"""What whoever installs a bundle has changed in it (`FREE`), kept in the bundle that follows."""

from __future__ import annotations

import json
import stat
from pathlib import Path

from registry.bundles.vllm.render import FREE, MANIFEST, rendered
from registry.bundles.vllm.settings import VllmServing
from serving.errors import DraftwellError
from serving.files import write_atomically

MADE_BY_USERS = (".env",)
"""Those of `FREE` that no bundle is rendered with."""


def keep_edits(old: Path, new: Path) -> list[str]:
    """Copy the files that a user has made or changed in a bundle into the one that follows it.

    The name of the bundle's own image, which holds its number, becomes the new one. A file that the new bundle does not have, because it
    describes no containers, is left out, and so is one that was changed there already.

    Args:
        old, new: folders of bundles.
    Returns:
        names of the files that were copied.
    Raises:
        DraftwellError: one cannot be read (`unreadable_file`); those before it were copied.
    """
    texts, fresh, image = _rendered(old), _rendered(new), _settings(new).name
    kept = []
    for name in FREE:
        try:
            data = _read(old / name)
            mine = _read(new / name)
        except OSError as error:
            raise DraftwellError(f"cannot read {error.filename} ({error.strerror}), which is to be kept in {new}: let this user read it",
                                 code="unreadable_file") from error
        wanted = mine is None if name in MADE_BY_USERS else mine is not None and mine == fresh.get(name)
        if data is None or data in (mine, texts.get(name)) or not wanted:
            continue
        data = data.replace(f"{image}:{old.name}".encode(), f"{image}:{new.name}".encode())
        write_atomically(new / name, data, mode=stat.S_IMODE((old / name).stat().st_mode))
        kept.append(name)
    return kept


def _settings(bundle: Path) -> VllmServing:
    return VllmServing.model_validate(json.loads((bundle / MANIFEST).read_bytes())["settings"])


def _rendered(bundle: Path) -> dict[str, bytes]:
    """A bundle's files as they are rendered; none for one of an earlier version, whose settings this one does not read."""
    try:
        return {name: text.encode() for name, text in rendered(_settings(bundle)).items()}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _read(file: Path) -> bytes | None:
    """A file's content; None where there is none."""
    try:
        return file.read_bytes()
    except FileNotFoundError:
        return None
