"""`draftwell gpu` with a fake card: every part runs, tiny, on the CPU; and what becomes of a part
that fails, of a second run, of another card, and without CUDA."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import draftwell.serving.device
from draftwell.components.bench.gpu.card import Card
from draftwell.components.bench.gpu.results import GpuResults, read_results
from draftwell.components.bench.gpu.table import BEGIN, END
from draftwell.components.calibrate import hardware_profile
from draftwell.flows.cli import gpu as command
from draftwell.flows.cli.gpu_parts import Scale
from draftwell.flows.workspace import Workspace
from draftwell.registry.pairs import fitting
from draftwell.serving.artifacts.hardware_profile import HardwareProfile
from tests.support.commands import run_command
from tests.support.patching import replace_everywhere

CARD = Card(
    name="Fake 1",
    device_class="cuda-fake-1",
    gigabytes=1.0,
    bandwidth=10.0,
    cuda="13.0",
    torch="2.11.0",
)


def put_card(patch: pytest.MonkeyPatch, card: Card, prompts: Path) -> None:
    """Let this process, and its copies, have a card whose models compute on the CPU."""
    load = Workspace.load
    patch.setenv("DRAFTWELL_COMPILE", "off")  # nothing is to be compiled for this
    device = draftwell.serving.device
    patch.setattr(Workspace, "load", lambda self, **how: load(self, **how | PLACE))
    replace_everywhere(patch, device, "cuda_available", lambda: True)
    replace_everywhere(patch, device, "device_class", lambda device="cuda": card.device_class)
    replace_everywhere(patch, hardware_profile, "measure_profile", quick_profile)
    replace_everywhere(patch, fitting, "check_fits", lambda *asked: None)
    patch.setattr(command, "cuda_problem", lambda: None)
    patch.setattr(command, "describe_card", lambda: card)
    patch.setattr(
        command,
        "SCALE",
        Scale(2, 6, 1, 120_000, (2, 3), (1, 2), 2, prompts),
    )


def quick_profile(pair: Any, made: Any, **options: Any) -> HardwareProfile:
    """A profile that took no time."""
    return HardwareProfile(0.002, {1: 0.01, 8: 0.02}, 0.001, made)


PLACE = {"device": "cpu", "draft_device": None}


@pytest.fixture(scope="module")
def whole(place: Path, pair_file: Path, prompts_file: Path) -> Iterator[tuple[Path, Any]]:
    """The folder of the results of one whole run, and the run."""
    page = place / "gpu.md"
    page.write_text(f"# On a GPU\n\n{BEGIN}\nold\n{END}\nafter\n")
    with pytest.MonkeyPatch.context() as patch:
        put_card(patch, CARD, prompts_file)
        done = run_command(
            f"gpu --pair {pair_file} --only together-8 --out {place}/results --page {page}"
        )
        assert done.exit_code == 0, (done.output, done.exception)
        yield place / "results", done


@pytest.fixture(scope="module")
def results(whole: tuple[Path, Any]) -> GpuResults:
    return read_results(whole[0] / "tiny-cuda-fake-1.json")


def test_every_part_answers_its_question(results: GpuResults, whole: tuple[Path, Any]) -> None:
    print(whole[1].stderr)
    states = {name: (part.state, part.why) for name, part in results.parts.items()}
    print(states)
    print(open(str(whole[0]).replace("results", "gpu.md")).read())
    import subprocess

    print(
        subprocess.run(
            "for f in $(find .. -name log -path *gpu*); do echo == $f; tail -5 $f; done",
            shell=True,
            capture_output=True,
            text=True,
        ).stdout
    )
    raise AssertionError
