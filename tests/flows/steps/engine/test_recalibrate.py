"""When a recalibration of another engine begins, waits and restarts: the loop itself is a stand-in
that makes the next bundle."""

from __future__ import annotations

import json
import os
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from draftwell.components.drift.schema import DRIFTED
from draftwell.components.prompts.prompt import read_prompts
from draftwell.flows.settings import PipelineSettings
from draftwell.flows.steps.engine.recalibrate import Begun, Recalibration, note_made, recalibrate
from draftwell.flows.steps.monitor import load_limits
from draftwell.registry.bundles.places import link_current
from draftwell.serving.errors import DraftwellError
from tests.support.errors import raises_code

LIMITS = load_limits(None)
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3}


class Case:
    """A pair whose bundle 1 is served, with twelve recorded prompts."""

    def __init__(self, root: Path):
        self.home, self.spool, self.prompts = (
            root / "dist" / "vllm" / "tiny",
            root / "spool",
            root / "spool" / "prompts.jsonl",
        )
        self.folder = root / "space"
        self.loops: list[list[str]] = []
        self.restarts_file = root / "restarts"
        self.restarted, self.place_named = True, False
        self.fault: BaseException | None = None
        self.makes: dict[str, Any] | None = DRAFTS
        self.bundle(1, DRAFTS)
        link_current(self.home, self.home / "1-cpu", "cpu-vllm")
        self.record(*(f"prompt {number}" for number in range(12)))

    def bundle(self, number: int, speculative: dict[str, Any] | None) -> Path:
        folder = self.home / f"{number}-cpu"
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "manifest.json").exists():
            settings = {"speculative": speculative, "release": number, "gate": {"device": "cpu"}}
            (folder / "manifest.json").write_text(json.dumps({"settings": settings}))
        return folder

    def record(self, *texts: str) -> None:
        self.spool.mkdir(exist_ok=True)
        with self.prompts.open("a") as file:
            file.write("".join(json.dumps({"prompt": text}) + "\n" for text in texts))

    def count(self, bundle: str, hours: float = 0.0) -> None:
        line = {
            "version": 1,
            "begun": time.time() - 3600 * hours,
            "bundle": bundle,
            "rounds": 9,
            "accepted_at": [9],
        }
        with (self.spool / "acceptance-1.ndjson").open("a") as file:
            file.write(json.dumps(line) + "\n")

    def loop(self, settings: PipelineSettings) -> dict[str, Any]:
        """In the place of the flow: makes the next bundle, and lets `current` lead to it."""
        assert settings.prompts is not None
        self.loops.append(sorted(prompt.prompt for prompt in read_prompts(settings.prompts)))
        if self.fault is not None:
            raise self.fault
        current = (self.home / "current").resolve()
        same = (
            json.loads((current / "manifest.json").read_text())["settings"]["speculative"]
            == self.makes
            is None
        )
        number = max(int(path.name.partition("-")[0]) for path in self.home.glob("*-cpu")) + 1
        made = current if same else self.bundle(number, self.makes)
        self.activate(made)
        return {"state": "deployed", "passed": True, "checks": [], "bundle": str(made)}

    @property
    def space(self) -> Any:
        """As far as a recalibration asks it."""
        return SimpleNamespace(
            folder=self.folder, workspace=SimpleNamespace(spec=SimpleNamespace(name="tiny"))
        )

    def activate(self, made: Path) -> None:
        """As the deployment of the flow does."""
        note_made(self.space, made)
        link_current(self.home, made, "cpu-vllm")

    def run(self, *, drifted: bool = True, fresh: bool = False) -> dict[str, Any]:
        wanted = PipelineSettings(
            engine="vllm",
            device="cpu",
            collect_prompts=4,
            tune_prompts=4,
            bench_prompts=4,
            out=self.home.parents[1],
            spool=self.spool,
            prompts=self.prompts if self.place_named else None,
            restart=None if not self.restarted else f"echo >> {self.restarts_file}",
            fresh=fresh,
        )
        return Checked(self.space, wanted, LIMITS, print, self.loop, case=self, found=drifted).run()

    @property
    def restarts(self) -> int:
        """How often the servers were restarted."""
        file = self.restarts_file
        return len(file.read_text().splitlines()) if file.exists() else 0

    def age(self, hours: float) -> None:
        """Let the last recalibration, and the bundle, be as old."""
        file, then = self.folder / "recalibration.json", time.time() - 3600 * hours
        if file.exists():
            state = Begun.model_validate_json(file.read_text())
            changed = {"at": state.at - timedelta(hours=hours)}
            file.write_text(state.model_copy(update=changed).model_dump_json())
        os.utime(self.home / "current" / "manifest.json", (then, then))

    def state(self) -> str:
        return str(json.loads((self.folder / "recalibration.json").read_text())["state"])


class Checked(Recalibration):
    """One whose check finds what it is told, and nothing at all where that is no drift."""

    def __init__(self, *of: Any, case: Case, found: bool):
        super().__init__(*of)
        object.__setattr__(self, "found", found)

    found: bool

    def check(self) -> Any:
        drift = SimpleNamespace(
            drifted=True, verdict=DRIFTED, why="other traffic", notes=("two lines are left out",)
        )
        return drift if self.found else None


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path)


def test_after_a_deployment_it_waits_though_a_gateway_adds_prompts_all_the_time(case: Case) -> None:
    done = case.run()
    assert (done["state"], done["drift"]) == ("deployed", "other traffic; two lines are left out")
    case.record("one more")
    again = case.run()
    assert (again["state"], len(case.loops), case.restarts) == ("answered", 1, 1)
    assert "2-cpu was deployed as the answer to a drift; tried again after" in again["why"]
    case.age(LIMITS.repeat_after_hours + 1)
    assert (case.run()["state"], len(case.loops)) == ("deployed", 2)
    assert (case.run(fresh=True)["state"], len(case.loops)) == ("deployed", 3)


def test_several_gpus_are_refused_before_anything_is_tuned(case: Case) -> None:
    file = case.home / "1-cpu" / "manifest.json"
    manifest = json.loads(file.read_text())
    manifest["settings"]["gpus"] = 2
    file.write_text(json.dumps(manifest))
    with raises_code("bad_setting", "1-cpu serves on 2 GPUs", "measured on one", "--set ungated="):
        case.run()
    assert (case.loops, list(case.folder.glob("recalib*"))) == ([], [])


def test_what_a_person_has_taken_back_stays_taken_back(case: Case) -> None:
    assert case.run()["state"] == "deployed"
    link_current(case.home, case.home / "1-cpu", "cpu-vllm")
    case.record("one more")
    case.age(LIMITS.repeat_after_hours + 1)
    again = case.run()
    assert (again["state"], len(case.loops)) == ("answered", 1)
    assert (
        again["why"]
        == "2-cpu was taken back by hand, and 1-cpu is served again: --set fresh=true tunes again"
    )
    assert case.run(fresh=True)["state"] == "deployed"
    assert (case.home / "current").resolve().name == "3-cpu"


def test_what_was_restarted_nowhere_is_not_called_deployed(case: Case) -> None:
    """vLLM under another user, in a container or on another machine; it served on with the bundle
    before, unnoticed."""
    case.restarted = False
    case.count("tiny/1-cpu")
    for _ in range(2):
        with raises_code("nothing_restarted", "2-cpu is ready", "--set restart="):
            case.run()
        assert (case.state(), (case.home / "current").resolve().name, len(case.loops)) == (
            "begun",
            "2-cpu",
            1,
        )
    case.restarted = True
    assert (case.run()["state"], case.state(), case.restarts) == ("deployed", "deployed", 1)


def test_what_a_person_has_restarted_needs_no_command(case: Case) -> None:
    """The error stayed for a day, because the counts of the bundle before do."""
    case.restarted = False
    case.count("tiny/1-cpu", 0.2)
    with raises_code("nothing_restarted"):
        case.run()
    case.count("tiny/2-cpu", 0.1)
    assert (case.run()["state"], case.state()) == ("deployed", "deployed")


def test_a_restart_that_is_due_needs_no_prompts(case: Case) -> None:
    case.restarted, case.place_named = False, True
    case.count("tiny/1-cpu")
    with raises_code("nothing_restarted"):
        case.run()
    case.prompts.unlink()
    case.restarted = True
    assert case.run()["state"] == "deployed"
    with raises_code("no_prompts", "there is no "):
        case.run(drifted=False)


def test_a_bundle_that_was_taken_back_before_it_was_restarted_stays_taken_back(case: Case) -> None:
    case.restarted = False
    case.count("tiny/1-cpu")
    with raises_code("nothing_restarted"):
        case.run()
    link_current(case.home, case.home / "1-cpu", "cpu-vllm")
    assert "2-cpu was taken back by hand" in case.run()["why"]
    assert (case.home / "current").resolve().name == "1-cpu"


def test_what_was_killed_is_not_taken_for_taken_back(case: Case) -> None:
    """Before `current` moved, and right after it."""
    case.fault = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        case.run()
    assert (case.state(), case.restarts) == ("begun", 0)
    case.activate(case.bundle(2, DRAFTS))
    assert (case.run(drifted=False)["state"], case.restarts, len(case.loops)) == ("deployed", 1, 1)
    link_current(case.home, case.home / "1-cpu", "cpu-vllm")
    assert "2-cpu was taken back by hand" in case.run()["why"]


def test_what_a_person_deployed_meanwhile_is_not_restarted_again(case: Case) -> None:
    case.fault = DraftwellError("no memory", code="engine_out_of_memory")
    with raises_code("engine_out_of_memory"):
        case.run()
    link_current(case.home, case.bundle(2, DRAFTS), "cpu-vllm")
    assert (case.run(drifted=False)["state"], case.restarts) == ("not enough yet", 0)


def test_a_loop_that_fails_on_plain_decoding_is_not_tried_at_once_again(case: Case) -> None:
    link_current(case.home, case.bundle(2, None), "cpu-vllm")
    case.age(LIMITS.repeat_after_hours + 1)
    case.fault = DraftwellError("no memory", code="engine_out_of_memory")
    with raises_code("engine_out_of_memory"):
        case.run(drifted=False)
    assert (case.run(drifted=False)["state"], len(case.loops)) == ("not enough yet", 1)


@pytest.mark.parametrize("counted", [None, "old", "of another"])
def test_where_nothing_was_served_nothing_has_to_be_restarted(
    case: Case, counted: str | None
) -> None:
    case.restarted = False
    if counted is not None:
        case.count(
            "tiny/1-cpu" if counted == "old" else "tiny/7-cpu",
            LIMITS.stale_after_hours + 1 if counted == "old" else 0.0,
        )
    assert case.run()["state"] == "deployed"


def test_plain_decoding_is_tuned_again_on_newer_prompts_after_a_while(case: Case) -> None:
    """It drafts nothing, so that no count can say that drafting would pay by now."""
    link_current(case.home, case.bundle(2, None), "cpu-vllm")
    case.makes = None
    young = case.run(drifted=False)
    assert (young["state"], len(case.loops)) == ("not enough yet", 0)
    assert "tuned again on newer prompts after" in young["why"]
    case.age(LIMITS.repeat_after_hours + 1)
    assert (case.run(drifted=False)["state"], len(case.loops)) == ("deployed", 1)
    assert ((case.home / "current").resolve().name, case.restarts) == ("2-cpu", 0), (
        "the same again: nothing is restarted"
    )
    assert (case.run(drifted=False)["state"], len(case.loops)) == ("answered", 1)
    case.makes = DRAFTS
    assert (case.run(drifted=False, fresh=True)["state"], len(case.loops)) == ("deployed", 2)
    assert ((case.home / "current").resolve().name, case.restarts) == ("3-cpu", 1)
    assert case.run(drifted=False)["state"] == "not enough yet", "drafts are counted from now on"


def test_plain_decoding_without_recorded_prompts_is_no_error(case: Case) -> None:
    link_current(case.home, case.bundle(2, None), "cpu-vllm")
    case.age(LIMITS.repeat_after_hours + 1)
    case.prompts.write_text('{"prompt": "only one"}\n')
    few = case.run(drifted=False)
    assert few["state"] == "not enough yet"
    assert "1 different prompts" in few["why"]
    case.prompts.unlink()
    assert case.run(drifted=False)["state"] == "not enough yet"


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"restart": " "}, "bad_setting", "names no command"),
        ({"collect_prompts": 200}, "bad_setting", "add up to 228, and only the newest 200"),
    ],
)
def test_mistakes_are_refused_before_traffic_has_drifted(
    case: Case, changes: dict[str, Any], code: str, words: str
) -> None:
    space: Any = None  # nothing is looked at before
    with raises_code(code, words):
        recalibrate(
            space,
            PipelineSettings(engine="vllm", out=case.home.parents[1], **changes),
            print,
            case.loop,
        )
