"""What a release must show before it is promoted: thresholds, recorded baselines, and the record of
a verdict."""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import Field

from draftwell.registry.strict import Model, read_json, read_yaml
from draftwell.serving.bundle.verdict import Check, JudgedRecord, Thresholds
from draftwell.serving.errors import DraftwellError
from draftwell.serving.files import json_digest

HERE = Path(__file__).parent
VARIABLE = "DRAFTWELL_GATES"
"""Environment variable that names a folder of one's own: `gates.yaml` with the thresholds that
differ from the project's, and `baselines/`."""


def own_folder() -> Path | None:
    """The folder that the variable names; None where it is not set.

    Raises:
        DraftwellError: there is no such folder (`no_gates_folder`).
    """
    named = os.environ.get(VARIABLE)
    if not named:
        return None
    folder = Path(named).expanduser()
    if not folder.is_dir():
        raise DraftwellError(
            f"{VARIABLE} names {named}, which is no folder: create it, or unset the variable",
            code="no_gates_folder",
        )
    return folder


def load_gates(path: Path | None = None) -> Thresholds:
    """The thresholds, from a file that names all of them; None: from the project's `gates.yaml`,
    with those in its place that a folder of one's own has.

    >>> load_gates().lossless_identical
    True
    """
    if path is None and (folder := own_folder()) and (folder / "gates.yaml").is_file():
        own = read_yaml(folder / "gates.yaml", Thresholds)
        changed = own.model_dump(include=own.model_fields_set)
        return Thresholds.model_validate(
            {**load_gates(HERE / "gates.yaml").model_dump(), **changed}
        )
    path = path or HERE / "gates.yaml"
    found = read_yaml(path, Thresholds)
    if missing := Thresholds.model_fields.keys() - found.model_fields_set:
        raise DraftwellError(f"{path}: {min(missing)}: Field required", code="bad_value")
    return found


def load_baseline(pair: str, model: type[Model]) -> Model | None:
    """The recorded counts of a pair as a `model`, or None where none were recorded
    (`baselines/README.md` says how)."""
    path = baseline_file(pair)
    return read_json(path, model) if path.is_file() else None


def baseline_file(pair: str) -> Path:
    """Where the counts of a pair are recorded, whether they are or not."""
    return (own_folder() or HERE) / "baselines" / f"{pair}.json"


def thresholds_digest() -> str:
    """Digest of today's thresholds, as gate records name them."""
    return json_digest(load_gates().model_dump(mode="json"))


class GateRecord(JudgedRecord):
    """A verdict about exact versions. It is valid as long as the release pins exactly these."""

    pair: str
    device: str
    release_version: int = Field(ge=1)
    pins: dict[str, int] = Field(description="kind → version that was judged")
    release_digest: str | None = Field(
        None,
        description="the release's own, which covers the contents of what it pins; None: not "
        "recorded",
    )
    checks: tuple[Check, ...] = Field(min_length=1)
    baseline_version: int | None = Field(
        None, description="the champion when it was judged; None where there was none"
    )
    bundle_digest: str | None = Field(None, description="digest of the bundle that was judged")
    sampled_lower_bound: float | None = Field(
        None,
        description="where nothing was tuned for sampled requests: lower end of the greedy "
        "choice's "
        "speedup over plain decoding for "
        "them; None where it was not measured",
    )
    sampled_as_greedy: bool = Field(
        False,
        description="whether that lets the greedy choice serve them; else plain decoding does",
    )
    thresholds: str | None = Field(None, description="digest of what it was judged by")
    judged: str | None = Field(
        None, description="digest of the prompts and tokens that were judged; None: not recorded"
    )
    prompts: str | None = Field(
        None, description="file of prompts that a person named for this gate; None: the pair's own"
    )
    code: str | None = Field(None, description="digest of the sources that judged")
    reports: dict[str, str] = Field(
        default_factory=dict, description="file that is kept with it → its sha256"
    )
    created: str = Field(description="when it was judged, ISO 8601")

    def objection(self, version: int, pins: dict[str, int], digest: str) -> str | None:
        """Why the record does not let a release of this digest pass, or None."""
        same = (self.release_version, self.pins) == (version, pins)
        if not same or self.release_digest not in (None, digest):
            return f"its gate record names version {self.release_version} with other artifacts"
        return self.refusal()

    def serves_greedy_choice(self, version: int, pins: dict[str, int], digest: str) -> bool:
        """Whether bundles of a release that passed let its greedy choice serve sampled requests,
        for which nothing was tuned."""
        return self.sampled_as_greedy and self.objection(version, pins, digest) is None
