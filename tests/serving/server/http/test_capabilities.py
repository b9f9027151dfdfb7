"""What a request may choose: strategies, and thresholds where the server was started to allow
it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from draftwell.serving.runtime.session.session import UNLIMITED
from draftwell.serving.runtime.strategies import build_strategy
from draftwell.serving.server.http.keys import Keys
from draftwell.serving.server.http.security import Security
from draftwell.serving.server.http.service import with_parameters
from tests.support.server.browser import Page, browsing, find_browser
from tests.support.server.served_pair import MAX_CONTEXT, served_pair, serving

BODY = {"model": "tiny", "prompt": "hello there", "max_tokens": 32, "temperature": 0}


@pytest.fixture(scope="module")
def open_server() -> Iterator[httpx.Client]:
    """Lets requests change parameters."""
    with (
        serving(
            served_pair("vanilla_sd", slots=2, num_speculative_tokens=4), allow_parameters=True
        ) as (url, _),
        httpx.Client(base_url=url, timeout=60) as http,
    ):
        yield http


@pytest.fixture(scope="module")
def closed_server() -> Iterator[httpx.Client]:
    """Has a key, and lets nobody change parameters."""
    served = served_pair("vanilla_sd", slots=2, num_speculative_tokens=4)
    with (
        serving(served, security=Security(keys=Keys.of("s3cret"))) as (url, _),
        httpx.Client(base_url=url, timeout=60) as http,
    ):
        yield http


def complete(http: httpx.Client, key: str | None = None, **speculation: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return http.post("/v1/completions", json=BODY | {"speculation": speculation}, headers=headers)


def test_every_strategy_is_offered_with_the_values_it_runs_with(open_server: httpx.Client) -> None:
    offer = open_server.get("/v1/speculation").json()
    assert (offer["model"], offer["default"], offer["max_context"], offer["allow_parameters"]) == (
        "tiny",
        "vanilla_sd",
        MAX_CONTEXT,
        True,
    )
    tuned, plain = offer["strategies"]
    assert (tuned["name"], tuned["lossless"], plain["name"], plain["parameters"]) == (
        "vanilla_sd",
        True,
        "autoregressive",
        {},
    )
    gamma = tuned["parameters"]["num_speculative_tokens"]
    assert (gamma["value"], gamma["default"], gamma["minimum"], gamma["maximum"]) == (4, 5, 1, 32)


def test_a_parameter_changes_this_request_and_no_other(open_server: httpx.Client) -> None:
    before = complete(open_server).json()
    short = complete(open_server, parameters={"num_speculative_tokens": 1}).json()
    assert short["choices"][0]["text"] == before["choices"][0]["text"], (
        "lossless, whatever the draft's length"
    )
    assert (
        short["speculation"]["mean_acceptance_length"]
        <= 2
        < before["speculation"]["mean_acceptance_length"]
    )
    assert (
        complete(open_server).json()["speculation"]["drafted"] == before["speculation"]["drafted"]
    )


def test_changed_parameters_hold_for_a_request_alone_and_the_table_beside_others() -> None:
    strategy = build_strategy("vanilla_sd", {"num_speculative_tokens": 5})
    strategy.draft_length_by_batch = {1: 5, 2: 3, 4: 0}
    changed = with_parameters(strategy, {"num_speculative_tokens": 10}, allowed=True)
    assert [changed.draft_limit(running) for running in (1, 2, 3)] == [UNLIMITED, 3, 0]


@pytest.mark.parametrize(
    ("strategy", "parameter"), [("spide", "calibrated"), ("csd", "calibration_share")]
)
def test_a_request_cannot_start_state_of_its_own(strategy: str, parameter: str) -> None:
    """It would learn for itself alone, and copy a memory on the scheduler's thread."""
    with (
        serving(served_pair(strategy, slots=2), allow_parameters=True) as (url, _),
        httpx.Client(base_url=url, timeout=60) as http,
    ):
        answer = complete(http, parameters={parameter: 0})
    assert answer.status_code == 400
    assert parameter in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("parameters", "telling"),
    [
        ({"num_speculative_tokens": 33}, "num_speculative_tokens"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens"),
        ({"num_speculative_tokens": "many"}, "num_speculative_tokens"),
        ({"gama": 3}, "gama"),
        ({f"p{i}": i for i in range(33)}, "parameters"),
        ({"num_speculative_tokens": [4]}, "parameters"),
    ],
)
def test_what_is_out_of_bounds_is_refused_by_name(
    open_server: httpx.Client, parameters: dict[str, Any], telling: str
) -> None:
    answer = complete(open_server, parameters=parameters)
    assert answer.status_code == 400
    assert telling in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"].startswith("speculation.parameters")


def test_numbers_that_are_none_are_refused(open_server: httpx.Client) -> None:
    body = (
        b'{"model": "tiny", "prompt": "x", "speculation": {"parameters": '
        b'{"num_speculative_tokens": NaN}}}'
    )
    assert (
        open_server.post(
            "/v1/completions", content=body, headers={"Content-Type": "application/json"}
        ).status_code
        == 400
    )


def test_parameters_are_refused_unless_the_server_allows_them(closed_server: httpx.Client) -> None:
    answer = complete(closed_server, "s3cret", parameters={"num_speculative_tokens": 1})
    assert answer.status_code == 403
    assert answer.json()["error"]["code"] == "parameters_not_allowed"
    assert "--allow-parameters" in answer.json()["error"]["message"]
    assert complete(closed_server, "s3cret", parameters={}).status_code == 200


def test_the_page_is_open_and_what_it_asks_for_is_not(closed_server: httpx.Client) -> None:
    assert (
        closed_server.get("/").status_code == closed_server.get("/page/app.js").status_code == 200
    )
    for path in (
        "/v1/speculation",
        "/v1/models",
        "/metrics",
        "/metrics/grafana.json",
        "/page",
        "/pages/app.js",
    ):
        assert closed_server.get(path).status_code == 401, path
    assert closed_server.get("/page/%2e%2e/v1/models").status_code == 404
    assert (
        closed_server.get("/v1/speculation", headers={"Authorization": "Bearer s3cret"}).json()[
            "allow_parameters"
        ]
        is False
    )


@pytest.mark.skipif(find_browser() is None, reason="no Chromium on PATH or in DRAFTWELL_CHROMIUM")
def test_the_page_against_the_server_itself(
    open_server: httpx.Client, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Real tokens: the text is the API's, the figures are the server's, both decodings agree,
    thresholds arrive."""
    traced = complete(open_server, trace=True).json()
    origins = [token["origin"] for token in traced["speculation"]["tokens"]]
    with browsing(find_browser() or "", tmp_path_factory.mktemp("profile")) as page:
        page.open(str(open_server.base_url) + "/")
        page.wait("!document.querySelector('#strategy').disabled")
        run_plainly(page)
        assert (
            page.text("#speculative .output")
            == page.text("#plain .output")
            == traced["choices"][0]["text"]
        )
        shown = page.run(
            "[...document.querySelectorAll('.legend b')].map((b) => parseInt(b.textContent))"
        )
        assert shown == [
            origins.count(origin) for origin in ("accepted", "rescued", "recovered", "target")
        ]
        assert shown[0] > 0
        assert page.text("#speculative [data-figure=calls]") == str(
            traced["speculation"]["target_calls"]
        )
        assert (
            page.text("#speculative [data-figure=acceptance]")
            == f"{round(traced['speculation']['acceptance_rate'] * 100)} %"
        )
        assert page.text("#plain [data-figure=tokens]") == "32"
        assert "Both texts are the same." in page.text("#verdict")
        page.fill("#parameter-num_speculative_tokens", "1")
        run_plainly(page)
        assert 1 < float(page.text("#speculative [data-figure=length]")) <= 2
        assert page.complaints == []


def run_plainly(page: Page) -> None:
    """The body of these tests, asked by the page."""
    page.click("[value=completion]")
    page.fill("#prompt", BODY["prompt"])
    page.fill("#max-tokens", str(BODY["max_tokens"]))
    page.click("#run")
    page.wait(
        "!document.querySelector('#run').disabled && "
        "/^(Done|Not)/.test(document.querySelector('#status').textContent)"
    )
    assert page.text("#status").startswith("Done")
