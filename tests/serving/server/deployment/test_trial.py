"""A new bundle answers the last requests before it serves, and is taken back where it fails its
first ones."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from draftwell.serving.errors import ContextTooLong, DraftwellError, InvalidRequest, OutOfMemory
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.session.stats import Stats
from draftwell.serving.runtime.strategies import build_strategy
from draftwell.serving.server.app import create_app
from draftwell.serving.server.deployment import deployments as deployments_module
from draftwell.serving.server.deployment.deployments import Deployments
from draftwell.serving.server.deployment.mirror import KEPT, LONGEST_PROMPT, Mirror
from draftwell.serving.server.deployment.trial import ENDS, Trial
from draftwell.serving.server.model.loading import NO_ROOM
from draftwell.serving.server.model.served_model import ServedModel
from draftwell.serving.server.scheduling.admission import QueueFull
from draftwell.serving.server.scheduling.ticket import (
    CANCELLED,
    DeadlineExceeded,
    End,
    Event,
    Failure,
    Ticket,
)
from tests.support.server.served_pair import TunedModel, running, served_pair, tiny_pair
from tests.support.server.server_process import wait_until

BODY = {"model": "tiny", "prompt": "hello", "max_tokens": 4, "temperature": 0}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
BROKEN = "a broken one"


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[httpx.Client, Deployments]]:
    monkeypatch.setattr(deployments_module, "TRIAL_SECONDS", 60.0)
    app = create_app(served_pair("vanilla_sd", slots=2), drain_seconds=10)
    with running(app) as url, httpx.Client(base_url=url, timeout=60) as http:
        yield http, app.state.deployments
        app.state.deployments._trial.settle()


def other(version: str = "8") -> ServedModel:
    """Another bundle with models of its own."""
    new = served_pair("vanilla_sd", slots=2)
    new.version = version
    return new


def failing_on(served: ServedModel, tokens: int) -> ServedModel:
    """It fails where a prompt has so many tokens."""
    target = served.pair.models["target"]
    forward = target.forward

    def forward_or_fail(commands: Any) -> Any:
        if any(len(command.tokens) == tokens for command in commands):
            raise RuntimeError("a kernel for this length is broken")
        return forward(commands)

    target.forward = forward_or_fail  # type: ignore[method-assign]
    return served


def test_a_new_bundle_that_fails_what_clients_asked_last_is_refused(
    client: tuple[httpx.Client, Deployments],
) -> None:
    http, deployments = client
    tokens = len(deployments.current.served.encode(BROKEN))
    assert http.post("/v1/chat/completions", json=CHAT).status_code == 200
    assert http.post("/v1/completions", json=BODY | {"prompt": BROKEN}).status_code == 200
    before = deployments.current
    assert not deployments.switch(lambda old: failing_on(other(), tokens))
    assert "does not answer" in str(deployments.last_switch_error)
    assert deployments.current is before
    assert not deployments.worth_another_try
    assert deployments.switch(lambda old: other()), "one that answers all of them is taken"


def test_a_prompt_that_is_too_long_for_the_new_bundle_refuses_it_not(
    client: tuple[httpx.Client, Deployments],
) -> None:
    http, deployments = client
    assert http.post("/v1/completions", json=BODY | {"prompt": "long " * 20}).status_code == 200
    small = TunedModel("tiny", tiny_pair(2, context=64), build_strategy("vanilla_sd"), 2)
    assert deployments.switch(lambda old: small)


def test_a_new_bundle_that_fails_its_first_requests_is_taken_back(
    client: tuple[httpx.Client, Deployments],
) -> None:
    http, deployments = client
    old = deployments.current
    old.served.version = "7"
    tokens, follows = len(old.served.encode(BROKEN)), []
    assert deployments.switch(
        lambda served: failing_on(other(), tokens), lambda served: follows.append(served.version)
    )
    taken = deployments.current.scheduler
    statuses: dict[str, list[int]] = {BROKEN: [], "hello": []}
    for number in range(5):
        prompt = (BROKEN, "hello")[number % 2]
        answer = http.post("/v1/completions", json=BODY | {"prompt": prompt})
        statuses[prompt].append(answer.status_code)
    assert statuses == {BROKEN: [500] * 3, "hello": [200] * 2}
    wait_until(lambda: deployments.current is old, "the old one serves again", 30)
    assert http.post("/v1/completions", json=BODY | {"prompt": BROKEN}).status_code == 200
    wait_until(lambda: follows == ["8", "7"], "state is the old one's again", 30)
    said = http.get("/health").json()["last_switch_error"]
    assert "tiny 8 failed 3 of 5 requests" in said
    assert "tiny 7 serves again" in said
    wait_until(lambda: not taken.alive, "the new one ends", 30)


def test_the_next_switch_ends_a_trial(client: tuple[httpx.Client, Deployments]) -> None:
    _, deployments = client
    first = deployments.current.scheduler
    assert deployments.switch(lambda old: other("8"))
    assert first.alive, "it could serve again"
    assert deployments.switch(lambda old: other("9"))
    wait_until(lambda: not first.alive, "the first one ends", 30)
    assert deployments.current.served.version == "9"
    assert deployments.last_switch_error is None


def test_a_refused_switch_does_not_end_a_trial(
    client: tuple[httpx.Client, Deployments],
) -> None:
    """However it is refused: the bundle on trial is still taken back where it fails."""
    http, deployments = client
    old = deployments.current
    tokens = len(old.served.encode(BROKEN))
    assert deployments.switch(lambda served: failing_on(other(), tokens))

    def refuse(code: str) -> Any:
        def load(served: ServedModel) -> ServedModel:
            raise DraftwellError("refused", code=code)

        return load

    def unable(served: ServedModel) -> ServedModel:
        return failing_on(other("9"), len(served.encode("Hello")))

    for load in (refuse("unsafe_bundle"), refuse(NO_ROOM), unable):
        assert http.post("/v1/completions", json=BODY | {"prompt": "Hello"}).status_code == 200
        assert not deployments.switch(load)
    for _ in range(3):
        assert http.post("/v1/completions", json=BODY | {"prompt": BROKEN}).status_code == 500
    wait_until(lambda: deployments.current is old, "the old one serves again", 30)
    assert http.post("/v1/completions", json=BODY | {"prompt": BROKEN}).status_code == 200


def test_a_bundle_that_shares_models_which_are_taken_back_meanwhile_is_tried_again(
    client: tuple[httpx.Client, Deployments],
) -> None:
    http, deployments = client
    old = deployments.current
    tokens = len(old.served.encode(BROKEN))
    assert deployments.switch(lambda served: failing_on(other(), tokens))
    taken = deployments.current.scheduler

    def load(served: ServedModel) -> ServedModel:
        for _ in range(3):
            assert http.post("/v1/completions", json=BODY | {"prompt": BROKEN}).status_code == 500
        wait_until(lambda: deployments.current is old, "the old one serves again", 30)
        time.sleep(0.3)  # it would have ended
        return TunedModel("tiny", served.pair, build_strategy("autoregressive"), served.slots)

    assert not deployments.switch(load)
    assert deployments.worth_another_try
    assert "was taken back" in str(deployments.last_switch_error)
    assert deployments.current is old
    wait_until(lambda: not taken.alive, "it ends then", 30)
    assert deployments.switch(lambda served: other("9")), "models of its own are taken"


def test_memory_that_an_old_bundle_still_has_is_worth_another_try(
    client: tuple[httpx.Client, Deployments],
) -> None:
    _, deployments = client

    def refuse(old: ServedModel) -> ServedModel:
        raise DraftwellError("there is no room", code=NO_ROOM)

    assert not deployments.switch(refuse)
    assert not deployments.worth_another_try
    with deployments.use():  # a request that is not submitted yet
        assert deployments.switch(lambda old: other())
        assert not deployments.switch(refuse)
        assert deployments.worth_another_try


def ticket(served: object, own: bool = False, body: Any = None, **changes: Any) -> Ticket:
    made = Ticket(changes.get("prompt", [1]), Sampling(), None, print, body=body)  # type: ignore[arg-type]
    made.served, made.own = served, own
    made.owner = ("everybody", changes.get("salt", ""))
    return made


DONE = End("stop", 1, Stats())
BAD = Failure(RuntimeError("it fails"))


@pytest.mark.parametrize(
    ("events", "fault"),
    [
        ([BAD] * 3, "3 of 3"),
        ([BAD] * 2 + [DONE] * 3, None),
        ([DONE] * 27 + [BAD] * 3, None),
        ([DONE] * 20 + [BAD] * 3, "3 of 23"),
        ([Failure(InvalidRequest("no")), Failure(ContextTooLong("long"))] * 5, None),
        ([Failure(DeadlineExceeded("late")), Failure(QueueFull(1)), CANCELLED] * 5, None),
        ([Failure(OutOfMemory("two bundles are there"))] * 5, None),
        ([DONE] * ENDS + [BAD] * 10, None),
    ],
)
def test_faults_of_the_server_alone_count(events: list[Event], fault: str | None) -> None:
    trial, served = Trial(), object()
    trial.finished(ticket(None), BAD)
    trial.begin(served)  # type: ignore[arg-type]
    for event in events:
        if trial._over.is_set():
            break
        trial.finished(ticket(served), event)
        for strange in (ticket(object()), ticket(served, own=True)):
            trial.finished(strange, BAD)
    found = trial.fault(0)
    assert (found is None) == (fault is None)
    assert fault is None or fault in str(found)
    trial.finished(ticket(served), BAD)
    assert trial._ends <= ENDS


def test_the_mirror_keeps_the_last_requests_that_were_answered() -> None:
    mirror = Mirror()
    for number in range(KEPT + 3):
        mirror.finished(ticket(None, body={"prompt": str(number)}), DONE)
    for one, event in (
        (ticket(None, body=None), DONE),
        (ticket(None, body={"prompt": "x"}), BAD),
        (ticket(None, body={"prompt": "x"}, own=True), DONE),
        (ticket(None, body={"prompt": "x"}, salt="mine"), DONE),
        (ticket(None, body={"prompt": "x"}, prompt=[1] * (LONGEST_PROMPT + 1)), DONE),
    ):
        mirror.finished(one, event)
    assert [one.body["prompt"] for one in mirror.requests()] == [
        str(number) for number in range(3, KEPT + 3)
    ]
