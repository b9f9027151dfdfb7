"""Forged gate records are refused by name: edited verdicts, other thresholds, no signature, and one
by another key. The stand-in for cosign works like it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from draftwell.registry import gates
from draftwell.registry.gates import GateRecord, load_gates
from draftwell.registry.promotion import deployment_objection, promote, rollback
from draftwell.registry.releases import (
    find_release,
    gate_record,
    objection,
    record_gate,
    signature_tag,
    standing_record,
)
from draftwell.registry.store import Store
from draftwell.serving.bundle.verdict import Check
from tests.support.cosign import put_on_path
from tests.support.errors import raises_code
from tests.support.loop.publishing import Make, verdict


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the keys `mine` and `theirs`, and a cosign on PATH."""
    put_on_path(tmp_path, monkeypatch)
    for name in ("mine", "theirs"):
        (tmp_path / name).write_text(f"{name}\n")
    return tmp_path


def tags_of(store: Store) -> Mapping[str, str]:
    return find_release(store, "tiny", "cpu", 1).published.tags


def test_a_signed_record_is_read_and_a_changed_one_is_not(
    make_release: Make, store: Store, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTWELL_COSIGN_KEY", str(keys / "mine"))
    monkeypatch.setenv("DRAFTWELL_COSIGN_PUBLIC", str(keys / "mine"))
    one = make_release("one")
    record_gate(store, verdict(one, value=0.9))
    failed = gate_record(find_release(store, "tiny", "cpu", 1))
    assert failed is not None
    assert not failed.passed
    text = tags_of(store)["gate_record"]
    forged = json.loads(text) | {"passed": True}
    forged["checks"][0] |= {"passed": True, "value": 1.3}
    store.set_tag(one.published, "gate_record", json.dumps(forged))
    unsigned = ("release.tiny.cpu version 1", str(keys / "mine"), "has no signature")
    with raises_code("gate_record_unsigned", *unsigned):
        promote(store, "tiny", "cpu", 1)
    kept = tags_of(store)[signature_tag(text)]
    store.set_tag(one.published, signature_tag(json.dumps(forged)), kept)
    with raises_code("gate_record_unsigned", "failed to verify signature"):
        promote(store, "tiny", "cpu", 1)
    assert "champion" not in store.get_aliases("release", "tiny.cpu")


def test_a_record_of_another_key_or_of_none_is_refused(
    make_release: Make, store: Store, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTWELL_COSIGN_KEY", str(keys / "theirs"))
    one = make_release("one")
    record_gate(store, verdict(one))
    assert gate_record(find_release(store, "tiny", "cpu", 1)) is not None, "nobody asks for a key"
    monkeypatch.setenv("DRAFTWELL_COSIGN_PUBLIC", str(keys / "mine"))
    with raises_code("gate_record_unsigned", "failed to verify signature"):
        promote(store, "tiny", "cpu", 1)
    monkeypatch.delenv("DRAFTWELL_COSIGN_KEY")
    record_gate(store, verdict(one, value=1.2))
    with raises_code("gate_record_unsigned", "has no signature", "DRAFTWELL_COSIGN_KEY"):
        promote(store, "tiny", "cpu", 1)
    monkeypatch.setenv("DRAFTWELL_COSIGN_KEY", str(keys / "nowhere"))
    with raises_code("not_signed", "no such file"):
        record_gate(store, verdict(one, value=1.3))


def test_the_way_back_leads_past_a_champion_whose_record_is_not_signed(
    make_release: Make, store: Store, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gate that looks at it finds no record; naming it is refused."""
    for n in (1, 2, 3):
        if n != 2:
            monkeypatch.setenv("DRAFTWELL_COSIGN_KEY", str(keys / "mine"))
        made = make_release(str(n), accepted=n)
        promote(store, "tiny", "cpu", n, verdict(made, beside=n - 1 or None))
        monkeypatch.delenv("DRAFTWELL_COSIGN_KEY", raising=False)
    monkeypatch.setenv("DRAFTWELL_COSIGN_PUBLIC", str(keys / "mine"))
    assert standing_record(find_release(store, "tiny", "cpu", 2)) is None
    with raises_code("gate_record_unsigned"):
        rollback(store, "tiny", "cpu", "a trial", to=2)
    assert rollback(store, "tiny", "cpu", "a trial")[1].version == 1


def test_a_verdict_by_other_thresholds_lets_nothing_pass(
    make_release: Make, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = make_release("one")
    forged = verdict(one).model_copy(update={"thresholds": "0" * 64})
    with raises_code("not_gated", "other thresholds", "draftwell gate"):
        promote(store, "tiny", "cpu", 1, forged)
    record_gate(store, verdict(one))
    kept = load_gates().model_dump(mode="json") | {"max_bundle_mb": 7}
    (tmp_path / "gates.yaml").write_text(json.dumps(kept))
    monkeypatch.setattr(gates, "HERE", tmp_path)
    release = find_release(store, "tiny", "cpu", 1)
    assert "other thresholds" in str(objection(release, gate_record(release)))


def test_a_rollback_leads_to_what_passed_by_the_thresholds_of_its_time(
    make_release: Make,
    champions: Make,
    store: Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Thresholds are compared of what becomes champion for the first time."""
    champions(3)
    record_gate(store, verdict(make_release("4", accepted=4), beside=3))
    kept = load_gates().model_dump(mode="json") | {"max_bundle_mb": 7}
    (tmp_path / "gates.yaml").write_text(json.dumps(kept))
    monkeypatch.setattr(gates, "HERE", tmp_path)
    assert rollback(store, "tiny", "cpu", "a trial")[1].version == 2
    good = rollback(store, "tiny", "cpu", "another", to=1)[1]
    assert (good.version, deployment_objection(store, good)) == (1, None)
    new = find_release(store, "tiny", "cpu", 4)
    assert "other thresholds" in str(deployment_objection(store, new))


def test_an_edited_verdict_contradicts_its_checks(make_release: Make, store: Store) -> None:
    forged = verdict(make_release("one"), value=0.9).model_copy(update={"passed": True})
    with raises_code("not_gated", "its gate failed (min_speedup_lower_bound)"):
        promote(store, "tiny", "cpu", 1, forged)


def test_a_record_names_the_files_that_are_kept_with_it(
    make_release: Make, store: Store, tmp_path: Path
) -> None:
    one, report = make_release("one"), tmp_path / "bench.json"
    report.write_text('{"speedup": 1.2}')
    record_gate(store, verdict(one), files=[report])
    record = gate_record(find_release(store, "tiny", "cpu", 1))
    assert isinstance(record, GateRecord)
    assert record.reports == {"bench.json": hashlib.sha256(report.read_bytes()).hexdigest()}
    assert record.checks[0] == Check("min_speedup_lower_bound", 1.1, 1.0, True)
