"""A server and its clients; a module that needs another model overrides `served`."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import openai
import pytest

from draftwell.serving.server.model.served_model import ServedModel
from tests.support.server.served_pair import served_pair, serving


@pytest.fixture(scope="module")
def served() -> ServedModel:
    return served_pair("vanilla_sd", slots=3, num_speculative_tokens=4)


@pytest.fixture(scope="module")
def url(served: ServedModel) -> Iterator[str]:
    with serving(served) as (address, _):
        yield address


@pytest.fixture(scope="module")
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=100) as client:
        yield client


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=100, http_client=httpx.Client()
    ) as client:
        yield client
