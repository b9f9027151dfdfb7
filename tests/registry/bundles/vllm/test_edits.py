"""What a user has changed in a bundle for vLLM is in the one that follows it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from draftwell.registry.bundles.vllm import render
from draftwell.registry.bundles.vllm.edits import keep_edits
from draftwell.registry.bundles.vllm.render import write_bundle
from draftwell.registry.bundles.vllm.settings import VllmServing
from tests.support.errors import raises_code

GATE = {
    "version": "0.32.0",
    "device": "cpu",
    "device_class": "cpu-x86-64-2c-avx2",
    "dtype": "bfloat16",
    "fingerprint": "f" * 64,
    "settings": None,
    "passed": True,
}


def bundle(root: Path, number: int, image: str | None = "mine", **more: Any) -> Path:
    folder = root / f"{number}-cpu"
    (folder / "models" / "target").mkdir(parents=True)
    write_bundle(
        VllmServing.model_validate(
            {
                "pair": "tiny",
                "release": number,
                "model": "models/target",
                "dtype": "bfloat16",
                "fingerprint": "f" * 64,
                "image": image,
                "gate": GATE,
                **more,
            }
        ),
        folder,
    )
    return folder


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """The first bundle, with a key and another time to start in the chart."""
    made = bundle(tmp_path, 1)
    (made / ".env").write_text("VLLM_API_KEY=secret\n")
    (made / ".env").chmod(0o600)
    values = made / "chart" / "values.yaml"
    values.write_text(values.read_text().replace("startSeconds: 1200", "startSeconds: 99"))
    return made


def test_what_was_made_or_changed_is_kept_and_all_else_is_new(old: Path, tmp_path: Path) -> None:
    new = bundle(tmp_path, 2)
    assert keep_edits(old, new) == [".env", "chart/values.yaml"]
    values = (new / "chart" / "values.yaml").read_text()
    assert ("startSeconds: 99" in values, "draftwell-tiny:2-cpu" in values, "1-cpu" in values) == (
        True,
        True,
        False,
    )
    assert (new / ".env").stat().st_mode & 0o777 == 0o600
    assert "1-cpu" not in (new / "compose.yaml").read_text()
    assert keep_edits(old, new) == [], "what was changed there since is a person's"


def test_files_that_the_new_bundle_has_no_use_for_are_left_out(old: Path, tmp_path: Path) -> None:
    new = bundle(tmp_path, 2, image=None)
    assert keep_edits(old, new) == [".env"]
    assert not (new / "chart").exists()


def test_files_of_an_earlier_version_that_nobody_changed_are_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They counted as a user's changes, and corrections of the templates never arrived."""
    with monkeypatch.context() as earlier:
        earlier.setattr(render, "OWN_WORDS", "Rendered by an earlier version.")
        old = bundle(tmp_path, 1, replicas=2)
    new = bundle(tmp_path, 2, replicas=2)
    assert keep_edits(old, new) == []
    assert "an earlier version" in (old / "Caddyfile").read_text()
    assert "an earlier version" not in (new / "Caddyfile").read_text()


def test_a_file_that_cannot_be_read_is_one_line(old: Path, tmp_path: Path) -> None:
    (old / ".env").unlink()
    (old / ".env").mkdir()
    with raises_code("unreadable_file", str(old / ".env")):
        keep_edits(old, bundle(tmp_path, 2))
