"""What an older version wrote is refused by one line that says what to do.

`tests/data/written_by_9cd9650` was written by the code of that commit, of version 0.5: the
workspace of a tiny pair with artifacts, traces and reports; a bundle with its model.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from draftwell.flows.workspace import Workspace
from draftwell.serving.artifacts.base import digest_of
from draftwell.serving.artifacts.kinds import find_kind
from draftwell.serving.bundle.bundle import open_bundle
from tests.support.errors import raises_code
from tests.support.paths import REPO

WRITTEN = REPO / "tests" / "data" / "written_by_9cd9650"
ARTIFACTS = WRITTEN / "workspace" / "artifacts"
UNCHANGED = ("correction_memory", "distilled_draft", "hardware_profile")
"""Kinds whose files are those of then."""
WITHOUT_ONNX = ("acceptance_head", "verifier")
"""Kinds that had an ONNX copy of the same numbers then."""


def test_a_workspace_is_refused(own_stores: Path) -> None:
    root = Workspace("default").root
    shutil.copytree(WRITTEN / "workspace", root)
    with raises_code("older_format", str(root), "0.6 or earlier", "make reset"):
        Workspace("default")


def test_a_bundle_is_refused() -> None:
    bundle = WRITTEN / "bundle_and_models" / "bundle"
    with raises_code("older_format", str(bundle), "0.6 or earlier", "deploy its release again"):
        open_bundle(bundle)


@pytest.mark.parametrize("kind", ["acceptance_table", "decoding_config"])
def test_an_artifact_of_an_older_schema_is_refused(kind: str) -> None:
    with raises_code("older_schema", kind, "make it again"):
        find_kind(kind).load_class().load(ARTIFACTS / kind)


@pytest.mark.parametrize("kind", UNCHANGED)
def test_an_artifact_that_is_saved_again_keeps_its_digest(kind: str, tmp_path: Path) -> None:
    """The digest is over all data files: the same numbers are written in the same bytes as then."""
    loaded = find_kind(kind).load_class().load(ARTIFACTS / kind)
    assert loaded.save(tmp_path / kind) == digest_of(ARTIFACTS / kind)


@pytest.mark.parametrize("kind", WITHOUT_ONNX)
def test_an_artifact_that_is_saved_again_loses_its_onnx_copy_alone(
    kind: str, tmp_path: Path
) -> None:
    find_kind(kind).load_class().load(ARTIFACTS / kind).save(tmp_path / kind)
    before, after = (
        {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "artifact.json"}
        for folder in (ARTIFACTS / kind, tmp_path / kind)
    )
    assert before.keys() - after.keys() == {f"{kind}.onnx"}
    if kind == "verifier":  # one that is saved names the numbers that it reads
        names = {"scalars": ["q_token", "confidence", "entropy", "log_rank"]}
        older = json.loads(before["verifier.json"]) | names
        assert json.loads(after.pop("verifier.json")) == older
    assert {name: before[name] for name in after} == after
