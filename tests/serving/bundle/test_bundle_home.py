"""What a server writes lies outside of its bundle, wherever it is started: a bundle with a file
that is not its own is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from draftwell.serving.artifacts.pair_files import SIDECAR
from draftwell.serving.bundle.bundle import open_bundle
from draftwell.serving.device import device_class
from draftwell.serving.errors import DraftwellError
from draftwell.serving.runtime.commands import Role
from draftwell.serving.runtime.models.onnx.onnx_export import GRAPH, exportable
from draftwell.serving.server.main import run
from draftwell.serving.server.settings import ServerSettings
from tests.support.server.bundles import load_bundle, make_bundle
from tests.support.server.served_pair import tiny_tokenizer


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[Role, Path]:
    """A pair whose draft can be written as a graph."""
    from transformers import LlamaConfig, LlamaForCausalLM

    root, tokenizer = tmp_path_factory.mktemp("models"), tiny_tokenizer()
    roles: tuple[Role, ...] = ("target", "draft")
    for seed, role in enumerate(roles):
        torch.manual_seed(seed)
        module = (
            LlamaForCausalLM(
                LlamaConfig(
                    vocab_size=len(tokenizer),
                    hidden_size=32,
                    intermediate_size=64,
                    num_hidden_layers=1,
                    num_attention_heads=2,
                    num_key_value_heads=1,
                    max_position_embeddings=256,
                    eos_token_id=tokenizer.eos_token_id,
                    bos_token_id=None,
                )
            )
            .float()
            .eval()
        )
        assert exportable(module)
        module.save_pretrained(root / role)
        tokenizer.save_pretrained(root / role)
    return {role: root / role for role in roles}


@pytest.fixture
def bundle(tmp_path: Path, models: dict[Role, Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A bundle whose strategy wants the draft in ONNX Runtime; the working directory is in it, and
    no home is named."""
    made = make_bundle(
        tmp_path / "1-cpu",
        models,
        "duo_decoding",
        {"num_speculative_tokens": 3},
        machine=device_class("cpu"),
    )
    monkeypatch.chdir(made)
    monkeypatch.delenv("DRAFTWELL_HOME")
    monkeypatch.delenv("DRAFTWELL_MODELS", raising=False)
    return made


def names(folder: Path) -> set[str]:
    """All that lies in a bundle but the digests that are kept beside its weights."""
    return {
        path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.name != SIDECAR
    }


def test_it_opens_again_behind_a_start_in_its_folder(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTWELL_HOME", str(tmp_path / "home"))
    before = names(bundle)
    for _ in range(2):
        served = load_bundle(bundle, slots=1, max_context=64, threads=1)
        assert "draft_onnx" in served.pair.models
    assert len(list((tmp_path / "home").rglob(GRAPH))) == 1, "something was written, and read again"
    assert names(bundle) == before


def test_a_home_inside_the_bundle_is_refused_before_anything_is_written(bundle: Path) -> None:
    before = names(bundle)
    for _ in range(2):
        with pytest.raises(
            DraftwellError,
            match=r"^DRAFTWELL_HOME would be \S+/\.draftwell, inside the bundle \S+1-cpu, .*[^\n]$",
        ):
            load_bundle(bundle, slots=1, max_context=64, threads=1)
    assert names(bundle) == before
    open_bundle(bundle)


@pytest.mark.parametrize("name", ["DRAFTWELL_HOME", "--state-dir", "--feedback-dir"])
@pytest.mark.parametrize("through", ["folder", "link"])
def test_the_server_makes_no_folder_inside_the_bundle(
    bundle: Path, tmp_path: Path, name: str, through: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it is told the link `current`, and where the folder of the other option could be
    made."""

    def not_refused(*arguments: Any, **options: Any) -> None:
        raise AssertionError("the bundle is being loaded")

    monkeypatch.setattr("draftwell.serving.server.lifecycle.from_bundle", not_refused)
    before = names(bundle)
    (tmp_path / "current").symlink_to("1-cpu")
    folders = {
        "DRAFTWELL_HOME": tmp_path / "home",
        "--state-dir": tmp_path / "state",
        "--feedback-dir": tmp_path / "spool",
        name: Path("kept"),
    }
    monkeypatch.setenv("DRAFTWELL_HOME", str(folders["DRAFTWELL_HOME"]))
    settings = ServerSettings(
        bundle=bundle if through == "folder" else tmp_path / "current",
        port=0,
        threads=1,
        state_dir=folders["--state-dir"],
        feedback_dir=folders["--feedback-dir"],
        feedback_rate=1.0,
    )
    with pytest.raises(
        DraftwellError, match=rf"^{name} would be \S*kept, inside the bundle \S+1-cpu, "
    ):
        run(settings)
    assert names(bundle) == before
    assert {path.name for path in tmp_path.iterdir()} == {"1-cpu", "current"}
