"""Versions that a person picked, and the release that is composed of them.

A person picks a version by its number (`--pin`), or marks it in MLflow's UI with the alias
`picked`; `picked-cuda` marks one for a device alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from draftwell.registry.releases import ReleaseVersion, common_fingerprint, find_release
from draftwell.registry.store import Published, Store
from draftwell.serving.artifacts.kinds import KINDS, OURS, refuse_other_device
from draftwell.serving.errors import DraftwellError

PICKED = "picked"
"""Alias by which a person marks, in MLflow's UI, the version of a kind that is to be used."""


@dataclass(frozen=True)
class Composition:
    """The versions of a release that is to be made.

    Args:
        versions: kind → version.
        picked: kinds that the person named or marked; the others are the champion's, or the newest.
        champion: the release that the others were taken from; None where there is none.
    """

    versions: dict[str, Published]
    picked: tuple[str, ...]
    champion: ReleaseVersion | None

    def origin(self, kind: str) -> str:
        """Where the version of a kind came from, for a person."""
        if kind in self.picked:
            return "picked"
        return "the newest" if self.champion is None else f"champion ({self.champion.name})"


def parse_pins(words: Iterable[str]) -> dict[str, str]:
    """`kind=version` strings, each version a number or an alias.

    Raises:
        DraftwellError: another form, an unknown kind, or one named twice.

    >>> parse_pins(["verifier=3", "acceptance_table=champion"])
    {'verifier': '3', 'acceptance_table': 'champion'}
    """
    pins: dict[str, str] = {}
    for word in words:
        kind, equals, version = (part.strip() for part in word.partition("="))
        if not equals or not kind or not version:
            raise DraftwellError(
                f"--pin {word!r} is not kind=version, for example --pin verifier=3", code="bad_pin"
            )
        if kind not in KINDS:
            raise DraftwellError(
                (
                    f"--pin {word}: there are no artifacts of kind {kind}: choose one of "
                    f"{', '.join(KINDS)}"
                ),
                code="unknown_artifact_kind",
            )
        if kind in pins:
            raise DraftwellError(
                f"--pin names {kind} twice ({pins[kind]} and {version}): name one version",
                code="bad_pin",
            )
        pins[kind] = version
    return pins


def marked_versions(
    store: Store, pair: str, device: str, kinds: Iterable[str] = OURS
) -> dict[str, Published]:
    """kind → the version that a person marked with the alias `picked`, of those kinds.

    Raises:
        DraftwellError: one was made on another device (`made_on_other_device`).
    """
    marked: dict[str, Published] = {}
    for kind in kinds:
        aliases = store.get_aliases(kind, pair)
        number = aliases.get(f"{PICKED}-{device}", aliases.get(PICKED))
        if number is None:
            continue
        version = marked[kind] = store.resolve(kind, pair, number)
        made_on = version.tags.get("device_class")
        refuse_other_device(kind, made_on, device, f"{name_of(version)}, marked `{PICKED}`,")
    return marked


def name_of(version: Published) -> str:
    """A version's name for a person."""
    return f"{version.name} version {version.version}"


def compose(store: Store, pair: str, device: str, pins: Mapping[str, str]) -> Composition:
    """The versions of a release with these pins and those that a person marked; every other kind
    comes from the champion, else it is the newest that fits.

    Raises:
        DraftwellError: nothing was pinned or marked, there is no such version, it was made for
            other models or another dtype than the rest, it is a draft that the rest was not made
            with, or no tuned config is among them.
    """
    picked = marked_versions(store, pair, device) | {
        kind: store.resolve(kind, pair, _alias_here(store, kind, pair, device, version))
        for kind, version in pins.items()
    }
    if not picked:
        raise DraftwellError(
            "name at least one version to release, for example --pin verifier=3, or mark one in "
            f"MLflow with the alias {PICKED}",
            code="nothing_picked",
        )
    number = store.get_aliases("release", f"{pair}.{device}").get("champion")
    champion = None if number is None else find_release(store, pair, device, number)
    if champion is not None:
        others = {
            kind: store.resolve(kind, pair, version)
            for kind, version in champion.pins.items()
            if kind not in picked
        }
    else:
        others = _newest(store, pair, device, picked)
    versions = dict(sorted({**others, **picked}.items()))
    _refuse_lone_draft(picked, champion)
    common_fingerprint(versions)
    if "decoding_config" not in versions:
        raise DraftwellError(
            f"no tuned config of {pair} on {device} fits these versions: run `draftwell "
            f"step choose --pair {pair} --device "
            f"{device}` first, or pin one with --pin decoding_config=N",
            code="nothing_to_release",
        )
    return Composition(versions, tuple(picked), champion)


def _alias_here(store: Store, kind: str, pair: str, device: str, version: str) -> str:
    """The alias of what a release for this device pins: `champion` is `champion-cpu` there; other
    aliases and numbers as they are."""
    own = f"{version}-{device}"
    return own if own in store.get_aliases(kind, pair) else version


def _newest(
    store: Store, pair: str, device: str, picked: Mapping[str, Published]
) -> dict[str, Published]:
    """The newest version of each kind that was not picked, among those of the same models and,
    where it was measured, of the device."""
    bound = {version.fingerprint for kind, version in picked.items() if KINDS[kind].fingerprinted}
    found: dict[str, Published] = {}
    for kind in (
        "decoding_config",
        *(kind for kind in OURS if kind not in ("decoding_config", "distilled_draft")),
    ):
        if kind in picked:
            continue
        fitting = [
            version
            for version in store.versions(kind, pair)
            if (not bound or version.fingerprint in bound)
            and (version.tags.get("device_class") or device).startswith(device)
        ]
        if fitting:
            found[kind] = fitting[-1]
            bound = bound or {fitting[-1].fingerprint}
    return found


def _refuse_lone_draft(picked: Mapping[str, Published], champion: ReleaseVersion | None) -> None:
    """Refuse a draft that was exchanged alone."""
    draft = picked.get("distilled_draft")
    if draft is None:
        return
    pin = None if champion is None else champion.contents.pins.get("distilled_draft")
    if pin is None or pin.digest != draft.digest:
        raise DraftwellError(
            f"{name_of(draft)} cannot be exchanged alone, others are made with the draft: "
            "name it in the pair's YAML file, then collect, calibrate, tune and publish",
            code="draft_is_part_of_the_pair",
        )
