"""One process at a time changes a workspace: the others are told who does, or wait."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from draftwell.flows.cli.learn.shared import publish_kinds
from draftwell.flows.context import StepContext
from draftwell.flows.orchestration import loop_flow
from draftwell.flows.settings import PipelineSettings
from draftwell.flows.steps import eagle3, gate, imported, publish, train, tune
from draftwell.flows.steps.engine import (
    deploy as engine_deploy,
    gate as engine_gate,
    release as engine_release,
    tune as engine_tune,
)
from draftwell.flows.workspace import TURN, Workspace, in_turn
from tests.support.errors import raises_code

HOLDER = """
import sys, time
from draftwell.flows.workspace import Workspace

with Workspace(sys.argv[1]).turn("draftwell step choose"):
    print("held", flush=True)
    time.sleep(600)
"""
STEPS = [
    *(train.run_train, train.run_train_head, train.run_train_datastore, train.run_train_medusa),
    *(train.run_calibrate, train.run_calibrate_sampled, train.calibrate_as, train.run_profile),
    *(tune.run_tune, tune.tune_as, tune.choose_plain, publish.run_publish, gate.gate_release),
    *(engine_tune.tune_as, engine_tune.tune_on_engine, engine_gate.gate_on_engine),
    *(engine_release.publish_on_engine, engine_deploy.deploy_as, publish_kinds),
]
"""Steps of a pair that is loaded, or of one on another engine."""
OTHERS = [
    *(publish.publish_picked, gate.gate_imported, imported.import_results),
    *(eagle3.run_train_eagle3, eagle3.run_import_eagle3),
]
"""Steps of a workspace alone."""


@pytest.fixture
def space(pair_file: Path, own_stores: Path) -> Workspace:
    return Workspace(str(pair_file))


@pytest.fixture
def hold(pair_file: Path, space: Workspace) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a process that holds the workspace's turn."""
    begun: list[subprocess.Popen[str]] = []

    def held() -> subprocess.Popen[str]:
        command = [sys.executable, "-c", HOLDER, str(pair_file)]
        begun.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        assert begun[-1].stdout is not None
        assert begun[-1].stdout.readline() == "held\n"
        return begun[-1]

    yield held
    for process in begun:
        process.kill()
        process.communicate()


def test_every_step_that_changes_a_workspace_is_refused_while_another_process_does(
    hold: Callable[..., Any], space: Workspace
) -> None:
    """In one line that names it; nothing is done. Once it is killed, the turn is free."""
    holder = hold()
    words = (f"draftwell step choose (process {holder.pid} on ", str(space.root), "DRAFTWELL_HOME")
    place: Any = StepContext(space, None)  # type: ignore[arg-type]
    for given, steps in ((place, STEPS), (space, OTHERS)):
        for step in steps:
            with raises_code("workspace_in_use", *words) as caught:
                step(given)
            assert "\n" not in str(caught.value)
    with raises_code("workspace_in_use"):
        engine_deploy.deploy_as(PipelineSettings(pair=space.name), place, 1, [])
    assert [file.name for file in space.root.iterdir()] == [TURN]
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with space.turn("draftwell gate"):
        pass


def test_a_process_begins_its_turn_again_on_any_thread_and_frees_it_at_the_end(
    space: Workspace, pair_file: Path
) -> None:
    seen: list[bool] = []

    def again() -> None:
        with Workspace(str(pair_file)).turn("draftwell gate"):
            seen.append(free(space))

    def stepped(workspace: Workspace) -> None:
        worker = threading.Thread(target=again)
        worker.start()
        worker.join()
        seen.append(free(space))
        assert str(os.getpid()) in (space.root / TURN).read_text()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        in_turn("draftwell step choose")(stepped)(space)
    assert [*seen, free(space)] == [False, False, True]


def free(space: Workspace) -> bool:
    """Whether another process could take the turn."""
    code = "import fcntl, sys; fcntl.flock(open(sys.argv[1]), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    command = [sys.executable, "-c", code, str(space.root / TURN)]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def test_a_flow_waits_for_its_turn_and_holds_it_over_all_steps(
    hold: Callable[..., Any],
    space: Workspace,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loop_flow, "steps_of", lambda settings: {"free": free(space)})
    holder, said = hold(), []

    def say(line: str) -> None:
        said.append(line)
        holder.kill()

    place = Workspace(space.name, say=say)
    monkeypatch.setattr(loop_flow, "workspace_of", lambda settings: place)
    found = loop_flow.run_steps(PipelineSettings(pair=space.name))
    assert holder.wait(1) != 0, "it was ended when the line was said"
    assert found == {"free": False}
    assert said[0].startswith(f"waiting for draftwell step choose (process {holder.pid} on")
    assert free(space)


def test_while_a_flow_waits_other_threads_are_refused(
    hold: Callable[..., Any], space: Workspace, pair_file: Path
) -> None:
    """They do not wait for the flow, which may take hours."""
    holder, waits, refused = hold(), threading.Event(), threading.Event()

    def wait() -> None:
        with Workspace(str(pair_file), say=lambda line: waits.set()).turn("flow", wait=True):
            pass

    def step() -> None:
        with raises_code("workspace_in_use"), space.turn("draftwell gate"):
            pass
        refused.set()

    threads = [threading.Thread(target=each, daemon=True) for each in (wait, step)]
    threads[0].start()
    assert waits.wait(60)
    threads[1].start()
    in_time = refused.wait(20)
    holder.kill()
    for each in threads:
        each.join(60)
    assert in_time
    assert free(space)


@pytest.mark.slow
def test_of_two_tunings_at_once_one_is_refused_and_the_other_is_whole(
    run: Any, pair_file: Path, prompts_file: Path, space: Workspace
) -> None:
    """Real processes; the first stands still while the second tries, then goes on. Its release is
    published too."""
    source = f"--pair {pair_file} --prompts {prompts_file}"
    assert run(f"step collect {source} --set limit=6 --set max_tokens=12").exit_code == 0
    words = f"step choose {source} --set limit=2 --set max_tokens=8 --set trials=4".split()
    command = [sys.executable, "-m", "draftwell.flows.cli.main", *words]
    one = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    while not (space.root / TURN).exists() or free(space):
        assert one.poll() is None, one.communicate()
        time.sleep(0.05)
    one.send_signal(signal.SIGSTOP)
    try:
        two = subprocess.run(command, capture_output=True, text=True, check=False)
    finally:
        one.send_signal(signal.SIGCONT)
    assert two.returncode == 2
    assert f"process {one.pid} on" in two.stderr.strip().splitlines()[-1]
    _, errors = one.communicate()
    assert one.returncode == 0, errors
    assert (space.folder("decoding_config") / "artifact.json").is_file()
