"""Building a bundle that vLLM serves: `make deploy ENGINE=vllm`.

Bundles are `<out>/vllm/<pair>/<number>-<device>/`, numbered in the order of their making, and
`current` beside them leads to the one that is served. A bundle is built next to its place, renamed,
and never changed afterwards; `current` moves last, or later, when the bundle was tried. The same
settings, models and files make no second one.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Callable, Mapping
from pathlib import Path

from draftwell.registry.bundles.places import (
    building,
    copy_model,
    link_current,
    set_rights,
    standing,
)
from draftwell.registry.bundles.signing import sign
from draftwell.registry.bundles.vllm.render import (
    MANIFEST,
    OWN_FILES,
    file_records,
    write_bundle,
)
from draftwell.registry.bundles.vllm.settings import VllmServing
from draftwell.registry.releases import engine_device
from draftwell.serving.errors import DraftwellError
from draftwell.serving.files import file_lock, put_folder, write_atomically

FOLDER = "vllm"
"""Between the folder of all bundles and a pair's: our own server follows `<out>/<pair>/current`,
which is for its bundles alone."""


def bundles_of(out: Path, pair: str) -> Path:
    """Folder of a pair's bundles for vLLM."""
    return out / FOLDER / pair


def build_vllm_bundle(
    out: Path,
    pair: str,
    device: str,
    settings: Callable[[int], VllmServing],
    *,
    models: Mapping[str, Path],
    files: Mapping[str, bytes],
    activate: bool = True,
) -> Path:
    """Build a bundle and let `current` lead to it.

    Args:
        out: folder of all bundles.
        settings: makes those of the bundle from its number.
        models: place in the bundle, such as `models/target` → folder with config.json and
            safetensors weights.
        files: name → content of further files.
        activate: whether `current` moves; if not, `activate_vllm_bundle` moves it later.
    Returns:
        the bundle's folder: the last one where it is the same.
    Raises:
        DraftwellError: a model's files are missing (`missing_file`), or settings refuse what they
            are made of; nothing was changed. Or it could not be signed with the key that is named:
            `current` stays.
    """
    for folder in models.values():
        if not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
            raise DraftwellError(
                (
                    f"{folder} has no config.json or no safetensors weights: fetch or export "
                    "that model again"
                ),
                code="missing_file",
            )
    settings(1)  # what they refuse is refused before anything is copied
    home = bundles_of(out, pair)
    with building(home) as place:
        for name, folder in models.items():
            copy_model(folder, place / name)
        for name, data in files.items():
            (place / name).write_bytes(data)
        final = _settle(place, home, device, settings)
        sign(final)
        if activate:
            link_current(home, final, device_of(final))
    return final


def activate_vllm_bundle(bundle: Path) -> None:
    """Let `current` lead to a bundle that was built before."""
    with file_lock(bundle.parent):
        link_current(bundle.parent, bundle, device_of(bundle))


def device_of(bundle: Path) -> str:
    """The device of the releases that a bundle is one of, as their names have it."""
    settings = json.loads((bundle / MANIFEST).read_bytes())["settings"]
    temperature = (settings.get("tuned") or {}).get("temperature", 0.0)
    return engine_device(settings["gate"]["device"], "vllm", temperature)


def keep_own_files(old: Path, new: Path) -> list[str]:
    """Copy the files that a user has put into a bundle into the one that follows it, unless they
    are there; returns their names. The name of the bundle's own image, which holds its number,
    becomes the new one."""
    names = [name for name in OWN_FILES if (old / name).exists() and not (new / name).exists()]
    try:
        settings = json.loads((new / MANIFEST).read_bytes())["settings"]
        image = VllmServing.model_validate(settings).name
        before, after = (f"{image}:{bundle.name}".encode() for bundle in (old, new))
        for name in names:
            data, mode = (old / name).read_bytes(), stat.S_IMODE((old / name).stat().st_mode)
            write_atomically(new / name, data.replace(before, after), mode=mode)
    except OSError as error:
        raise DraftwellError(
            f"cannot read {error.filename} ({error.strerror}), which is to be kept in {new}: let "
            "this user read it",
            code="unreadable_file",
        ) from error
    return names


def _settle(place: Path, home: Path, device: str, settings: Callable[[int], VllmServing]) -> Path:
    """Write what depends on the number and rename the folder to its place, unless the last bundle
    is the same; returns which it is."""
    last = max((one.release for one in standing(home, device)), default=0)
    if last:
        made, earlier = write_bundle(settings(last), place), home / f"{last}-{device}"
        if _is_whole(earlier) and (earlier / MANIFEST).read_bytes() == made.read_bytes():
            return earlier
    write_bundle(settings(last + 1), place)
    set_rights(place)
    final = home / f"{last + 1}-{device}"
    put_folder(place, final)
    return final


def _is_whole(bundle: Path) -> bool:
    """Whether every file is as the manifest has it."""
    try:
        return bool(json.loads((bundle / MANIFEST).read_text())["files"] == file_records(bundle))
    except (OSError, ValueError, KeyError, TypeError):
        return False
