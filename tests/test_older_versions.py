"""What an older version wrote is read as it was, or refused by one line that says what to do.

`tests/data/written_by_9cd9650` was written by the code of that commit (before the modules were
moved): the workspace of a tiny pair with all kinds of artifacts, a trace, a tuned choice with its
evidence and a bench report; a bundle with its model; a release and its verdict.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from draftwell.components.collect.plan import is_complete
from draftwell.components.drift.spool import read_spool
from draftwell.components.tune.evidence import TuningEvidence
from draftwell.components.tune.report.html import write_tuning_report
from draftwell.flows.orchestration.deployments import settings_class
from draftwell.flows.steps.lineage import read_report, rows_of
from draftwell.registry.gates import GateRecord
from draftwell.registry.releases import Release
from draftwell.serving.artifacts.base import digest_of
from draftwell.serving.artifacts.decoding_config import DecodingConfig
from draftwell.serving.artifacts.kinds import KINDS, find_kind
from draftwell.serving.bundle.bundle import open_bundle
from draftwell.serving.errors import DraftwellError
from draftwell.serving.recording.trace import TraceSet
from tests.support.errors import raises_code
from tests.support.paths import REPO

WRITTEN = REPO / "tests" / "data" / "written_by_9cd9650"
WORKSPACE = WRITTEN / "workspace"
RECORDED = json.loads((WRITTEN / "digests.json").read_text())
WRITTEN_KINDS = (
    "acceptance_head",
    "acceptance_table",
    "correction_memory",
    "decoding_config",
    "distilled_draft",
    "hardware_profile",
    "verifier",
)
"""Those of that version; later ones have more."""


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy, because readers keep digests next to what they read."""
    return Path(shutil.copytree(WRITTEN, tmp_path / "old"))


@pytest.mark.parametrize("kind", WRITTEN_KINDS)
def test_artifacts_are_read(kind: str) -> None:
    bound = RECORDED["fingerprint"] if KINDS[kind].fingerprinted else None
    loaded = find_kind(kind).load_class().load(WORKSPACE / "artifacts" / kind, fingerprint=bound)
    assert loaded.digest == digest_of(WORKSPACE / "artifacts" / kind)


@pytest.mark.parametrize("kind", WRITTEN_KINDS)
def test_an_artifact_that_is_saved_again_keeps_its_digest(kind: str, tmp_path: Path) -> None:
    """The digest is over all data files: the same numbers are written in the same bytes as then."""
    loaded = find_kind(kind).load_class().load(WORKSPACE / "artifacts" / kind)
    assert loaded.save(tmp_path / kind) == digest_of(WORKSPACE / "artifacts" / kind)


def test_a_trace_is_read_with_its_digest(copy: Path) -> None:
    traces = TraceSet(copy / "workspace" / "traces", fingerprint=RECORDED["fingerprint"])
    assert traces.digest() == RECORDED["trace"]
    assert is_complete(traces.folder)
    assert (
        len(
            set(
                read_spool(traces.folder, RECORDED["fingerprint"], window=5)
                .rows.column("prompt_id")
                .to_pylist()
            )
        )
        == 5
    )


def test_the_evidence_of_a_choice_is_shown_or_refused_in_one_line(tmp_path: Path) -> None:
    config = DecodingConfig.load(WORKSPACE / "artifacts" / "decoding_config")
    assert config.evidence["trials"]
    refusal = ""
    try:
        write_tuning_report(TuningEvidence.read(config.evidence), tmp_path, pair="tiny")
    except DraftwellError as error:
        refusal = str(error)
    assert (tmp_path / "tuning.html").is_file() or (
        "draftwell tune" in refusal and "\n" not in refusal
    ), refusal


@pytest.mark.parametrize("name", ["bench", "tuning"])
def test_rows_of_a_report_have_a_lineage(name: str) -> None:
    path = WORKSPACE / "reports" / f"{name}.json"
    rows = rows_of(read_report(path), path)
    assert any("spide" in label or "autoregressive" in label for label, _ in rows)


def test_a_bundle_is_opened_with_its_model(copy: Path) -> None:
    root = copy / "bundle_and_models"
    bundle = open_bundle(root / "bundle")
    assert bundle.manifest.computed_digest() == bundle.manifest.digest
    assert set(bundle.artifacts()) == {"acceptance_table", "decoding_config"}
    assert bundle.files(root / "models").draft == root / "bundle" / "models" / "draft"


def test_a_release_and_its_verdict_are_read() -> None:
    release = Release.load(WRITTEN / "release")
    record = GateRecord.model_validate_json((WRITTEN / "gate_record.json").read_text())
    pins = {kind: pin.version for kind, pin in release.contents.pins.items()}
    assert release.contents.pins["decoding_config"].digest == digest_of(
        WORKSPACE / "artifacts" / "decoding_config"
    )
    assert record.objection(1, pins) is None


def test_the_entrypoint_of_an_older_deployment_is_refused_by_name() -> None:
    with raises_code("no_such_flow", "flows/scheduled.py:collection"):
        settings_class("flows/scheduled.py:collection")
