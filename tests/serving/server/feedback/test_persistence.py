"""A server over its restarts: what it learnt is there again, what it recorded lies in the spool."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from draftwell.components.prompts.sources import load_prompts
from draftwell.serving.artifacts.acceptance_table import AcceptanceTable
from draftwell.serving.artifacts.decoding_config import DecodingConfig
from draftwell.serving.bundle.bundle import open_bundle
from draftwell.serving.device import device_class
from draftwell.serving.recording.tenants import short_tenant, tenants_of
from draftwell.serving.recording.trace import TraceSet
from draftwell.serving.runtime.commands import Role
from draftwell.serving.server.feedback.persistence import Persistence
from draftwell.serving.server.http.keys import Keys, tenant_named
from draftwell.serving.server.http.security import Security
from draftwell.serving.server.model.served_model import ServedModel
from draftwell.serving.server.model.snapshots import Snapshot, SnapshotOrigin, read_snapshot
from draftwell.serving.server.model.strategy_pool import EVERYBODY, StrategyPool
from draftwell.serving.server.settings import ServerSettings
from tests.support.models.resources import ORIGIN, table_resources
from tests.support.server.bundles import load_bundle, make_bundle
from tests.support.server.served_pair import serving, tiny_pair
from tests.support.server.server_process import ENTRY, entry_with, server_process, wait_until


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory, tiny_models: dict[Role, Path]) -> Path:
    return make_bundle(
        tmp_path_factory.mktemp("bundle") / "1-cpu",
        tiny_models,
        "spide",
        {"tau": 0.6},
        machine=device_class("cpu"),
    )


def total(served: ServedModel) -> int:
    return sum(served.strategy.artifact(AcceptanceTable).total)


def serve_some(served: ServedModel) -> None:
    served.pair.engine().generate(
        served.encode("hello"), served.pair.sampling(max_tokens=12), served.strategy
    )


def test_a_bundle_that_is_loaded_again_goes_on_with_what_was_learnt(
    tmp_path: Path, bundle: Path
) -> None:
    """At a restart, and when the same bundle is loaded beside itself: what serves is the state that
    was resumed, not a fresh one."""
    keeping = Persistence(ServerSettings(bundle=tmp_path, state_dir=tmp_path))
    first = keeping.prepare(load_bundle(bundle, slots=1, max_context=64))
    keeping.follow(first)
    seeded = total(first)
    serve_some(first)
    again = keeping.prepare(load_bundle(bundle, first, slots=1, max_context=64))
    assert total(again) == total(first) > seeded
    keeping.follow(again)
    serve_some(again)
    keeping.close()
    assert (
        total(
            Persistence(ServerSettings(bundle=tmp_path, state_dir=tmp_path)).prepare(
                load_bundle(bundle, slots=1, max_context=64)
            )
        )
        == total(again)
        > total(first)
    )


def test_a_bundle_that_is_refused_leaves_the_old_ones_state(
    tmp_path: Path, bundle: Path, tiny_models: dict[Role, Path]
) -> None:
    """A bundle that was loaded, and then does not answer, never served: `follow` was not called for
    it."""
    keeping = Persistence(ServerSettings(bundle=tmp_path, state_dir=tmp_path))
    first = keeping.prepare(load_bundle(bundle, slots=1, max_context=64))
    keeping.follow(first)
    serve_some(first)
    other = make_bundle(
        tmp_path / "other", tiny_models, "spide", {"tau": 0.5}, machine=device_class("cpu")
    )
    refused = keeping.prepare(load_bundle(other, slots=1, max_context=64))
    assert total(refused) == 50 * 20, "it begins with its own bundle"
    serve_some(first)
    keeping.close()
    snapshot = read_snapshot(tmp_path / "everybody.json")
    assert snapshot.origin == first.origin != refused.origin
    assert snapshot.learnt.table is not None
    assert sum(snapshot.learnt.table[0]) == total(first)


@pytest.mark.slow
def test_over_http_each_key_has_a_state_of_its_own_and_bodies_are_recorded_as_they_came(
    tmp_path: Path,
) -> None:
    """The whole way: key → tenant → state, and messages or prompt → spool; neither key is to be
    found in what is kept."""
    resources, pair = table_resources(8), tiny_pair(2)
    pool = StrategyPool(
        pair,
        resources.artifacts,
        DecodingConfig("spide", {"parallel": False}, {}, ORIGIN),
        mode="tenant",
    )
    served = ServedModel("tiny", pair, pool.get(), 2, strategies=pool)
    keeping = Persistence(
        ServerSettings(
            bundle=tmp_path,
            state_dir=tmp_path / "state",
            feedback_dir=tmp_path / "spool",
            feedback_rate=1.0,
            feedback_text=True,
        )
    )
    assert keeping.snapshots is not None
    keeping.snapshots.keep(pool, SnapshotOrigin("tiny", 1, "d", "f"))
    keeping.prepare(served)
    keeping.start()
    talk = [{"role": "system", "content": "be short"}, {"role": "user", "content": "the onion"}]
    asked = [
        ("chat/completions", {"messages": talk}, "first-key"),
        ("completions", {"prompt": "in an hour"}, "other-key"),
        ("completions", {"prompt": "ten men"}, "other-key"),
    ]
    with serving(
        served,
        observers=keeping.observers,
        security=Security(keys=Keys.of("first-key", "other-key")),
    ) as (url, _):
        for path, said, key in asked:
            answer = httpx.post(
                f"{url}/v1/{path}",
                json={"model": "tiny", **said, "max_tokens": 20, "temperature": 0, "user": "me"},
                headers={"Authorization": f"Bearer {key}"},
                timeout=60,
            )
            assert answer.status_code == 200, answer.text
    keeping.close()
    learnt = {tenant: sum(state.table[0]) for tenant, state in pool.learnt().items() if state.table}
    assert len(learnt) == 3
    assert learnt.pop(EVERYBODY, 0) == 0, "nobody asked without a key"
    assert min(learnt.values()) > 0
    assert len(set(learnt.values())) == 2, "one prompt was served for one key, two for the other"
    files = {
        short_tenant(tenant_named(key.encode())): [said for _, said, by in asked if by == key]
        for key in ("first-key", "other-key")
    }
    for tenant, bodies in files.items():
        (file,) = (tmp_path / "spool").glob(f"requests-*-{tenant}.jsonl")
        found = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        assert [
            {name: row[name] for name in row if name in ("messages", "prompt")} for row in found
        ] == bodies
        assert tenants_of(row["id"] for row in found) == [tenant]
        assert all(row["output"] for row in found)
    assert {prompt.prompt for prompt in load_prompts(tmp_path / "spool")} == {
        "the onion",
        "in an hour",
        "ten men",
    }
    kept = b"".join(
        path.name.encode() + path.read_bytes()
        for folder in ("state", "spool")
        for path in (tmp_path / folder).iterdir()
    )
    assert not [word for word in (b"first-key", b"other-key", b'"me"') if word in kept]


def ask(address: str, prompt: str) -> None:
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": 16,
        "temperature": 0,
    }
    answer = httpx.post(f"{address}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text


# The command, with a switch of bundles that stands still at the moment named first, and says so on
# a line of its own.
PAUSED = """
import sys
from draftwell.serving.server import main
from draftwell.serving.server.feedback import persistence
from draftwell.serving.server.model import loading
from draftwell.serving.server.model.snapshots import Snapshots

moment = sys.argv.pop(1)
persistence.STATE_SECONDS = 0.2
load, follow = loading.from_bundle, Snapshots.follow

def pause():
    print("paused", flush=True)
    sys.stdin.read()

def from_bundle(settings, serving_now=None):
    if serving_now is not None and moment == "the next bundle is read":
        pause()
    made = load(settings, serving_now)
    if serving_now is not None and moment == "the next bundle is loaded":
        pause()
    return made

def following(self, pool, origin):
    switched = self._kept is not None
    if switched and moment == "the next bundle serves":
        pause()
    follow(self, pool, origin)
    self.save()
    if switched and moment == "its state is written":
        pause()

loading.from_bundle, Snapshots.follow = from_bundle, following
main.main()
"""
MOMENTS = (
    "in a stream",
    "the link has moved",
    "the next bundle is read",
    "the next bundle is loaded",
    "the next bundle serves",
    "its state is written",
)


def written(state: Path) -> Snapshot | None:
    """What is kept, once something is."""
    return read_snapshot(state / "everybody.json") if (state / "everybody.json").exists() else None


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
def test_after_kill_9_in_the_middle_the_next_start_is_clean(
    tmp_path: Path, tiny_models: dict[Role, Path], moment: str
) -> None:
    """On the same folders and link: the state that was written last and the spool are whole, and
    the link decides what serves."""
    state, spool, link = tmp_path / "state", tmp_path / "spool", tmp_path / "current"
    for number, tau in ((1, 0.6), (2, 0.5)):
        make_bundle(
            tmp_path / f"{number}-cpu",
            tiny_models,
            "spide",
            {"tau": tau},
            machine=device_class("cpu"),
        )
    link.symlink_to("1-cpu")
    options = [
        "--bundle",
        str(link),
        "--port",
        "0",
        "--threads",
        "1",
        "--state-dir",
        str(state),
        "--feedback-dir",
        str(spool),
        "--feedback-rate",
        "1",
    ]
    with server_process(
        [sys.executable, "-c", PAUSED, moment, *options], stdin=subprocess.PIPE
    ) as (server, address):
        ask(address, "the man")
        kept = wait_until(lambda: written(state), "the first snapshot is written")
        if moment == "in a stream":
            body = {
                "model": "tiny",
                "prompt": "the man",
                "max_tokens": 200,
                "n": 64,
                "stream": True,
                "temperature": 0,
            }
            lines = []
            with (
                suppress(httpx.HTTPError),
                httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=60) as answer,
            ):
                for line in answer.iter_lines():
                    lines.append(line)
                    server.kill()
            assert lines
            assert "data: [DONE]" not in lines
        else:
            (tmp_path / ".new").symlink_to("2-cpu")
            (tmp_path / ".new").replace(link)
            if moment != "the link has moved":
                assert server.stdout is not None
                assert server.stdout.readline() == "paused\n"
            server.kill()
        assert server.wait(60) == -signal.SIGKILL
    old, new = (
        SnapshotOrigin.of(open_bundle(tmp_path / f"{number}-cpu").manifest) for number in (1, 2)
    )
    left = written(state)
    assert left is not None
    assert kept.origin == old
    assert left.origin == (new if moment == "its state is written" else old)
    with server_process([*ENTRY, *options]) as (server, address):
        health = httpx.get(f"{address}/health", timeout=60).json()
        assert (health["status"], health["switches"], health["last_switch_error"]) == (
            "ok",
            0,
            None,
        )
        ask(address, "another man")
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
    now = written(state)
    assert now is not None
    if moment == "in a stream":
        assert left.learnt.table is not None
        assert now.learnt.table is not None
        assert now.origin == old
        assert sum(now.learnt.table[0]) > sum(left.learnt.table[0]), "it goes on from there"
    else:
        assert now.origin == new
    assert not [
        path
        for folder in (state, spool)
        for path in folder.iterdir()
        if path.name.startswith(".") and path.name != ".lock"
    ]
    assert TraceSet(spool).read(["prompt_id"]).num_rows > 0


@pytest.mark.slow
def test_state_and_feedback_of_a_server_that_is_stopped_and_one_that_is_killed(
    tmp_path: Path, bundle: Path
) -> None:
    """SIGTERM writes what is left; after kill -9 the next start is clean and goes on with what was
    written last."""
    state, spool = tmp_path / "state", tmp_path / "spool"
    command = [
        *entry_with(state_seconds=0.2),
        "--bundle",
        str(bundle),
        "--port",
        "0",
        "--max-context",
        "128",
        "--threads",
        "1",
        "--state-dir",
        str(state),
        "--feedback-dir",
        str(spool),
        "--feedback-rate",
        "1",
    ]
    counts = []
    for how in (signal.SIGTERM, signal.SIGKILL, signal.SIGTERM):
        with server_process(command) as (server, address):
            for i in range(3):
                ask(address, f"the {how} man {len(counts)} {i}")
            server.send_signal(how)
            assert server.wait(60) == (0 if how == signal.SIGTERM else -signal.SIGKILL)
        if how == signal.SIGTERM:
            bins = read_snapshot(state / "everybody.json").learnt.table
            assert bins is not None
            counts.append(sum(bins[0]))
            assert not [
                path
                for folder in (state, spool)
                for path in folder.iterdir()
                if path.name.startswith(".") and path.name != ".lock"
            ]
    assert 50 * 20 < counts[0] < counts[1]
    assert len(set(TraceSet(spool).read(["prompt_id"]).column("prompt_id").to_pylist())) >= 6
