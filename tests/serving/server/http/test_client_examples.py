"""Clients that people have, in an environment of their own, unchanged: what docs/clients.md says of
them.

DRAFTWELL_CLIENTS names the interpreters that have them, separated by colons, and
DRAFTWELL_CLIENTS_PAGE=1 writes the page.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.serving.server.http.client_examples import CLIENTS, EXAMPLES
from tests.support.paths import REPO
from tests.support.server.served_pair import calling_pair, serving

PAGE = REPO / "docs" / "clients.md"
INTERPRETERS = "DRAFTWELL_CLIENTS"
SECONDS = 300
WORKS = "works"
HEAD = """# Clients

Clients as they come from the package index, unchanged, against a server whose model writes at
random: the first example of each one's documentation, its tools, its structured output, its stream.

```bash
DRAFTWELL_CLIENTS=/path/to/environment/bin/python DRAFTWELL_CLIENTS_PAGE=1 \\
    pytest -m slow tests/serving/server/http/test_client_examples.py    # writes this page
```

Each takes the server's address with `/v1`, Anthropic's without, and any text as its key where the
server needs none. "works" for tools is a call with the arguments of its schema, read by the client;
llm, and pydantic-ai's loop of calls, cannot require one, so there the tools are sent and the answer
is text. openai-agents' model of responses takes an answer that `max_tokens` cuts for an error.

| client | version | first example | tools | structured output | streaming |
|---|---|---|---|---|---|
"""
LIST = (
    "import importlib.metadata as m, json;"
    "print(json.dumps({one.name: one.version for one in m.distributions()}))"
)
CASES = [(client, name) for client in CLIENTS for name in EXAMPLES]


def interpreter_environment() -> dict[str, str]:
    """Without what makes another interpreter import this project's packages."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


@cache
def installed() -> dict[str, tuple[str, str]]:
    """Client → the first interpreter that has it, and its version."""
    found: dict[str, tuple[str, str]] = {}
    for python in filter(None, os.environ.get(INTERPRETERS, "").split(os.pathsep)):
        done = subprocess.run(
            [python, "-c", LIST],
            capture_output=True,
            text=True,
            check=True,
            env=interpreter_environment(),
        )
        for name, version in json.loads(done.stdout).items():
            found.setdefault(name.lower().replace("_", "-"), (python, version))
    return {client: found[client] for client in CLIENTS if client in found}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(calling_pair()) as (address, _):
        yield address


@pytest.fixture(scope="module")
def results() -> dict[tuple[str, str], str]:
    """Client and example → what is to be said of it."""
    return {}


@pytest.mark.slow
@pytest.mark.parametrize(("client", "name"), CASES)
def test_an_example(
    url: str, results: dict[tuple[str, str], str], client: str, name: str, tmp_path: Path
) -> None:
    example = CLIENTS[client][name]
    if isinstance(example, str):
        results[client, name] = example
        return
    if client not in installed():
        pytest.skip(f"{client} is not installed where {INTERPRETERS} points")
    script = str(Path(__file__).parent / "client_examples.py")
    done = subprocess.run(
        [installed()[client][0], script, url, client, name],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env=interpreter_environment() | {"HOME": str(tmp_path)},
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results[client, name] = WORKS


@pytest.mark.slow
def test_the_page_says_what_was_found(results: dict[tuple[str, str], str]) -> None:
    """Versions may be others than those of the page; what works may not."""
    if len(results) < len(CASES) or len(installed()) < len(CLIENTS):
        pytest.skip(f"not all clients are installed where {INTERPRETERS} points")
    rows = [
        [client, installed()[client][1], *(results[client, name] for name in EXAMPLES)]
        for client in CLIENTS
    ]
    if os.environ.get("DRAFTWELL_CLIENTS_PAGE"):
        PAGE.write_text(HEAD + "".join(f"| {' | '.join(row)} |\n" for row in rows))
    assert [row[:1] + row[2:] for row in written_rows()] == [row[:1] + row[2:] for row in rows]


def written_rows() -> list[list[str]]:
    """Of the page's table."""
    lines = PAGE.read_text().partition("|---")[2].splitlines()[1:]
    return [line.strip("| ").split(" | ") for line in lines if line.startswith("|")]


def test_the_page_has_every_client_and_the_reasons() -> None:
    assert PAGE.read_text().startswith(HEAD)
    for row in written_rows():
        client, version, *cells = row
        assert version[0].isdigit()
        for name, cell in zip(EXAMPLES, cells, strict=True):
            example = CLIENTS[client][name]
            assert cell == (example if isinstance(example, str) else WORKS)
    assert [row[0] for row in written_rows()] == [*CLIENTS]
