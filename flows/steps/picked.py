"""What a person marked in MLflow is what the next tuning and the next release use.

A mark is the alias `picked` on a version of `<kind>.<pair>`. It counts until the person takes it
away, also after the workspace has got a newer artifact of that kind.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from draftwell.flows.context import pictures_of
from draftwell.flows.workspace import Workspace
from draftwell.registry.composing import marked_versions
from draftwell.registry.connection import registry_exists
from draftwell.registry.store import Store
from draftwell.serving.artifacts.base import ArtifactError, digest_of
from draftwell.serving.artifacts.kinds import OURS, find_kind
from draftwell.serving.artifacts.pair_files import fingerprint
from draftwell.serving.errors import DraftwellError
from draftwell.serving.runtime.strategies import STRATEGIES

if TYPE_CHECKING:
    from draftwell.registry.store import Published

OUT_OF_REACH = ("registry_unreachable", "registry_refused", "registry_failed", "mlflow_missing")
"""Codes of a registry that cannot be asked: a tuning does without it."""


def take_marked(space: Workspace, device: str, kinds: Iterable[str] = OURS) -> dict[str, Published]:
    """Put the versions that a person marked into the workspace, each with a line; what they replace
    there is registered first.

    Args:
        device: that they are used on.
        kinds: those that are looked at.
    Returns:
        kind → version of every mark among the kinds, taken now or earlier.
    Raises:
        DraftwellError: one is of other models, another number format (`picked_does_not_fit`) or
            another device (`made_on_other_device`), or a draft that is not the pair's
            (`draft_is_part_of_the_pair`): nothing was taken.
    """
    if not registry_exists():
        return {}

    try:
        store = Store()
        marked = marked_versions(store, space.spec.name, device, kinds)
    except DraftwellError as error:
        if error.code not in OUT_OF_REACH:
            raise
        space.say(f"without what is marked in MLflow: {error}")
        return {}
    for version in marked.values():
        _refuse_unfit(space, version)
    for kind, version in marked.items():
        if kind != "distilled_draft":
            take(space, store, version, space.folder(kind, device))
    return marked


def say_if_only_lossy(space: Workspace, marked: Mapping[str, Published]) -> None:
    """A line for every marked version that lossy strategies alone read, for a tuning that leaves
    those out."""

    for kind, version in marked.items():
        readers = [name for name, strategy in STRATEGIES.items() if kind in strategy.reads()]
        if readers and not any(STRATEGIES[name].lossless for name in readers):
            space.say(
                f"{version.name} version {version.version} changes nothing here: only "
                f"{' and '.join(readers)} would read it, which is lossy: tune with --set "
                f"lossless_only=false"
            )


def take(space: Workspace, store: Store, version: Published, folder: Path) -> None:
    """Let a workspace's folder hold a version, with a line; what it replaces is registered."""
    what = f"using {version.name} version {version.version}, marked in MLflow"
    if (here := _digest(folder)) == version.digest:
        space.say(what)
        return
    if here is not None:
        publish_once(space, store, version.kind, folder)
    space.begin()
    store.download(version, folder)
    space.say(
        f"{what}, instead of the workspace's own {version.kind}: take the alias away there to use "
        "others again"
    )


def publish_once(space: Workspace, store: Store, kind: str, folder: Path) -> Published:
    """The version of a folder's artifact; one that is registered keeps its figures and pictures."""
    pair, digest = space.spec.name, digest_of(folder)
    for version in store.versions(kind, pair):
        if version.digest == digest:
            return version
    return store.publish(folder, pair=pair, plots=pictures_of(space, kind))


def _digest(folder: Path) -> str | None:
    """Digest of what a folder holds; None where that is nothing that can be read."""
    try:
        return digest_of(folder)
    except ArtifactError:
        return None


def _refuse_unfit(space: Workspace, version: Published) -> None:
    """Refuse a version that was made for other models or another number format."""
    files = space.files()
    name = f"{version.name} version {version.version}, marked in MLflow,"
    if not find_kind(version.kind).fingerprinted:
        if files.draft is None or _digest(files.draft) != version.digest:
            raise DraftwellError(
                f"{name} is not the draft of {space.spec.name}: name it in the pair's YAML file, "
                "or take the alias away",
                code="draft_is_part_of_the_pair",
            )
        return
    own = fingerprint(files, space.dtype)
    if version.fingerprint != own:
        raise DraftwellError(
            f"{name} was made for models or a number format with fingerprint "
            f"{version.fingerprint[:12]}, not {own[:12]}: mark another version, or take the alias "
            "away",
            code="picked_does_not_fit",
        )
