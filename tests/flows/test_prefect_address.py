"""An address in PREFECT_API_URL that is not Prefect's API is one line, within seconds."""

from __future__ import annotations

import time

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from draftwell.flows.failures import check_prefect
from tests.support.errors import raises_code
from tests.support.server.answering import answering

WRONG = {
    "a page, as without /api": (200, "text/html", "<html>Prefect</html>"),
    "another service": (200, "application/json", '{"status": "ok"}'),
    "no such page": (404, "application/json", '{"detail": "Not Found"}'),
    "a proxy without a server": (502, "text/html", "<html>no</html>"),
    "another address": (301, "text/html", ""),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_not_prefects_api_is_told_with_the_address_that_is_expected(name: str) -> None:
    began = time.monotonic()
    with (
        answering(*WRONG[name], {"Location": "/elsewhere"}) as address,
        temporary_settings({PREFECT_API_URL: address}),
        raises_code("not_prefect", address, "/api"),
    ):
        check_prefect()
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("address", ["localhost:4200/api", "htp://localhost/api"])
def test_an_address_without_a_scheme_is_refused(address: str) -> None:
    with temporary_settings({PREFECT_API_URL: address}), raises_code("not_prefect", address):
        check_prefect()


@pytest.mark.parametrize(
    "answer", [(200, "application/json", '"3.8.8"'), (401, "text/html", "who?")]
)
def test_prefects_api_and_one_that_asks_for_a_password_pass(answer: tuple[int, str, str]) -> None:
    with answering(*answer, {}) as address, temporary_settings({PREFECT_API_URL: f"{address}/api"}):
        check_prefect()
