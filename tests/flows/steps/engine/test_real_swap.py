"""A head's weights in a vLLM that runs: `DRAFTWELL_TEST_PEERS` names the folder that `make peers`
filled."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftwell.components.bench.servers.processes import Server
from draftwell.components.engines.environments import INSTALLED, interpreter
from draftwell.components.engines.port import EngineSettings
from draftwell.components.engines.process_group import engine_environment
from draftwell.components.engines.remote.address import EngineAddress
from draftwell.components.engines.remote.remote import RemoteEngine
from draftwell.components.prompts.prompt import demo_prompts
from draftwell.flows.steps.engine.swap import PATH, keyed, probes, swapped
from draftwell.registry.bundles.wheel import plugin_wheel
from draftwell.serving.errors import DraftwellError

WEIGHTS = "model.safetensors"
PLACE = "models/head"


@pytest.fixture
def bundles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Three bundles: of the pair's head, of the same with its vocabulary in another order, and of
    noise."""
    folder = os.environ.get("DRAFTWELL_TEST_PEERS")
    if not folder or not (Path(folder) / "vllm" / INSTALLED).is_file():
        pytest.skip("vllm is not installed: `make peers PEERS=vllm`, then DRAFTWELL_TEST_PEERS")
    from draftwell.components.bench.peers.model_files import head_folder
    from draftwell.serving.artifacts.eagle3_head import Eagle3Head
    from tests.support.models.default_pair import SHIPPED, default_pair

    monkeypatch.setenv("DRAFTWELL_PEERS", folder)
    monkeypatch.setenv("DRAFTWELL_SWAP_KEY", "secret")
    head = head_folder(default_pair(), Eagle3Head.load(SHIPPED / "eagle3_head"))
    home, tensors = tmp_path / "tiny", load_file(head / WEIGHTS)
    for number in (1, 2, 3):
        place = home / f"{number}-cpu" / PLACE
        place.mkdir(parents=True)
        shutil.copyfile(head / "config.json", place / "config.json")
        save_file(changed(tensors, number), place / WEIGHTS, metadata={"format": "pt"})
    return home


def changed(tensors: dict[str, torch.Tensor], number: int) -> dict[str, torch.Tensor]:
    if number == 2:
        places = torch.arange(len(tensors["d2t"]))
        order = places.flip(0)
        ids = (tensors["d2t"] + places)[order]
        rows = tensors["lm_head.weight"][order].contiguous()
        return {**tensors, "d2t": ids - places, "lm_head.weight": rows}
    if number == 3:
        noise = torch.Generator().manual_seed(0)
        return {
            name: torch.randn(one.shape, generator=noise).to(one.dtype) * one.float().std()
            if one.ndim == 2
            else one
            for name, one in tensors.items()
        }
    return tensors


@pytest.fixture
def server(bundles: Path, tmp_path: Path) -> Iterator[Server]:
    from draftwell.components.bench.peers.model_files import model_folder
    from tests.support.models.default_pair import default_pair

    wheel = tmp_path / plugin_wheel().name
    wheel.write_bytes(plugin_wheel().data)
    place = bundles / "1-cpu" / PLACE
    config = {"method": "eagle3", "model": str(place), "num_speculative_tokens": 3}
    target = model_folder(default_pair(), "target")
    made = Server(
        "vllm",
        [
            *(str(interpreter("vllm")), "-P", "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(target), "--dtype", "float32", "--max-model-len", "512"),
            *("--max-num-seqs", "2", "--enforce-eager", "--served-model-name", "tiny"),
            *("--speculative-config", json.dumps(config)),
            *("--weight-transfer-config", '{"backend": "draftwell"}'),
            *("--per-request-spec-decode-metrics", "summary"),
        ],
        tmp_path / "vllm.log",
        env={
            **engine_environment(1),
            "PYTHONPATH": str(wheel),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_PLUGINS": "draftwell,draftwell_acceptance,draftwell_draft",
            "DRAFTWELL_SWAP_KEY": "secret",
            "DRAFTWELL_DRAFTS": str(bundles),
            "DRAFTWELL_BUNDLE": "tiny/1-cpu",
            "DRAFTWELL_SPOOL": str(tmp_path / "spool"),
            "DRAFTWELL_SPOOL_SECONDS": "1",
        },
    )
    with made.running():
        yield made
    made.close()


@pytest.mark.slow
def test_a_running_vllm_takes_other_weights_of_its_head_and_the_old_ones_again(
    server: Server, bundles: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """vLLM itself, about a minute: what it does with weights is its own business."""
    from tests.support.models.default_pair import default_pair

    prompts = [default_pair().encode_prompt(prompt.prompt) for prompt in demo_prompts(4)]
    engine = RemoteEngine("vllm", keyed(EngineAddress(server.url)))
    engine.start(EngineSettings())
    request.addfinalizer(engine.stop)
    first, second, noise = (bundles / f"{number}-cpu" for number in (1, 2, 3))
    begun = probes(engine, prompts)
    for bundle in (second, noise):
        tuned = {"by_prompt": [answer.acceptance.first for answer in begun]}
        (bundle / "manifest.json").write_text(json.dumps({"settings": {"tuned": tuned}}))
    assert all(kept for kept, _ in tuned["by_prompt"])

    checks = swapped(engine, (first, second), PLACE, prompts, "float32")
    assert [(check.name, check.value) for check in checks] == [("acceptance", 0.0), ("outputs", 0)]
    assert loaded(engine) == "tiny/2-cpu"
    with pytest.raises(DraftwellError, match="the target keeps 0") as failed:
        swapped(engine, (second, noise), PLACE, prompts, "float32")
    assert failed.value.code == "swap_undone"
    assert loaded(engine) == "tiny/2-cpu"
    (noise / PLACE / WEIGHTS).unlink()
    with pytest.raises(
        DraftwellError, match=r"answered 500.*is loaded again|is loaded again.*answered 500"
    ):
        swapped(engine, (second, noise), PLACE, prompts, "float32")
    after = probes(engine, prompts)
    assert [(one.tokens, one.acceptance) for one in after] == [
        (one.tokens, one.acceptance) for one in begun
    ]
    lines = "".join(file.read_text() for file in (tmp_path / "spool").glob("*.ndjson"))
    assert {json.loads(line)["bundle"] for line in lines.splitlines()} >= {
        "tiny/1-cpu",
        "tiny/2-cpu",
        "tiny/3-cpu",
    }


def loaded(engine: RemoteEngine) -> Any:
    return (engine.client.find(PATH) or {}).get("bundle")
