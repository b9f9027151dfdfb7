"""A head's weights in a server that runs: what is refused, undone, and when `current` moves."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from draftwell.components.engines.port import Acceptance, Answer
from draftwell.components.engines.remote.address import EngineAddress
from draftwell.components.prompts.prompt import Prompt
from draftwell.flows.steps.engine import swap
from draftwell.flows.steps.engine.swap import PATH, refuse_more_than_weights, swap_on_engine
from draftwell.serving.errors import DraftwellError
from tests.support.errors import raises_code

KEPT = {"1-cpu": 5, "2-cpu": 8, "3-cpu": 1}
"""Bundle → first tokens of ten that the target keeps of its draft."""
PLACE = "models/head"


class Server:
    """A server that drafts with what was loaded last (an `Engine` with a client)."""

    def __init__(self, bundle: str | None = "tiny/1-cpu"):
        self.bundle, self.client = bundle, self
        self.address = EngineAddress("http://here:1")
        self.loaded: list[str] = []

    def start(self, settings: Any) -> None:
        """It runs."""

    stop = close = lambda self: None

    def find(self, path: str) -> Any:
        return {"bundle": self.bundle} if path == PATH and self.bundle else None

    def ask(self, path: str, body: dict[str, str]) -> dict[str, str]:
        assert body["folder"] == f"{body['bundle'].partition('/')[2]}/{PLACE}"
        self.loaded.append(body["bundle"])
        self.bundle = body["bundle"]
        return body

    def decode(self, prompts: Any, sampling: Any) -> Any:
        kept = KEPT[str(self.bundle).partition("/")[2]]
        acceptance = Acceptance(rounds=10, drafted=10, accepted=kept, accepted_at=(kept,))
        found = Answer(tokens=[1], seconds=1, first_token_seconds=1, acceptance=acceptance)
        return SimpleNamespace(answers=[found])


def bundle_at(home: Path, name: str, **settings: Any) -> Path:
    files = {
        f"{PLACE}/model.safetensors": {"sha256": name},
        f"{PLACE}/config.json": {"sha256": "c"},
        "models/target/model.safetensors": {"sha256": "t"},
        **settings.pop("files", {}),
    }
    gate = {"version": "0.32.0", "device": "cpu", "device_class": "cpu-x"}
    found = {
        **{"release": int(name[0]), "model": "models/target", "port": 8000},
        "speculative": {"method": "eagle3", "model": PLACE, "num_speculative_tokens": 3},
        "gate": gate,
        "tuned": {"by_prompt": [[8, 10]] * 8, "temperature": 0.0},
        **settings,
    }
    (home / name).mkdir(parents=True)
    (home / name / "manifest.json").write_text(json.dumps({"settings": found, "files": files}))
    return home / name


@pytest.fixture
def swapping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Swaps to a bundle on a server, and says where `current` leads."""
    home = tmp_path / "vllm" / "tiny"
    bundle_at(home, "1-cpu")
    (home / "current").symlink_to("1-cpu")
    prompts = [Prompt(str(i), None, [f"word {i}"]) for i in range(8)]
    released: Any = SimpleNamespace(choice=SimpleNamespace(method="eagle3"))
    space: Any = SimpleNamespace(
        workspace=SimpleNamespace(spec=SimpleNamespace(name="tiny"), dtype="float32"),
        encoded=lambda prompts, tokens: ([[1]] * len(prompts), 9),
    )
    monkeypatch.setenv("DRAFTWELL_SWAP_KEY", "secret")
    monkeypatch.setattr(swap, "tuned_prompts", lambda released, rows: list(rows))

    built: list[Path] = []

    def run(bundle: Path, server: Server) -> str:
        def build(*args: Any, **more: Any) -> Path:
            built.append(bundle)
            return bundle

        monkeypatch.setattr(swap, "deploy_on_engine", build)
        monkeypatch.setattr(swap, "RemoteEngine", lambda label, address: server)
        try:
            swap_on_engine(space, released, tmp_path, server.address, prompts)
        finally:
            assert (home / "current").resolve().name in ("1-cpu", bundle.name)
        return (home / "current").resolve().name

    return SimpleNamespace(run=run, home=home, built=built)


def test_current_moves_when_the_new_draft_fares_as_it_was_judged(swapping: Any) -> None:
    server = Server()
    assert swapping.run(bundle_at(swapping.home, "2-cpu"), server) == "2-cpu"
    assert server.loaded == ["tiny/2-cpu"]


def test_a_draft_that_fares_otherwise_is_undone_and_current_stays(swapping: Any) -> None:
    server = Server()
    with raises_code("swap_undone", "keeps 0.100", "kept 0.800", "restart"):
        swapping.run(bundle_at(swapping.home, "3-cpu"), server)
    assert server.loaded == ["tiny/3-cpu", "tiny/1-cpu"]
    assert (swapping.home / "current").resolve().name == "1-cpu"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), DraftwellError("gone", code="x")])
def test_a_swap_that_breaks_off_is_undone(swapping: Any, error: BaseException) -> None:
    server = Server()
    whole = server.decode

    def decode(prompts: Any, sampling: Any) -> Any:
        if server.loaded:
            raise error
        return whole(prompts, sampling)

    server.decode = decode  # type: ignore[method-assign]
    with pytest.raises((KeyboardInterrupt, DraftwellError)):
        swapping.run(bundle_at(swapping.home, "2-cpu"), server)
    assert server.loaded == ["tiny/2-cpu", "tiny/1-cpu"]
    assert (swapping.home / "current").resolve().name == "1-cpu"


def test_other_servers_are_asked_for_nothing(
    swapping: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = bundle_at(swapping.home, "2-cpu")
    with raises_code("swap_not_offered", "DRAFTWELL_SWAP_KEY"):
        swapping.run(new, Server(None))
    other = Server("tiny/9-cpu")
    with raises_code("swap_needs_restart", "tiny/9-cpu", "tiny/1-cpu"):
        swapping.run(new, other)
    assert other.loaded == []
    monkeypatch.delenv("DRAFTWELL_SWAP_KEY")
    with raises_code("swap_not_offered", "serve.sh"):
        swapping.run(new, Server())
    assert swapping.built == [], "no bundle is copied for nothing"


def test_a_draft_that_cannot_be_undone_is_said(swapping: Any) -> None:
    server = Server()
    whole = server.ask

    def ask(path: str, body: dict[str, str]) -> dict[str, str]:
        if server.loaded:
            raise DraftwellError("busy", code="engine_busy")
        return whole(path, body)

    server.ask = ask  # type: ignore[method-assign]
    with raises_code("swap_not_undone", "1-cpu", "busy", "restart"):
        swapping.run(bundle_at(swapping.home, "3-cpu"), server)
    assert (swapping.home / "current").resolve().name == "1-cpu"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"speculative": {"method": "eagle3", "num_speculative_tokens": 5}}, "speculative"),
        ({"files": {"models/target/model.safetensors": {"sha256": "u"}}}, "models/target"),
        ({"files": {f"{PLACE}/config.json": {"sha256": "d"}}}, f"{PLACE}/config.json"),
        ({"gate": {"version": "0.33.0"}}, "version"),
    ],
)
def test_more_than_other_weights_needs_a_restart(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    old, new = bundle_at(tmp_path, "1-cpu"), bundle_at(tmp_path, "2-cpu", **changes)
    with raises_code("swap_needs_restart", said, "restart vLLM"):
        refuse_more_than_weights(old, new, "eagle3")


def test_the_same_weights_and_ways_without_a_draft_are_not_swapped(tmp_path: Path) -> None:
    old = bundle_at(tmp_path, "1-cpu")
    same = bundle_at(tmp_path, "2-cpu", files={f"{PLACE}/model.safetensors": {"sha256": "1-cpu"}})
    with raises_code("nothing_to_swap", "1-cpu"):
        refuse_more_than_weights(old, same, "eagle3")
    with raises_code("swap_needs_restart", "ngram"):
        refuse_more_than_weights(old, same, "ngram")
