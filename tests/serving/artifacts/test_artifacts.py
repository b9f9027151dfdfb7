"""Artifacts survive a round trip and refuse what is not theirs."""

from __future__ import annotations

import json

import pytest
import torch

from draftwell.serving.artifacts.acceptance_head import AcceptanceHead
from draftwell.serving.artifacts.acceptance_table import AcceptanceTable
from draftwell.serving.artifacts.base import ArtifactError, digest_of
from draftwell.serving.artifacts.correction_memory import CorrectionMemory
from draftwell.serving.artifacts.decoding_config import DecodingConfig, SampledChoice
from draftwell.serving.artifacts.distilled_draft import DistilledDraft
from draftwell.serving.artifacts.hardware_profile import HardwareProfile
from draftwell.serving.artifacts.kinds import other_temperature
from draftwell.serving.artifacts.rounding import quantise
from draftwell.serving.artifacts.verifier import Verifier
from tests.support.errors import raises_code
from tests.support.models.resources import ORIGIN, random_head


def samples() -> list:
    return [
        AcceptanceTable([5] * 20, [3] * 20, ORIGIN),
        CorrectionMemory({(9, 1): 4, (2, 3): 1}, ORIGIN),
        HardwareProfile(0.005, {1: 0.02, 8: 0.03}, 0.001, ORIGIN),
        DecodingConfig("vanilla_sd", {}, {}, ORIGIN),
        DecodingConfig(
            "vanilla_sd",
            {"num_speculative_tokens": 3},
            {"trials": []},
            ORIGIN,
            SampledChoice(0.7, "svip", {"max_draft": 8}),
        ),
        Verifier(torch.randn(6), 0.3, ("before", "scalars"), 0.5, 1.2, ORIGIN),
        random_head(6),
        DistilledDraft(
            {"model.layers.0.w": torch.randn(4, 8), "model.norm.weight": torch.ones(8)},
            {"model_type": "llama"},
            torch.tensor([1, 2]),
            "d" * 64,
            ORIGIN,
        ),
    ]


@pytest.mark.parametrize("artifact", samples(), ids=lambda a: a.kind)
def test_round_trip_and_refusals(artifact, tmp_path):
    folder = tmp_path / artifact.kind
    digest = artifact.save(folder)
    again = type(artifact).load(folder, fingerprint=ORIGIN.fingerprint)
    assert artifact.digest == again.digest == digest
    if isinstance(artifact, DecodingConfig):
        assert again.sampled == artifact.sampled
    assert again.save(tmp_path / "again") == digest == digest_of(folder), (
        "saving what was loaded changes nothing"
    )
    with raises_code("another_pair", "pair table", ORIGIN.fingerprint[:12], "1" * 12):
        type(artifact).load(folder, fingerprint="1" * 64)
    other = AcceptanceTable if artifact.kind != "acceptance_table" else CorrectionMemory
    with raises_code("another_kind", artifact.kind, other.kind):
        other.load(folder)


@pytest.mark.parametrize("artifact", samples(), ids=lambda a: a.kind)
def test_tampering_is_named(artifact, tmp_path):
    folder = tmp_path / "a"
    artifact.save(folder)
    for path in folder.iterdir():
        if path.name == "artifact.json":
            continue
        original = path.read_bytes()
        path.write_bytes(original[:-1] + bytes([original[-1] ^ 1]))
        with raises_code("changed_file", path.name):
            type(artifact).load(folder)
        path.unlink()
        with raises_code("missing_file", path.name):
            type(artifact).load(folder)
        path.write_bytes(original)
    manifest = json.loads((folder / "artifact.json").read_text())
    (folder / "artifact.json").write_text(json.dumps(manifest | {"schema_version": 99}))
    with raises_code("newer_schema", artifact.kind, "99"):
        type(artifact).load(folder)
    (folder / "artifact.json").write_text(json.dumps(manifest | {"schema_version": 0}))
    with raises_code("older_schema", artifact.kind, "make it again"):
        type(artifact).load(folder)
    for wrong in (
        {"files": {}},
        {"files": []},
        {"schema_version": "1"},
        {"provenance": {"pair": "x"}},
    ):
        (folder / "artifact.json").write_text(json.dumps(manifest | wrong))
        with pytest.raises(ArtifactError):
            type(artifact).load(folder)
    (folder / "artifact.json").write_text(json.dumps(manifest))
    (folder / "stranger.txt").write_text("x")
    with raises_code("unlisted_file", "stranger.txt"):
        type(artifact).load(folder)
    (folder / "artifact.json").write_text("{")
    with raises_code("bad_manifest", "artifact.json"):
        type(artifact).load(folder)


def test_an_artifact_knows_the_digest_of_its_folder_and_a_copy_has_none(tmp_path):
    table = AcceptanceTable([5] * 20, [3] * 20, ORIGIN)
    assert table.digest is None
    first = table.save(tmp_path / "a")
    table.update(0.5, True)
    assert table.digest == first, "what requests learn is on no disk"
    assert table.copy().digest is None
    assert table.save(tmp_path / "b") == table.digest != first


def test_a_failed_save_leaves_the_old_artifact(tmp_path, monkeypatch):
    old = AcceptanceTable([5] * 20, [3] * 20, ORIGIN)
    digest = old.save(tmp_path / "t")
    new = AcceptanceTable([6] * 20, [3] * 20, ORIGIN)
    monkeypatch.setattr(
        new, "write_files", lambda folder: (folder / "half").write_text("x") and 1 / 0
    )
    with pytest.raises(ZeroDivisionError):
        new.save(tmp_path / "t")
    assert digest_of(tmp_path / "t") == digest
    assert [p.name for p in tmp_path.iterdir()] == ["t"]


@pytest.mark.parametrize(
    "change",
    [
        {"mean": torch.zeros(5)},
        {"scale": torch.zeros(6)},
        {"bias": float("nan")},
        {"weight": torch.full((6,), float("inf"))},
        {"blocks": [(torch.zeros(6, 5), torch.zeros(6))]},
    ],
)
def test_an_acceptance_head_that_cannot_predict_is_refused(change):
    whole = {
        "mean": torch.zeros(6),
        "scale": torch.ones(6),
        "blocks": [(torch.zeros(6, 6), torch.zeros(6))],
        "weight": torch.ones(6),
        "bias": 0.0,
    }
    AcceptanceHead(**whole, provenance=ORIGIN)
    with raises_code("bad_artifact", "acceptance head"):
        AcceptanceHead(**whole | change, provenance=ORIGIN)


def test_int8_is_within_half_a_step_per_output_channel():
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    weight *= torch.logspace(-3, 1, 16)[:, None]
    values, scale = quantise(weight)
    assert values.dtype == torch.int8
    assert bool(
        ((values.float() * scale[:, None] - weight).abs() <= scale[:, None] / 2 + 1e-7).all()
    )


@pytest.mark.parametrize("blocks", [0, 1, 3])
def test_an_acceptance_head_comes_back(blocks, tmp_path):
    """What safetensors hold, at scales far from 1 and one state or many at once."""
    generator = torch.Generator().manual_seed(blocks)

    def normal(*shape, scale=1.0):
        return scale * torch.randn(*shape, generator=generator)

    layers = [(normal(24, 24, scale=0.2), normal(24)) for _ in range(blocks)]
    head = AcceptanceHead(
        normal(24, scale=30.0), normal(24).abs() * 9 + 0.01, layers, normal(24), -0.7, ORIGIN
    )
    head.save(tmp_path / "h")
    loaded = AcceptanceHead.load(tmp_path / "h")
    states = head.mean + head.scale * normal(500, 24, scale=2.0)
    x = (states - head.mean) / head.scale
    for matrix, vector in layers:
        x = x + torch.nn.functional.silu(torch.nn.functional.linear(x, matrix, vector))
    chances = torch.sigmoid(x @ head.weight + head.bias)
    assert chances.std() > 0.2
    for one in (head, loaded):
        assert torch.allclose(torch.sigmoid(one.logit(states)), chances, atol=1e-5)
        assert one.acceptance(states[0]) == pytest.approx(float(chances[0]), abs=1e-5)


def test_profile_interpolates_between_measured_sizes():
    profile = HardwareProfile(1.0, {1: 10.0, 4: 13.0, 8: 21.0}, 0.0, ORIGIN)
    assert [profile.verify_seconds(k) for k in (1, 2, 4, 6, 8, 10)] == [10, 11, 13, 17, 21, 25]
    with pytest.raises(ArtifactError):
        HardwareProfile(0.0, {1: 1.0}, 0.0, ORIGIN)


def test_a_config_comes_back_with_and_without_a_sampled_choice(tmp_path):
    DecodingConfig("vanilla_sd", {}, {}, ORIGIN).save(tmp_path / "greedy")
    sampled = SampledChoice(1.0, "svip", {}, {}, {1: 4, 8: 2})
    DecodingConfig("vanilla_sd", {}, {}, ORIGIN, sampled, {1: 5, 2: 0}).save(tmp_path / "both")
    greedy, both = (DecodingConfig.load(tmp_path / name) for name in ("greedy", "both"))
    assert (greedy.sampled, greedy.draft_length_by_batch) == (None, {})
    assert (both.sampled, both.draft_length_by_batch) == (sampled, {1: 5, 2: 0})


@pytest.mark.parametrize("table", [{0: 4}, {1: -1}, {1: "4"}, {-2: 0}])
def test_draft_lengths_that_are_none_are_refused(table):
    for made in (
        lambda: DecodingConfig("vanilla_sd", {}, {}, ORIGIN, None, table),
        lambda: SampledChoice(1.0, "vanilla_sd", {}, {}, table),
    ):
        with pytest.raises(ValueError, match="1 or more"):
            made()


def made_at(kind, temperature):
    """An artifact whose provenance names a temperature, or none."""
    made = ORIGIN.model_copy(
        update={"parameters": {} if temperature is None else {"temperature": temperature}}
    )
    return {
        "table": AcceptanceTable([5] * 20, [3] * 20, made),
        "memory": CorrectionMemory({}, made),
        "verifier": Verifier(torch.randn(6), 0.3, ("before", "scalars"), 0.5, 1.2, made),
    }[kind]


@pytest.mark.parametrize(
    ("kind", "made", "used", "fits"),
    [
        ("table", 0.0, 0.0, True),
        ("table", 0.0, 0.7, False),
        ("table", None, 0.7, True),
        ("table", 0.7, 1.0, True),
        ("table", 0.7, 0.0, False),
        ("verifier", 0.0, 0.7, False),
        ("verifier", None, 0.7, True),
        ("memory", 0.6, 0.0, True),
    ],
)
def test_an_artifact_of_the_other_temperature_class_is_named(kind, made, used, fits):
    """A memory is sampled at .6 for both classes; what records no temperature is not objected
    to."""
    artifact = made_at(kind, made)
    found = other_temperature([made_at("memory", 0.6), artifact], used)
    assert (found is None) == fits
    assert found is None or artifact.kind in found


def test_a_table_with_counts_of_sampled_texts_comes_back(tmp_path):
    made = ORIGIN.model_copy(
        update={
            "parameters": {"temperature": 0.7},
            "trace_digest": "7" * 64,
            "training_prompts": ["a"],
        }
    )
    sampled = AcceptanceTable([9] * 20, [4] * 20, made)
    AcceptanceTable([5] * 20, [3] * 20, ORIGIN).save(tmp_path / "greedy")
    AcceptanceTable([5] * 20, [3] * 20, ORIGIN, sampled).save(tmp_path / "both")
    assert AcceptanceTable.load(tmp_path / "greedy").sampled is None
    back = AcceptanceTable.load(tmp_path / "both").copy()
    assert (back.total, back.at(0.0), back.at(1.0).total, back.at(1.0).accepted) == (
        [5] * 20,
        back,
        [9] * 20,
        [4] * 20,
    )
    assert (back.at(0.7).provenance.parameters, back.at(0.7).provenance.trace_digest) == (
        {"temperature": 0.7},
        "7" * 64,
    )
    assert back.at(0.7).provenance.training_prompts == ["a"]
    assert [other_temperature([back], used) for used in (0.0, 0.7, 1.0)] == [None] * 3
    back.at(1.0).update(0.5, kept=True)
    assert sum(back.total) == 100, "each counts its own requests"


@pytest.mark.parametrize("weights", [(10, 10), (10, 316), (316, 10), (100, 316)])
def test_each_class_of_temperatures_has_its_own_prior_weight(tmp_path, weights):
    greedy, sampled = (
        AcceptanceTable([5] * 20, [3] * 20, made_at("table", at).provenance, prior_weight=weight)
        for at, weight in zip((0.0, 0.7), weights, strict=True)
    )
    greedy.sampled = sampled
    greedy.save(tmp_path / "table")
    back = AcceptanceTable.load(tmp_path / "table").copy()
    assert (back.prior_weight, back.at(1.0).prior_weight) == weights
    assert back.alpha(0.5) == pytest.approx((3 + weights[0] * 0.55) / (5 + weights[0]))


@pytest.mark.parametrize("weight", [0, -1, float("inf"), float("nan")])
def test_a_prior_weight_that_is_no_count_is_refused(weight):
    with raises_code("bad_artifact", "prior weight"):
        AcceptanceTable([5] * 20, [3] * 20, ORIGIN, prior_weight=weight)
