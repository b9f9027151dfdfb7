"""`draftwell reproduce gpu` with a fake card: every part runs, tiny, on the CPU; and what
becomes of a part that fails, of a second run, of another card, and without CUDA."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import draftwell.serving.device
from draftwell.components.bench.gpu.card import Card
from draftwell.components.bench.gpu.results import GpuResults, read_results
from draftwell.components.bench.gpu.table import BEGIN, END, ROWS
from draftwell.components.calibrate import hardware_profile
from draftwell.flows.cli import gpu_parts, gpu_run as command
from draftwell.flows.cli.gpu_parts import Scale, Trial, parts_of, restore_tuned, untuned
from draftwell.flows.workspace import Workspace
from draftwell.registry.pairs import fitting
from draftwell.serving.artifacts.hardware_profile import HardwareProfile
from tests.support.commands import run_command
from tests.support.patching import replace_everywhere

pytestmark = pytest.mark.timeout(900)
"""The first test of a process waits for the whole run."""
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
    replace_everywhere(patch, gpu_parts, "startable", lambda name: name in FEW)
    for name, few in (("GREEDY", FEW), ("SAMPLED", FEW[1:]), ("AT_ONCE", FEW[:1])):
        patch.setattr(gpu_parts, name, few)
    patch.setattr(gpu_parts, "OVERLAPPING", ("duo_decoding",))
    patch.setattr(command, "cuda_problem", lambda: None)
    patch.setattr(command, "describe_card", lambda: card)
    patch.setattr(
        command,
        "SCALE",
        Scale(2, 6, 1, 120_000, (2, 3), (1, 2), 2, prompts, patience=20.0),
    )


def quick_profile(pair: Any, made: Any, **options: Any) -> HardwareProfile:
    """A profile that took no time."""
    return HardwareProfile(0.002, {1: 0.01, 8: 0.02}, 0.001, made)


FEW = ("vanilla_sd", "prompt_lookup")
"""Strategies that are enough here."""
PLACE = {"device": "cpu", "draft_device": None}


@pytest.fixture(scope="module")
def whole(place: Path, pair_file: Path, prompts_file: Path) -> Iterator[tuple[Path, Any]]:
    """The folder of the results of one whole run, and the run."""
    page = place / "gpu.md"
    page.write_text(f"# On a GPU\n\n{BEGIN}\nold\n{END}\nafter\n")
    with pytest.MonkeyPatch.context() as patch:
        put_card(patch, CARD, prompts_file)
        done = run_command(
            f"reproduce gpu --set pair={pair_file} --set out={place}/results --set page={page}"
        )
        assert done.exit_code == 0, (done.output, done.exception)
        yield place / "results", done


@pytest.fixture(scope="module")
def results(whole: tuple[Path, Any]) -> GpuResults:
    return read_results(whole[0] / "tiny-cuda-fake-1.json")


MEASURED = (
    "float32",
    "plain-135m",
    "plain-7b",
    "greedy-7b",
    "sampled-7b",
    "together-8",
    "together-32",
    "tuning",
    "gate",
    "cpu-draft",
)


def test_parts_are_the_tables_rows_in_its_order(pair_file: Path) -> None:
    trial = Trial(str(pair_file), Scale(), Path("kit"), Path("bundle"))
    parts = parts_of(trial)
    assert [part.name for part in parts] == [row.part for row in ROWS]
    assert sum(part.seconds for part in parts[:8]) < 9 * 60


def test_every_part_is_measured_or_says_why_not(
    results: GpuResults, whole: tuple[Path, Any]
) -> None:
    said = {name: (part.state, part.why) for name, part in results.parts.items()}
    measured = {name for name, (state, _) in said.items() if state == "measured"}
    assert measured == set(MEASURED), said
    # without compiled layers
    assert said["bfloat16"][0] == "failed"
    assert "not exact" in said["bfloat16"][1]
    assert said["server"] == ("skipped", "there is no bundle at dist/tiny/current")
    assert "server: skipped, there is no bundle" in whole[1].stderr
    assert {"autoregressive", "vanilla_sd"} <= set(
        results.parts["greedy-7b"].reports["bench"]["strategies"]
    )
    assert results.parts["greedy-7b"].reports["bench"]["padded_to"] >= 120_000
    assert results.parts["sampled-7b"].reports["bench"]["settings"]["temperature"] == 0.8


def test_the_page_has_every_answer(whole: tuple[Path, Any]) -> None:
    text = (whole[0].parent / "gpu.md").read_text()
    assert text.startswith("# On a GPU\n")
    assert text.endswith("after\n")
    lines = [line for line in text.splitlines() if line.startswith("| ")][2:]
    assert len(lines) == len(ROWS)
    open_rows = [line.split(" | ")[-1] for line in lines if "| open" in line]
    assert len(open_rows) == len(ROWS) - len(MEASURED)
    assert "Fake 1: 1 GB, copies 10 GB/s, torch 2.11.0." in text


def test_nothing_of_this_code_and_card_is_measured_twice(
    whole: tuple[Path, Any], pair_file: Path, results: GpuResults
) -> None:
    asked = f"reproduce gpu --set pair={pair_file} --set out={whole[0]} --set only=plain-7b,gate"
    again = run_command(asked)
    assert again.exit_code == 0, (again.output, again.exception)
    assert again.stderr.splitlines()[-2:] == ["plain-7b: measured before", "gate: measured before"]
    assert read_results(whole[0] / "tiny-cuda-fake-1.json").parts == results.parts


def test_what_was_tuned_on_the_card_is_kept_as_it_is(results: GpuResults) -> None:
    made = results.parts["tuning"].reports["artifacts"]
    assert set(made) == {"decoding_config", "hardware_profile"}
    manifest = json.loads(made["decoding_config"]["artifact.json"])
    assert manifest["provenance"]["device_class"].startswith("cuda-fake-1")
    gate = results.parts["gate"].reports["gate"]
    assert set(gate["artifacts"]) == set(made)
    assert "speedup" in {check["name"] for check in gate["checks"]}


def test_what_was_tuned_on_another_machine_can_be_gated_on_the_next(
    results: GpuResults, pair_file: Path, own_stores: Path
) -> None:
    trial = Trial(str(pair_file), Scale(), Path("kit"), Path("bundle"))
    assert untuned(trial) != ""
    restore_tuned(trial, results)
    assert untuned(trial) == ""


def test_an_unknown_part_is_named(whole: tuple[Path, Any], pair_file: Path) -> None:
    done = run_command(
        f"reproduce gpu --set pair={pair_file} --set out={whole[0]} --set only=plain"
    )
    assert done.exit_code == 2
    assert "no such part" in done.stderr


def test_without_cuda_one_line_says_so_and_the_table_stays(
    pair_file: Path, own_stores: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "cuda_problem", lambda: "torch is a build without CUDA")
    page = tmp_path / "gpu.md"
    page.write_text(f"{BEGIN}what was measured{END}")
    done = run_command(f"reproduce gpu --set pair={pair_file} --set page={page}")
    assert done.exit_code == 0, (done.output, done.exception)
    assert done.stderr.splitlines()[0].startswith("nothing was measured: torch is")
    assert len(done.stderr.splitlines()) == 2
    assert page.read_text() == f"{BEGIN}what was measured{END}", "nothing takes its place"
