"""A candidate with a new draft is measured beside the champion with the old one: a worse draft does
not ship."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from draftwell.components.distil.artifact import to_artifact
from draftwell.components.distil.family import keep_layers
from draftwell.components.gate.settings import GateSettings
from draftwell.components.prompts.prompt import Prompt
from draftwell.components.report.provenance import provenance
from draftwell.flows.context import StepContext
from draftwell.flows.steps.gate import gate_release
from draftwell.flows.steps.gate_parts.checks import prediction_check
from draftwell.flows.steps.publish import run_publish
from draftwell.flows.workspace import Workspace
from draftwell.registry import gates
from draftwell.registry.promotion import promote
from draftwell.registry.releases import find_release, gate_record
from draftwell.registry.store import Store
from draftwell.serving.artifacts.acceptance_table import AcceptanceTable
from draftwell.serving.artifacts.base import Provenance
from draftwell.serving.artifacts.decoding_config import DecodingConfig
from draftwell.serving.artifacts.pair_files import weights_digest
from draftwell.serving.bundle.verdict import UNDECIDED, GateVerdict, Thresholds
from tests.support.errors import raises_code
from tests.support.loop.publishing import verdict
from tests.support.loop.thresholds import ANY_SPEED
from tests.support.loop.tiny_files import PROMPTS
from tests.support.server.served_pair import tiny_pair

ROWS = [Prompt(f"p{i}", None, [text]) for i, text in enumerate(PROMPTS[:4])]
LIMIT = Thresholds(max_prediction_loss_ratio=1.05)


@pytest.fixture
def release_with(
    own_stores: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[float], StepContext]:
    """Give the pair a draft with so much noise on its weights, and register a release of it."""
    monkeypatch.setenv("DRAFTWELL_MODELS", str(own_stores / "models"))
    (own_stores / "gates.yaml").write_text(json.dumps(gates.load_gates().model_dump() | ANY_SPEED))
    monkeypatch.setattr(gates, "HERE", own_stores)
    pair = tiny_pair(1)
    pair.modules["target"].save_pretrained(own_stores / "target")
    pair.tokenizer.save_pretrained(own_stores / "target")
    (own_stores / "pair.yaml").write_text(
        "name: drafted\ndescription: d\nlicence: none\ndtype: float32\nchat: true\n"
        "target:\n  path: target\ndraft:\n  artifact: draft\n"
    )

    def make(noise: float) -> StepContext:
        draft = keep_layers(pair.modules["target"], (0, 1))
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for weight in draft.model.layers.parameters():
                weight += noise * torch.randn(weight.shape, generator=generator)
        head = torch.arange(len(pair.tokenizer))
        made = Provenance(pair="drafted", fingerprint="")
        to_artifact(draft, head, weights_digest(own_stores / "target"), made).save(
            own_stores / "draft"
        )
        space = Workspace(str(own_stores / "pair.yaml"))
        step = StepContext(space, space.load(slots=1))
        space.save(
            DecodingConfig("vanilla_sd", {"num_speculative_tokens": 3}, {}, provenance(step.pair))
        )
        run_publish(step, {})
        return step

    return make


@pytest.mark.slow
def test_a_worse_draft_is_refused_and_a_better_one_is_not(
    release_with: Callable[[float], StepContext],
) -> None:
    release_with(0.02)
    store = Store()
    one = find_release(store, "drafted", "cpu", 1)
    assert "distilled_draft" in one.pins
    promote(store, "drafted", "cpu", 1, verdict(one))

    worse = release_with(0.4)
    assert worse.pair.fingerprint != one.fingerprint
    found = gate_release(worse, ROWS, GateSettings(max_tokens=24, dry_run=True), alias=2)["verdict"]
    assert not [note for note in found.notes if "not measured" in note]
    checks = {check.name: check for check in found.checks}
    assert "regression" in checks
    share, of_champion = accepted(found)
    assert share < of_champion, "each with its own draft"

    better = release_with(0.0)
    share, of_champion = accepted(
        gate_release(better, ROWS, GateSettings(max_tokens=24, dry_run=True), alias=3)["verdict"]
    )
    assert share >= of_champion


def accepted(verdict: GateVerdict) -> tuple[float, float]:
    """Acceptance of the candidate and of the champion, as the verdict's note reports them."""
    (note,) = [note for note in verdict.notes if note.startswith("acceptance")]
    mine, theirs = re.findall(r"0\.\d+|1\.000", note)
    return float(mine), float(theirs)


@pytest.mark.slow
def test_a_champion_that_cannot_be_measured_leaves_it_open_unless_a_person_says_why(
    release_with: Callable[[float], StepContext], monkeypatch: pytest.MonkeyPatch
) -> None:
    import draftwell.components.gate.footprint

    release_with(0.02)
    store = Store()
    promote(store, "drafted", "cpu", 1, verdict(find_release(store, "drafted", "cpu", 1)))
    step = release_with(0.1)
    # no room for a second pair
    monkeypatch.setattr(draftwell.components.gate.footprint, "free_memory", lambda: 0)
    found = gate_release(step, ROWS[:2], GateSettings(max_tokens=8), alias=2)["verdict"]
    unmet = {check.name: check for check in found.checks if not check.passed}
    assert set(unmet) == {"regression", "start-up"}, "there is no memory for a start, either"
    assert {check.result for check in unmet.values()} == {UNDECIDED}
    assert unmet["regression"].detail.startswith("release.drafted.cpu version 1, the champion,")
    kept = gate_record(find_release(store, "drafted", "cpu", 2))
    assert kept is not None
    assert kept.undecided, "another day there is memory"
    with raises_code("not_gated", "(regression, start-up)"):
        promote(store, "drafted", "cpu", 2)
    found = gate_release(
        step,
        ROWS[:2],
        GateSettings(max_tokens=8, unmeasured="measured on a larger machine"),
        alias=2,
    )["verdict"]
    assert found.passed
    assert sum(note.endswith("let pass: measured on a larger machine") for note in found.notes) == 2
    two = find_release(store, "drafted", "cpu", 2)
    record = gate_record(two)
    assert record is not None
    assert record.baseline_version == 1
    assert "measured on a larger machine" in store.description(two.published), "the reason is kept"


def test_predictions_that_cannot_be_measured_do_not_pass_the_gate(
    release_with: Callable[[float], StepContext],
) -> None:
    """No traces: a release without table and verifier needs none, one with a table is not let
    through unseen."""
    step = release_with(0.02)
    assert not prediction_check(step, {}, {}, LIMIT).skipped[0].applies
    table = {"acceptance_table": AcceptanceTable.empty()}
    [lacking] = prediction_check(step, table, {}, LIMIT).skipped
    assert (lacking.name, lacking.applies) == ("acceptance_table predicts", True)
    assert "`draftwell step collect --pair drafted`" in lacking.why
    assert str(step.workspace.root) not in lacking.why
