"""The page's files: small, self-contained, under a strict policy. What they do in a browser is in
test_server_page."""

from __future__ import annotations

import re

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from draftwell.serving.server.http.errors import install_error_handlers
from draftwell.serving.server.http.page import FOLDER, TYPES, page_router

FILES = sorted(path for path in FOLDER.iterdir() if path.suffix in TYPES)
LARGEST_PAGE = 30_000  # bytes, all files together


@pytest.fixture(scope="module")
def client() -> TestClient:
    app = FastAPI()
    install_error_handlers(app)
    app.include_router(page_router())
    return TestClient(app)


def policy(client: TestClient, path: str) -> dict[str, str]:
    """Directive → value of the Content-Security-Policy."""
    rules = client.get(path).headers["content-security-policy"].split(";")
    return dict(rule.strip().split(" ", 1) for rule in rules)


def test_the_page_is_small() -> None:
    assert {path.suffix for path in FILES} == set(TYPES)
    assert sum(path.stat().st_size for path in FILES) < LARGEST_PAGE


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_files_fetch_from_nowhere_else(path: str) -> None:
    text = path.read_text(encoding="utf-8")  # type: ignore[attr-defined]
    # the name of SVG, which nobody fetches
    assert set(re.findall(r"(?:https?:)?//[\w.]+\.\w+", text)) <= {"http://www.w3.org"}
    assert not re.search(r"\son\w+=|<style|style=|javascript:", text), (
        "an inline script or style, which the policy refuses"
    )


@pytest.mark.parametrize(
    "path", [path for path in FILES if path.suffix == ".js"], ids=lambda path: path.name
)
def test_scripts_make_no_html_of_strings(path: str) -> None:
    text = path.read_text(encoding="utf-8")  # type: ignore[attr-defined]
    assert not re.search(
        (
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new "
            r"Function|localStorage|cookie"
        ),
        text,
    )


@pytest.mark.parametrize("path", ["/", *(f"/page/{path.name}" for path in FILES)])
def test_every_file_is_served_under_the_policy(client: TestClient, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 200
    assert (
        answer.content
        == (FOLDER / (path.removeprefix("/page/").strip("/") or "index.html")).read_bytes()
    )
    assert answer.headers["x-content-type-options"] == "nosniff"
    rules = policy(client, path)
    assert (
        rules["default-src"]
        == rules["base-uri"]
        == rules["form-action"]
        == rules["frame-ancestors"]
        == "'none'"
    )
    assert all(rules[f"{kind}-src"] == "'self'" for kind in ("script", "style", "img", "connect"))
    assert rules["require-trusted-types-for"] == "'script'"


@pytest.mark.parametrize(
    "name", ["__init__.py", "..%2Fapp.py", "%2e%2e/app.py", "missing.js", "%2Fetc%2Fpasswd", ""]
)
def test_nothing_else_is_served(client: TestClient, name: str) -> None:
    answer = client.get(f"/page/{name}")
    assert answer.status_code == 404
    assert str(FOLDER) not in answer.text


def test_what_the_page_names_is_there(client: TestClient) -> None:
    named = {
        name
        for path in FILES
        for name in re.findall(
            r'["\']\./((?:page/)?[\w]+\.(?:js|css|svg))', path.read_text(encoding="utf-8")
        )
    }
    assert len(named) == 5
    # those that scripts name are beside them
    assert all(client.get(f"/page/{name.split('/')[-1]}").status_code == 200 for name in named)


def test_no_address_begins_at_the_hosts_root() -> None:
    """Behind a proxy's prefix that would be another server's."""
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r'(?:src=|href=|from |import\()"/', text), path.name
        assert not re.search(r"fetch\((?!addressOf\()", text), path.name
