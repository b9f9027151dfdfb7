"""Switching what is served while requests come in: none is lost, each is answered by one version,
and a refusal changes nothing."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from draftwell.serving.errors import DraftwellError
from draftwell.serving.runtime.strategies import build_strategy
from draftwell.serving.server.app import create_app
from draftwell.serving.server.deployment import deployments as deployments_module
from draftwell.serving.server.deployment.bundle_watch import BundleWatch, followed
from draftwell.serving.server.deployment.deployment import Deployment
from draftwell.serving.server.deployment.deployments import CountUsers, Deployments
from draftwell.serving.server.http import errors
from draftwell.serving.server.http.errors import without_paths
from draftwell.serving.server.http.keys import Keys
from draftwell.serving.server.http.security import Security
from draftwell.serving.server.model.served_model import ServedModel
from draftwell.serving.server.scheduling.detokenize import TextStream
from draftwell.serving.server.scheduling.observer import Observer
from draftwell.serving.server.scheduling.ticket import End, Event, Ticket
from tests.support.server.served_pair import TunedModel, running, served_pair
from tests.support.server.server_process import wait_until

PLAIN = {"model": "tiny", "prompt": "hello", "max_tokens": 6, "temperature": 0}


@pytest.fixture(autouse=True)
def short_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deployments_module, "TRIAL_SECONDS", 0.02)


def sharing(old: ServedModel, strategy: str, **changes: Any) -> ServedModel:
    """Another version with the same models."""
    return TunedModel("tiny", old.pair, build_strategy(strategy), old.slots, **changes)


@pytest.fixture
def client() -> Iterator[tuple[httpx.Client, Deployments]]:
    app = create_app(served_pair("vanilla_sd", slots=2), drain_seconds=10)
    with running(app) as url, httpx.Client(base_url=url, timeout=60) as http:
        yield http, app.state.deployments


def strategy_of(http: httpx.Client, **change: Any) -> str:
    response = http.post("/v1/completions", json=PLAIN | change)
    assert response.status_code == 200, response.text
    return str(response.json()["speculation"]["strategy"])


class Traffic:
    """Clients that ask all the time, half of them in streams."""

    def __init__(self, url: str, clients: int = 4):
        self.url, self.answers, self.faults, self._over = url, [], [], threading.Event()
        self._threads = [
            threading.Thread(target=self._ask, args=(number % 2 == 1,)) for number in range(clients)
        ]

    def __enter__(self) -> Traffic:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(60)

    def _ask(self, stream: bool) -> None:
        with httpx.Client(base_url=self.url, timeout=60) as http:
            while not self._over.is_set():
                response = http.post("/v1/completions", json=PLAIN | {"stream": stream})
                whole = response.status_code == 200 and (
                    not stream or response.text.rstrip().endswith("[DONE]")
                )
                (self.answers if whole else self.faults).append(response.text)


@pytest.mark.parametrize(
    ("share", "switches", "clients"),
    [
        pytest.param(True, 4, 2, id="shared models"),
        pytest.param(False, 10, 4, id="other models", marks=pytest.mark.slow),
    ],
)
def test_switches_under_steady_requests_lose_none(share: bool, switches: int, clients: int) -> None:
    app = create_app(served_pair("vanilla_sd", slots=2), drain_seconds=10)
    deployments: Deployments = app.state.deployments
    with running(app) as url, Traffic(url, clients) as traffic:
        for number in range(switches):
            name = ("prompt_lookup", "vanilla_sd")[number % 2]
            answered = len(traffic.answers)
            assert deployments.switch(
                lambda old, name=name: sharing(old, name) if share else served_pair(name, slots=2)
            )
            wait_until(
                lambda answered=answered: traffic.faults or len(traffic.answers) >= answered + 2,
                "two more answers come",
            )
            assert not traffic.faults
    assert traffic.faults == []
    assert len(traffic.answers) >= 2 * switches
    texts = {'"strategy":"vanilla_sd"' in text for text in traffic.answers}
    assert texts == {True, False}, "both versions have answered"
    assert deployments.switches == switches
    assert deployments.current.served.strategy.name == "vanilla_sd"


def test_a_request_under_way_is_finished_by_the_version_that_took_it(
    client: tuple[httpx.Client, Deployments],
) -> None:
    http, deployments = client
    old, new, done, follows = (
        deployments.current.scheduler,
        served_pair("prompt_lookup", slots=2),
        [],
        [],
    )
    step, gate = old.engine.step, threading.Event()
    old.engine.step = lambda: (gate.wait(60), step())  # type: ignore[method-assign,return-value]
    asking = threading.Thread(target=lambda: done.append(strategy_of(http, max_tokens=60)))
    asking.start()
    wait_until(lambda: old.running, "the request is decoded")
    switching = threading.Thread(
        target=deployments.switch, args=(lambda served: new, follows.append)
    )
    switching.start()
    wait_until(lambda: deployments.current.scheduler is not old, "the new model serves")
    switching.join(60)
    assert follows == [new], "what is kept is the new one's from now on"
    assert strategy_of(http, max_tokens=2) == "prompt_lookup"
    assert not done, "the old one still works on it, and nobody waits for it"
    gate.set()
    asking.join(60)
    assert done == ["vanilla_sd"]
    wait_until(lambda: not old.alive, "the old scheduler ends")


def test_a_client_that_does_not_read_keeps_no_old_deployment(
    client: tuple[httpx.Client, Deployments],
) -> None:
    _, deployments = client
    old, events = deployments.current, []

    async def stalled() -> None:
        gone = asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            with deployments.use() as now:
                now.scheduler.submit(
                    Ticket(
                        now.served.encode("hello"),
                        now.served.pair.sampling(max_tokens=4),
                        TextStream(now.served.decode),
                        events.append,
                    )
                )
            await gone.wait()

        asking = asyncio.create_task(CountUsers(app, deployments)({"type": "http"}, None, None))
        switching = asyncio.to_thread(
            deployments.switch, lambda served: served_pair("prompt_lookup", slots=2)
        )
        assert await asyncio.wait_for(switching, 30)
        await asyncio.to_thread(
            wait_until, lambda: not old.scheduler.alive, "the old scheduler ends"
        )
        assert isinstance(events[-1], End)
        assert deployments.users == 1
        gone.set()
        await asking

    asyncio.run(stalled())
    assert deployments.users == 0


def test_the_old_models_are_freed() -> None:
    deployments = Deployments(served_pair("vanilla_sd", slots=1))
    deployments.start()
    try:
        old = weakref.ref(deployments.current.served.pair.models["target"])
        assert deployments.switch(lambda served: served_pair("vanilla_sd", slots=1))
        wait_until(lambda: old() is None, "the old models are freed")
    finally:
        deployments.close(5)


def refuse(served: ServedModel) -> ServedModel:
    raise DraftwellError(
        "the bundle /srv/secret/dist/tiny/8-cpu was changed since it was made: deploy again"
    )


def fail(served: ServedModel) -> ServedModel:
    raise RuntimeError("segment /srv/secret/x.bin")


def broken(served: ServedModel) -> ServedModel:
    """It loads, and does not answer."""
    new = served_pair("vanilla_sd", slots=2)
    new.pair.models["target"].forward = fail  # type: ignore[method-assign,assignment]
    return new


@pytest.mark.parametrize(
    ("load", "words"), [(refuse, "8-cpu was changed"), (fail, "x.bin"), (broken, "does not answer")]
)
def test_what_is_refused_changes_nothing(
    client: tuple[httpx.Client, Deployments],
    caplog: pytest.LogCaptureFixture,
    load: Any,
    words: str,
) -> None:
    http, deployments = client
    strategy_of(http)

    def ours() -> set[threading.Thread]:
        return {one for one in threading.enumerate() if one.name.startswith("draftwell-")}

    before, threads = deployments.current, ours()
    with caplog.at_level(logging.ERROR, "draftwell.serving"):
        assert not deployments.switch(load)
    assert deployments.current is before
    assert strategy_of(http) == "vanilla_sd"
    state = http.get("/health").json()
    assert words in state["last_switch_error"]
    assert "/" not in state["last_switch_error"], "no path of the machine in any answer"
    assert (state["status"], state["switches"]) == ("ok", 0)
    (record,) = [one for one in caplog.records if one.levelno >= logging.ERROR]
    assert "\n" not in record.getMessage()
    assert ours() <= threads, "nothing of the refused one is left running"
    assert deployments.switch(lambda old: sharing(old, "prompt_lookup"))
    assert http.get("/health").json()["last_switch_error"] is None


def test_a_shared_switch_keeps_models_engine_and_thread(
    client: tuple[httpx.Client, Deployments],
) -> None:
    http, deployments = client
    before = deployments.current
    assert deployments.switch(lambda old: sharing(old, "prompt_lookup", version="8"))
    now = deployments.current
    assert now.scheduler is before.scheduler
    assert strategy_of(http) == "prompt_lookup"
    state = http.get("/health").json()
    assert (state["version"], state["switches"]) == ("8", 1)


def test_a_request_keeps_the_deployment_that_it_began_with(
    client: tuple[httpx.Client, Deployments],
) -> None:
    """On a shared scheduler a request that came before a switch and is queued after it belongs to
    the old version."""
    _, deployments = client
    with deployments.use() as before:
        assert deployments.switch(lambda old: sharing(old, "prompt_lookup"))
        assert deployments.current is not before
        assert before.service.served is before.served
        assert before.service.scheduler is before.scheduler


def test_a_request_that_is_queued_behind_a_switch_to_other_models_is_answered(
    client: tuple[httpx.Client, Deployments],
) -> None:
    _, deployments = client
    events: list[Event] = []
    with deployments.use() as before:
        assert deployments.switch(lambda served: served_pair("prompt_lookup", slots=2))
        time.sleep(0.2)  # the old models' thread would have ended them by now
        before.scheduler.submit(
            Ticket(
                before.served.encode("hello"),
                before.served.pair.sampling(max_tokens=4),
                TextStream(before.served.decode),
                events.append,
            )
        )
    wait_until(lambda: not before.scheduler.alive, "the old scheduler ends")
    assert isinstance(events[-1], End)


def test_the_check_teaches_the_strategy_nothing_and_names_itself() -> None:
    seen: list[tuple[bool, Any]] = []

    class Ear(Observer):
        def finished(self, ticket: Ticket, event: Event) -> None:
            seen.append((ticket.own, ticket.strategy))

    deployments = Deployments(served_pair("hf_dynamic", slots=1, heuristic=True), observers=[Ear()])
    deployments.start()
    try:
        old = deployments.current.served
        assert deployments.switch(
            lambda served: TunedModel(
                "tiny", served.pair, build_strategy("hf_dynamic", {"heuristic": True}), 1
            )
        )
        assert [own for own, _ in seen] == [True]
        assert seen[0][1] not in (old.strategy, deployments.current.served.strategy)
        assert deployments.current.served.strategy.shared.value == old.strategy.shared.value  # type: ignore[attr-defined]
    finally:
        deployments.close(5)


def test_paths_are_left_out_of_messages() -> None:
    assert without_paths("no file /a/b c/d.bin: x, '/e/f'") == "no file b c/d.bin: x, 'f'"
    assert without_paths("two\nlines") == "two lines"


@pytest.mark.parametrize(
    ("folder", "text", "expected"),
    [
        (
            "/srv/My Bundles/dist/pair/7-cpu",
            "the bundle /srv/My Bundles/dist/pair/7-cpu is damaged",
            "the bundle 7-cpu is damaged",
        ),
        (
            "/srv/My Bundles/dist/pair/7-cpu",
            "no /srv/My Bundles/dist/pair/8-cpu/manifest.json: '/srv/My Bundles/x'",
            "no manifest.json: 'x'",
        ),
        (
            "/home/ann/draftwell (old)/models/x",
            "models in /home/ann/draftwell (old)/models/x, or ('/home/ann/draftwell (old)')",
            "models in x, or ('draftwell (old)')",
        ),
        ("/home/ann's/x", "/home/ann's/x/y and /home/ann's", "y and ann's"),
    ],
)
def test_folders_that_are_known_are_left_out_whatever_their_names_hold(
    monkeypatch: pytest.MonkeyPatch, folder: str, text: str, expected: str
) -> None:
    monkeypatch.setattr(errors, "_folders", set())
    errors.hide_folders(Path(folder))
    assert errors.without_paths(text) == expected


def test_without_a_key_health_says_only_that_a_switch_was_refused() -> None:
    app = create_app(
        served_pair("vanilla_sd", slots=1),
        drain_seconds=10,
        security=Security(keys=Keys.of("secret")),
    )
    with running(app) as url, httpx.Client(base_url=url, timeout=60) as http:
        assert not app.state.deployments.switch(refuse)
        bare, wrong, right = (
            http.get("/health", headers=headers).json()["last_switch_error"]
            for headers in ({}, {"Authorization": "Bearer x"}, {"Authorization": "Bearer secret"})
        )
    assert bare == wrong
    assert bare.startswith("a switch was refused")
    assert "8-cpu" not in bare
    assert "8-cpu" in right


def bundle(folder: Path, text: str = "{}") -> Path:
    folder.mkdir()
    (folder / "manifest.json").write_text(text)
    return folder


def lead(link: Path, to: Path) -> None:
    """As a deployment does it: at no moment is there no link."""
    new = link.with_name(".new")
    new.symlink_to(to.name)
    os.replace(new, link)


def test_a_moved_link_a_replaced_manifest_and_a_signal_are_noticed_once(tmp_path: Path) -> None:
    seven, eight, link, seen = (
        bundle(tmp_path / "7-cpu"),
        bundle(tmp_path / "8-cpu"),
        tmp_path / "current",
        [],
    )
    lead(link, seven)
    watch = BundleWatch(link, seen.append)
    watch.look()
    assert seen == [], "it is the one that is served"
    lead(link, eight)
    for _ in range(3):
        watch.look()
    assert seen == [eight]
    watch.ask()
    for _ in range(3):
        watch.look()
    assert seen == [eight, eight]
    shutil.rmtree(eight)
    watch.look()
    assert seen == [eight, eight], "between two states there is none"
    bundle(eight, "{ }")
    watch.look()
    assert seen == [eight] * 3


def test_a_bundle_that_could_not_be_taken_is_reported_again_with_growing_pauses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, seen, answers = [0.0], [], iter([False, False, True])
    monkeypatch.setattr(
        "draftwell.serving.server.deployment.bundle_watch.time.monotonic", lambda: now[0]
    )
    seven, eight, link = (
        bundle(tmp_path / "7-cpu"),
        bundle(tmp_path / "8-cpu"),
        tmp_path / "current",
    )
    lead(link, seven)
    watch = BundleWatch(link, lambda folder: (seen.append((folder, now[0])), next(answers))[1])
    lead(link, eight)
    for now[0] in range(200):  # the clock
        watch.look()
    assert seen == [(eight, 0), (eight, 10), (eight, 30)], "and once it was taken never again"


def test_a_check_that_ran_out_of_time_is_worth_another_try_and_a_refusal_is_not() -> None:
    deployments = Deployments(served_pair("vanilla_sd", slots=1))  # not started: nobody answers
    check = Deployment.check
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Deployment, "check", lambda self, mirrored: check(self, timeout=-4.9))
        assert not deployments.switch(lambda old: sharing(old, "prompt_lookup"))
    assert deployments.worth_another_try
    assert not deployments.switch(refuse)
    assert not deployments.worth_another_try


def test_a_folder_follows_the_link_beside_it_only_where_that_leads_to_it(tmp_path: Path) -> None:
    seven, eight = bundle(tmp_path / "7-cpu"), bundle(tmp_path / "8-cpu")
    assert followed(seven) == seven
    lead(tmp_path / "current", eight)
    assert followed(seven) == seven, "somebody wants this one"
    assert followed(eight) == tmp_path / "current"
    assert followed(tmp_path / "current") == tmp_path / "current"


def test_the_watch_runs_by_itself_and_ends(tmp_path: Path) -> None:
    seven, eight, link, seen = (
        bundle(tmp_path / "7-cpu"),
        bundle(tmp_path / "8-cpu"),
        tmp_path / "current",
        threading.Event(),
    )
    lead(link, seven)
    watch = BundleWatch(link, lambda folder: seen.set() if folder == eight else None, seconds=0.01)
    watch.start()
    lead(link, eight)
    assert seen.wait(60)
    watch.close()
    watch._thread.join(60)
    assert not watch._thread.is_alive()
