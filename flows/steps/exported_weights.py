"""Weights that are written for other engines, a draft's or a head's, with what was measured of
them beside them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from draftwell.components.export.checkpoint import save_draft, save_head
from draftwell.components.export.measured import profile_from
from draftwell.components.export.profile import SpeculationProfile, unmeasured, write_profile
from draftwell.flows.workspace import Say, Workspace
from draftwell.registry.pairs import fetch
from draftwell.registry.store import Store
from draftwell.serving.artifacts.base import MANIFEST
from draftwell.serving.artifacts.eagle3_head import Eagle3Head
from draftwell.serving.artifacts.pair_files import fingerprint
from draftwell.serving.errors import DraftwellError
from draftwell.serving.number_format import FORMATS, dtype_of

if TYPE_CHECKING:
    from draftwell.registry.pairs import PairSpec
    from draftwell.registry.releases import ReleaseVersion
    from draftwell.serving.artifacts.pair_files import PairFiles


def pinned(release: ReleaseVersion, kind: str, place: Path) -> Path:
    """An artifact that a release pins, downloaded into a folder.

    Raises:
        DraftwellError: it pins none.
    """
    if kind not in release.pins:
        raise DraftwellError(
            f"{release.name} pins no {kind}: run `draftwell step choose` and release that",
            code=f"no_{kind}",
        )
    store = Store()
    return store.download(store.resolve(kind, release.pair, release.pins[kind]), place / kind)


class Known(NamedTuple):
    """What goes beside exported weights, as `speculation_profile.json`.

    Args:
        measured: a file of a bench; None: nothing was measured, which the profile says.
        target: its name for the engine.
    """

    method: str
    measured: Path | None
    target: str

    def profile(self, folder: Path, digest: str) -> SpeculationProfile:
        """The profile of what is written into `folder`.

        Args:
            digest: of the head, or the fingerprint of both models.
        Raises:
            DraftwellError: something else was measured (`measured_another`), or as `profile_from`.
        """
        about = {
            "draft_checkpoint": {"id": folder.name, "digest": digest},
            # a path of this machine says nothing elsewhere
            "target_model": {"id": "/".join(Path(self.target).parts[-2:])},
        }
        if self.measured is None:
            return unmeasured(self.method, **about)
        profile, drafter = profile_from(self.measured, self.method, **about)
        if drafter is not None and not digest.startswith(drafter.rpartition("-")[2]):
            raise DraftwellError(
                f"{self.measured} has figures of another {self.method} ({drafter[-12:]}) than the "
                f"one that is exported ({digest[:12]}): bench this one, with the same dtype",
                code="measured_another",
            )
        return profile


def write_draft(
    spec: PairSpec,
    folder: Path,
    release: ReleaseVersion | None,
    place: Path,
    known: Known,
    say: Say,
) -> None:
    """Save a distilled draft as a folder of complete weights: the one that the release pins, or the
    pair's own without a release."""
    if not pins_draft(release) and (spec.draft is None or spec.draft.artifact is None):
        raise DraftwellError(
            (
                f"the draft of {spec.name} is not distilled: other engines read it as it is, "
                "leave save_draft out"
            ),
            code="draft_not_distilled",
        )
    files: PairFiles = fetch(spec, progress=say)
    dtype: str = spec.number_format
    if release is not None:
        files, dtype = released_files(files, release, place)
    assert files.draft is not None
    profile = known.profile(folder, fingerprint(files, dtype))
    save_draft(files.target, files.draft, folder, dtype_of(dtype))
    write_profile(folder, profile)
    say(
        f"saved the draft to {folder}; other engines let it propose every token, Draftwell "
        "only those that its head was distilled for"
    )


def write_head(
    pair: str, folder: Path, release: ReleaseVersion | None, place: Path, known: Known, say: Say
) -> None:
    """Save an EAGLE-3 head as a folder that other engines load: the one that the release pins, else
    the workspace's or the shipped one."""
    space = Workspace(pair, None, say)
    found: Path | None = space.folder("eagle3_head")
    if release is not None and "eagle3_head" in release.pins:
        found = pinned(release, "eagle3_head", place)
    elif not (space.folder("eagle3_head") / MANIFEST).is_file():
        found = space.shipped_folder("eagle3_head")
    if found is None:
        raise DraftwellError(
            (
                f"pair {space.spec.name} has no EAGLE-3 head: run `draftwell step train --kind "
                f"eagle3_head --pair {pair}`"
            ),
            code="artifact_missing",
        )
    head = Eagle3Head.load(found)
    profile = known.profile(folder, str(head.digest))
    save_head(space.files().target, head, folder)
    write_profile(folder, profile)
    say(f"saved the head to {folder}")


def released_files(files: PairFiles, release: ReleaseVersion, place: Path) -> tuple[PairFiles, str]:
    """The models that a release was made for, its pinned draft downloaded into `place`, and their
    dtype.

    Raises:
        DraftwellError: the models here are different ones.
    """
    if pins_draft(release):
        files = replace(files, draft=pinned(release, "distilled_draft", place))
    for dtype in FORMATS:
        if fingerprint(files, dtype) == release.fingerprint:
            return files, dtype
    raise DraftwellError(
        f"{release.name} was made for other models (fingerprint "
        f"{release.fingerprint[:12]}) than those of pair "
        f"{release.pair} here: fetch the weights it names, or calibrate and release it again",
        code="other_models",
    )


def pins_draft(release: ReleaseVersion | None) -> bool:
    """Whether a release pins a distilled draft."""
    return release is not None and "distilled_draft" in release.pins
