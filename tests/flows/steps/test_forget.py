"""What one tenant's requests have left is deleted everywhere, and another's stays."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from draftwell.components.calibrate.settings import MemorySettings
from draftwell.components.collect.plan import PLAN
from draftwell.components.gate.settings import GateSettings
from draftwell.components.prompts.prompt import Prompt
from draftwell.components.prompts.sources import load_prompts
from draftwell.flows.context import StepContext
from draftwell.flows.loading import prompts_of
from draftwell.flows.settings import PipelineSettings
from draftwell.flows.steps import (
    collect as collect_step,
    forget as step,
    publish as publish_step,
    traffic_prompts,
    train as train_step,
)
from draftwell.flows.steps.forget import TEXT_KINDS, forget
from draftwell.flows.steps.gate import gate_release
from draftwell.flows.steps.gate_parts.champion import find_rival
from draftwell.flows.steps.reference_traces import keep_reference, of_release
from draftwell.flows.workspace import Workspace
from draftwell.registry import gates
from draftwell.registry.bundles.judged import judged_folder
from draftwell.registry.pairs import model_records
from draftwell.registry.promotion import deployment_objection, promote
from draftwell.registry.promotion_log import history
from draftwell.registry.releases import (
    FORGOTTEN,
    ReleaseVersion,
    create_release,
    find_release,
    gate_record,
    record_gate,
)
from draftwell.registry.store import Store
from draftwell.serving.artifacts.base import MANIFEST, Provenance
from draftwell.serving.artifacts.datastore import Datastore
from draftwell.serving.files import file_lock
from draftwell.serving.recording.tenants import KEYLESS, short_tenant
from draftwell.serving.recording.trace import TraceSet
from draftwell.serving.runtime.strategies import build_strategy
from draftwell.serving.server.http.keys import Keys, tenant_named
from draftwell.serving.server.http.security import Security
from draftwell.serving.server.model.snapshots import Snapshots
from tests.support.collecting import small
from tests.support.errors import raises_code
from tests.support.loop import traffic
from tests.support.loop.publishing import publish, release, verdict
from tests.support.loop.secrets import contents
from tests.support.loop.thresholds import ANY_SPEED
from tests.support.server.feedback_server import feedback_of
from tests.support.server.pools import SNAPSHOT_ORIGIN, learn, pool
from tests.support.server.served_pair import TunedModel, serving

MARK, OTHER = "zanzibar", "onion"
KEYS = {MARK: "key-of-the-one-who-leaves", OTHER: "key-of-the-one-who-stays"}
ONE, TWO = (short_tenant(tenant_named(name)) for name in (b"leaving", b"staying"))
SKIPPED = {".lock", ".turn"}


def record(left: SimpleNamespace, folder: Path) -> None:
    """Real requests of both tenants, recorded with their texts."""
    file = left.home.parent / "keys"
    file.write_text(f"{KEYS[MARK]} answers leaving\n{KEYS[OTHER]} answers staying\n")
    feedback = feedback_of(folder, text=True)
    feedback.follow(left.step.pair)
    feedback.start()
    served = TunedModel("tiny", left.step.pair, build_strategy("vanilla_sd"), 1)
    security = Security(keys=Keys(file=file))
    with serving(served, security=security, observers=[feedback]) as (url, _):
        for number, prompt in enumerate(traffic.prompts(48, seed=5)):
            word = (MARK, OTHER)[number % 2]
            body = {
                "model": "tiny",
                "messages": [{"role": "user", "content": f"{word} {prompt.prompt}"}],
                "max_tokens": 12,
                "temperature": 0,
            }
            headers = {"Authorization": f"Bearer {KEYS[word]}"}
            answer = httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers)
            assert answer.status_code == 200, answer.text
    feedback.close()


def derive(left: SimpleNamespace) -> None:
    """A loop on this traffic: prompts, traces, artifacts, a release that is champion."""
    step, space = left.step, left.step.workspace
    rows = prompts_of(traffic_prompts.settle_prompts(left.settings))
    shape = small(max_tokens=traffic.TOKENS, rollout=1, batch=16)
    traces = collect_step.run_collect(step, rows["collect"], shape)
    train_step.run_train_datastore(step, traces)
    settings = MemorySettings(max_tokens=8)
    train_step.run_calibrate(step, traces, rows["calibrate"], settings)
    traffic.scripted("vanilla_sd", num_speculative_tokens=5)(step, traces, [])
    keep_reference(space, traces, traces.digest())
    left.release = publish_step.run_publish(step, {"by": "hand"})
    record_gate(Store(), verdict(left.release))
    promote(Store(), left.release.pair, "cpu", left.release.version)
    left.release = find_release(Store(), "tiny", "cpu", "champion")
    drift = space.root / "recalibrations" / "0123456789ab"
    traffic_prompts.write_prompts(drift / "prompts.jsonl", rows["tune"])
    (space.reports / "odd.md").write_text(f"the worst prompt is {rows['tune'][0].id}\n")
    judged_folder(left.release).mkdir(parents=True)


@pytest.fixture
def left(own_stores: Path, pair_file: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """All that two tenants have left."""
    monkeypatch.setenv("DRAFTWELL_MODELS", str(own_stores / "models"))
    home = own_stores / "draftwell"
    found = SimpleNamespace(
        step=traffic.station_of(pair_file),
        home=home,
        spool=home / "spool" / "tiny",
        state=own_stores / "state",
        settings=PipelineSettings(
            pair=str(pair_file),
            source="traffic",
            collect_prompts=20,
            max_tokens=8,
            bench_prompts=16,
            threads=1,
        ),
    )
    record(found, found.spool)
    derive(found)
    it, snapshots = pool("spide", "tenant"), Snapshots(found.state)
    snapshots.keep(it, SNAPSHOT_ORIGIN)
    for name in (b"leaving", b"staying"):
        learn(it, tenant_named(name))
    snapshots.close()
    return found


def holders(place: Path, word: str) -> list[str]:
    """Files that hold a word or its tenant."""
    tenant = ONE if word == MARK else TWO
    marks = (word.encode(), f"spool/{tenant}/".encode(), f"-{tenant}.".encode())
    return [
        str(path.relative_to(place))
        for path in sorted(place.rglob("*"))
        if path.is_file() and "models" not in path.parts
        if any(mark in text for mark in marks for text in (*contents(path), path.name.encode()))
    ]


def everything(place: Path) -> dict[Path, bytes]:
    """Files with their bytes; a database's are compared elsewhere."""
    return {
        path: path.read_bytes()
        for path in sorted(place.rglob("*"))
        if path.is_file() and path.name not in SKIPPED and ".db" not in path.name
    }


def kinds(left: SimpleNamespace) -> dict[str, int]:
    """Versions in the registry, and artifacts in the workspace, of kinds of texts."""
    folder = left.step.workspace.artifacts
    return {
        kind: len(Store().versions(kind, "tiny")) + (folder / kind).is_dir() for kind in TEXT_KINDS
    }


def killed(*_: object) -> None:
    """In the place of a step."""
    raise KeyboardInterrupt


@pytest.mark.slow  # a server, a collection and a calibration: half a minute
def test_one_tenant_is_forgotten_and_the_other_stays(
    left: SimpleNamespace,
    own_stores: Path,
    run: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    space = left.step.workspace
    (own_stores / "one").write_text(f"{KEYS[MARK]} answers leaving\n")
    before, names = everything(own_stores), holders(own_stores, MARK)
    assert {Path(name).name for name in names} >= {"prompts.jsonl", "odd.md", PLAN}
    assert kinds(left) == dict.fromkeys(TEXT_KINDS, 2)
    changes, judged = history(Store(), "tiny", "cpu"), gate_record(left.release)
    command = (
        "release forget",
        "--set",
        f"key_file={own_stores / 'one'}",
        "--set",
        f"state_dir={left.state}",
    )

    said = run(*command, "--dry-run").output
    assert everything(own_stores) == before
    assert holders(own_stores, MARK) == names
    assert kinds(left) == dict.fromkeys(TEXT_KINDS, 2)
    assert "would remove" in said
    assert f"{left.release.name}, the champion: withdrawn" in said

    for name in ("_withdraw", "_remove", "_rewrite", "_forget_state", "_forget_spool"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(step, name, killed)
            with pytest.raises(KeyboardInterrupt):
                forget(ONE, state_dir=left.state)
        assert list(left.spool.glob(f"*-{ONE}.*")), "it goes last: what else there is, it leads to"
    done = run(*command).output
    assert holders(own_stores, MARK) == []
    assert kinds(left) == dict.fromkeys(TEXT_KINDS, 0)
    assert not judged_folder(left.release).exists()
    assert not TraceSet(space.traces).shards
    assert "copies elsewhere" in done
    assert "would" not in done

    requests = [row for file in left.spool.glob("requests-*") for row in lines(file)]
    assert len(requests) == 24
    assert all(OTHER in row["messages"][0]["content"] for row in requests)
    for file, data in before.items():
        if f"-{TWO}." in file.name or (file.parent == left.state and TWO in data.decode()):
            assert file.read_bytes() == data
    for file in (space.root / "served_prompts.jsonl", *space.root.glob("recal*/*/prompts.jsonl")):
        assert lines(file)
        assert all(row["id"].startswith(f"spool/{TWO}/") for row in lines(file))
    assert (space.artifacts / "acceptance_table").is_dir(), "numbers stay"

    assert history(Store(), "tiny", "cpu") == changes
    release = find_release(Store(), "tiny", "cpu", "champion")
    assert gate_record(release) == judged
    assert "datastore" in str(deployment_objection(Store(), release))
    with raises_code("not_gated", "forget"):
        promote(Store(), "tiny", "cpu", release.version)
    succeed(left, monkeypatch)
    again = run(*command).output
    assert f"nothing names the tenant {ONE}" in again


def succeed(left: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another release takes the place of the withdrawn champion."""
    folder, prompts = left.home.parent, traffic.prompts(4, seed=9)
    (folder / "gates.yaml").write_text(json.dumps(gates.load_gates().model_dump() | ANY_SPEED))
    monkeypatch.setattr(gates, "HERE", folder)
    monkeypatch.setattr("draftwell.components.gate.footprint.CHILD", "pass")
    after = publish_step.run_publish(left.step, {"by": "hand"})
    judging = GateSettings(max_tokens=8, limit=2, unmeasured="no new traces for the table")
    found = gate_release(left.step, prompts, judging)
    assert found["passed"], found["verdict"]
    promote(Store(), "tiny", "cpu", after.version)
    assert find_release(Store(), "tiny", "cpu", "champion").version == after.version


def lines(file: Path) -> list[dict[str, Any]]:
    """Rows of JSON lines."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def test_lines_of_other_tenants_stay_whatever_they_hold(own_stores: Path) -> None:
    root = own_stores / "draftwell" / "pairs" / "tiny" / "float32"
    rows = [Prompt(f"spool/{one}/0", None, ["one\u2028two\x85three"]) for one in (ONE, TWO)]
    mixed, alone = root / "served_prompts.jsonl", root / "recalibrations" / "0" / "prompts.jsonl"
    traffic_prompts.write_prompts(mixed, rows)
    traffic_prompts.write_prompts(alone, rows[:1])
    (root / "eagle3").mkdir()
    assert str(root / "eagle3") in " ".join(forget(ONE).left), "its shards name nobody"
    assert load_prompts(mixed) == rows[1:]
    assert not alone.exists()


def with_datastore(store: Store, space: Workspace, folder: Path, tenant: str) -> ReleaseVersion:
    """A release of a table, a config and a datastore that was made of a tenant's texts."""
    plain = release(store, space.spec, space.files(), folder)
    made = Provenance(pair="tiny", fingerprint=plain.fingerprint, tenants=[tenant])
    texts = publish(store, Datastore.from_texts([[5, 6, 7]], made), folder / "datastore")
    models = model_records(space.spec, space.files())
    pins = {**plain.pins, "datastore": texts.version}
    return create_release(store, "tiny", "cpu", pins, models, {})


def test_a_version_that_was_deleted_by_hand_leaves_no_files(
    own_stores: Path, pair_file: Path
) -> None:
    """MLflow keeps them, with the tokens of what was asked."""
    store = Store()
    places = {}
    for number, tenant in enumerate((ONE, TWO)):
        made = Provenance(pair="tiny", fingerprint="f" * 64, tenants=[tenant])
        folder = own_stores / f"datastore-{tenant}"
        one = publish(store, Datastore.from_texts([[5, 6, 7 + number]], made), folder)
        places[tenant] = Path(one.source.removeprefix("file://"))
        store.client.delete_model_version(one.name, str(one.version))
    assert all((place / MANIFEST).is_file() for place in places.values())
    said = forget(ONE, dry_run=True).removed
    assert all((place / MANIFEST).is_file() for place in places.values())
    assert forget(ONE).removed == said
    assert "a datastore whose version was deleted" in said[0]
    assert not (places[ONE] / MANIFEST).exists()
    assert (places[TWO] / MANIFEST).is_file(), "another tenant's"
    assert forget(ONE).removed == []
    (places[TWO] / MANIFEST).unlink()
    assert "cannot be read" in forget(ONE).left[0]


def test_a_release_is_withdrawn_whatever_its_models_are_called(
    own_stores: Path, pair_file: Path
) -> None:
    store, space = Store(), Workspace(str(pair_file))
    made = with_datastore(store, space, own_stores / "made", ONE)
    judged_folder(made).mkdir(parents=True)
    other = release(store, space.spec, space.files(), own_stores / "other", accepted=4)
    store.set_tag(other.published, "parents", "edited")
    store.client.rename_registered_model("datastore.tiny", "tables")
    store.client.rename_registered_model("release.tiny.cpu", "ours")
    store.client.create_model_version("tables", "s3://elsewhere", tags={"kind": "datastore"})
    done = forget(ONE)
    assert "ours version 2: withdrawn, it pins datastore" in done.removed
    assert "tables version 1 in the registry" in done.removed
    assert not judged_folder(made).exists()
    (withdrawn,) = (one for one in store.all_of("release") if FORGOTTEN in one.tags)
    assert withdrawn.digest == made.published.digest
    assert "parents of ours version 3 was changed" in " ".join(done.left)


def test_what_pins_something_gone_is_watched_and_succeeded(
    own_stores: Path, pair_file: Path
) -> None:
    store, space = Store(), Workspace(str(pair_file))
    made = with_datastore(store, space, own_stores / "made", ONE)
    store.set_alias(made.published, "champion")
    after = release(store, space.spec, space.files(), own_stores / "after", accepted=4)
    models: Any = SimpleNamespace(fingerprint=made.fingerprint, special_tokens=None)
    step = StepContext(space, models)
    forget(ONE)
    champion = find_release(store, "tiny", "cpu", "champion")
    assert set(of_release(champion).artifacts) == {"acceptance_table", "decoding_config"}
    (skipped,) = find_rival(step, store, after).skipped().skipped
    assert "withdrawn" in skipped.why
    assert not skipped.applies
    store.delete(store.resolve("acceptance_table", "tiny", after.pins["acceptance_table"]))
    store.set_alias(after.published, "champion")
    (skipped,) = find_rival(step, store, made).skipped().skipped
    assert ("pins what is gone" in skipped.why, skipped.applies) == (True, True)


def test_what_others_hold_is_refused_before_anything_is_deleted(
    own_stores: Path, run: Callable[..., Any]
) -> None:
    state, root = own_stores / "state", own_stores / "draftwell" / "pairs" / "tiny" / "float32"
    spool = own_stores / "spool"
    for folder in (state, root, spool):
        folder.mkdir(parents=True)
    recorded = spool / f"requests-{1:015d}-0a-{KEYLESS}.jsonl"
    recorded.write_text("{}\n")
    old = spool / f"shard-{1:015d}-0a.parquet"
    old.write_text("")
    with file_lock(state / ".lock"), raises_code("state_folder_in_use", str(state)):
        forget(KEYLESS, state_dir=state, spool=spool)
    with file_lock(root / ".turn"), raises_code("workspace_in_use", str(root)):
        forget(KEYLESS, spool=spool)
    with raises_code("no_spool"):
        forget(KEYLESS, spool=own_stores / "none")
    with raises_code("no_state_folder"):
        forget(KEYLESS, state_dir=own_stores / "none")
    keys = own_stores / "keys"
    keys.write_text("one-of-them\nanother-of-them\n")
    for options, code in (
        ((), "key_file="),
        (("a", "--set", f"key_file={keys}"), "key_file="),
        (("--set", f"key_file={keys}"), "2 tenants"),
    ):
        refused = run("release forget", *options)
        assert refused.exit_code == 2
        assert code in refused.output
    assert recorded.is_file()
    assert (
        "give its keys: key_file="
        in run("release forget", "0" * 12, "--set", f"spool={spool}").output
    )
    done = forget(KEYLESS, spool=spool)
    assert done.removed == [str(recorded)]
    assert "1 files" in " ".join(done.left), "which earlier versions recorded"
    assert old.is_file()


def test_a_tenant_is_named_by_key_name_or_digits() -> None:
    from draftwell.flows.cli.forget import tenant_named_as

    assert tenant_named_as("leaving") == tenant_named_as(ONE) == ONE
    assert tenant_named_as(tenant_named(b"leaving")) == ONE
    assert tenant_named_as(KEYLESS) == short_tenant("") == KEYLESS
