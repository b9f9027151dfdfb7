"""What travels to a machine with a GPU and without a network, besides wheels: filled here, unpacked
there.

    python -m draftwell.flows.cli.gpu_kit FOLDER     # fills it for the default pair;
    `.ci/gpu-kit` calls this

A kit holds `models/<folder>/`, what is stored next to a model's weights (the tokenizer's files,
as the libraries here write them: artifacts are bound to them); `artifacts/`, the workspace's; and
`bundle/`, the one that is deployed for CUDA, without the files that the checkout has.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from draftwell.flows.cli.options import say
from draftwell.flows.workspace import Workspace
from draftwell.serving.artifacts.near_copy import is_near_copy
from draftwell.serving.artifacts.pair_files import is_artifact, models_root
from draftwell.serving.bundle.manifest import MANIFEST, read_bundle_manifest
from draftwell.serving.files import sha256_file

BESIDE_WEIGHTS = ("[!.]*.json", "*.jinja", "*.model", "*.txt")


def fill_kit(space: Workspace, kit: Path, deployed: Path) -> None:
    """Fill a kit for a pair.

    Args:
        deployed: bundle, or a link to one; one that is missing, or not for CUDA, is left out with a
            line.
    """
    for model in space.files().roles().values():
        if is_artifact(model) or is_near_copy(model):
            continue
        place = kit / "models" / model.name
        place.mkdir(parents=True, exist_ok=True)
        for file in (found for pattern in BESIDE_WEIGHTS for found in model.glob(pattern)):
            shutil.copyfile(file, place / file.name)
    for folder in sorted(space.artifacts.glob("[!.]*")):
        shutil.copytree(folder, kit / "artifacts" / folder.name, dirs_exist_ok=True)
    if not (deployed / MANIFEST).is_file() or read_bundle_manifest(deployed).device != "cuda":
        say(f"no bundle for CUDA at {deployed}: its server will not be measured")
        return
    in_checkout = {path.stat().st_size for path in shipped_files(space)}
    for name, record in read_bundle_manifest(deployed).files.items():
        if record.size not in in_checkout or find_shipped(space, record.sha256) is None:
            copy(deployed / name, kit / "bundle" / name)
    copy(deployed / MANIFEST, kit / "bundle" / MANIFEST)


def unpack_kit(space: Workspace, kit: Path) -> None:
    """Put what a kit holds where the commands look for it; the models must have been converted."""
    for folder in (kit / "models").glob("*"):
        for file in folder.iterdir():
            copy(file, models_root() / folder.name / file.name)
    for folder in (kit / "artifacts").glob("*"):
        space.begin()
        shutil.copytree(folder, space.artifacts / folder.name, dirs_exist_ok=True)
    bundle = kit / "bundle"
    if (bundle / MANIFEST).is_file():
        for name, record in json.loads((bundle / MANIFEST).read_text())["files"].items():
            shipped = find_shipped(space, record["sha256"])
            if not (bundle / name).is_file() and shipped is not None:
                copy(shipped, bundle / name)


def shipped_files(space: Workspace) -> list[Path]:
    """Weights that come with the pair's catalogue entry."""
    return sorted(space.spec.folder.rglob("*.safetensors"))


def find_shipped(space: Workspace, sha256: str) -> Path | None:
    """The file among them with a digest."""
    return next((path for path in shipped_files(space) if sha256_file(path) == sha256), None)


def copy(file: Path, to: Path) -> None:
    """Copy a file, with its rights, into a folder that may be missing."""
    to.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(file, to)


if __name__ == "__main__":
    chosen = Workspace("default", say=say, device="cuda")
    fill_kit(chosen, Path(sys.argv[1]), Path("dist") / chosen.spec.name / "current")
