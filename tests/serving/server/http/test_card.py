"""The card of the bundle that serves, at `/card`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from draftwell.components.card.page import card_html
from draftwell.registry.bundles.build import add_card
from draftwell.serving.bundle.bundle import FileRecord, Manifest
from draftwell.serving.bundle.card import CARD_JSON, CARD_PAGE, MOST_BYTES, read_card_files
from draftwell.serving.server.app import create_app
from draftwell.serving.server.http.keys import Keys
from draftwell.serving.server.http.page import policy_of
from draftwell.serving.server.http.security import Security
from draftwell.serving.server.model.served_model import ServedModel
from tests.support.cards import CARD
from tests.support.server.bundles import load_bundle, make_bundle, save_tiny_models
from tests.support.server.served_pair import served_pair

FILES = {CARD_JSON: CARD.model_dump_json().encode(), CARD_PAGE: card_html(CARD).encode()}


@pytest.fixture(scope="module")
def served() -> ServedModel:
    return served_pair("vanilla_sd", slots=2, num_speculative_tokens=4)


@pytest.fixture
def with_card(served: ServedModel, monkeypatch: pytest.MonkeyPatch) -> ServedModel:
    monkeypatch.setattr(served, "card", FILES)
    return served


def rules_of(header: str) -> dict[str, str]:
    """Directive → value of a policy."""
    return {rule.split()[0]: rule.strip().partition(" ")[2] for rule in header.split(";")}


def test_the_card_is_served_under_a_policy_of_its_own(with_card: ServedModel) -> None:
    client = TestClient(create_app(with_card))
    page = client.get("/card")
    assert (page.status_code, page.content) == (200, FILES[CARD_PAGE])
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.headers["x-content-type-options"] == "nosniff"
    rules = rules_of(page.headers["content-security-policy"])
    assert rules["default-src"] == rules["frame-ancestors"] == rules["form-action"] == "'none'"
    assert re.fullmatch(r"'sha256-[A-Za-z0-9+/]{43}='", rules["style-src"])
    assert "sandbox" in rules
    assert "unsafe" not in page.headers["content-security-policy"]

    data = client.get("/card.json")
    assert (data.status_code, data.content) == (200, FILES[CARD_JSON])
    assert data.headers["content-type"] == "application/json"
    assert data.headers["x-content-type-options"] == "nosniff"
    assert client.get("/v1/speculation").json()["card"] is True


def test_a_page_without_styles_may_have_none() -> None:
    assert rules_of(policy_of(b"<p>text"))["style-src"] == "'none'"
    two = rules_of(policy_of(b"<style>a{}</style><style>b{}</style>"))["style-src"]
    assert len(two.split()) == 2


def test_a_bundle_without_a_card_works_as_before(served: ServedModel) -> None:
    client = TestClient(create_app(served))
    for path in ("/card", "/card.json"):
        answer = client.get(path)
        assert answer.status_code == 404
        assert "error" in answer.json()
    assert client.get("/v1/speculation").json()["card"] is False
    assert client.get("/").status_code == 200


def test_the_card_of_the_bundle_that_serves_now_is_shown(
    served: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = TestClient(create_app(served))
    assert client.get("/card").status_code == 404
    monkeypatch.setattr(served, "card", FILES)
    assert client.get("/card").status_code == 200


def test_a_server_with_keys_shows_its_card_to_those_who_have_one(with_card: ServedModel) -> None:
    client = TestClient(create_app(with_card, security=Security(keys=Keys.of("s3cret"))))
    for path in ("/card", "/card.json"):
        assert client.get(path).status_code == 401
        assert client.get(path, headers={"Authorization": "Bearer s3cret"}).status_code == 200


@pytest.mark.slow  # loads two models
def test_the_card_comes_from_the_bundle(tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path / "bundle", save_tiny_models(tmp_path / "models"), "vanilla_sd")
    add_card(bundle, FILES)
    client = TestClient(create_app(load_bundle(bundle)))
    assert client.get("/card").content == FILES[CARD_PAGE]
    assert client.get("/card.json").content == FILES[CARD_JSON]


def test_only_a_whole_card_of_a_fit_size_is_read(tmp_path: Path) -> None:
    def manifest(**sizes: int) -> Manifest:
        names = {"json": CARD_JSON, "html": CARD_PAGE}
        return Manifest.model_construct(
            files={names[kind]: FileRecord(sha256="", size=size) for kind, size in sizes.items()}
        )

    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    assert read_card_files(tmp_path, manifest(json=1, html=MOST_BYTES)) == FILES
    assert read_card_files(tmp_path, manifest(json=1, html=MOST_BYTES + 1)) == {}
    assert read_card_files(tmp_path, manifest(html=1)) == {}
    assert read_card_files(tmp_path, manifest()) == {}
