"""Drift of what vLLM serves, answered unattended: tuned again on recorded prompts, gated, deployed
and restarted, over a fake vLLM."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

from draftwell.components.engines.process_group import free_port
from draftwell.flows.orchestration.whole import run_loop
from draftwell.flows.settings import PipelineSettings
from draftwell.flows.steps.engine import deploy, recalibrate as step
from draftwell.flows.steps.engine.serve import server_environment
from draftwell.flows.steps.engine.space import space_of
from tests.support.errors import raises_code
from tests.support.peers.environments import install, with_server
from tests.support.peers.releases import settings_of, short_demo, tuned, verdict, write_requests
from tests.support.results import kept_results
from tests.support.server.server_process import wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="a shell script in the place of Python"),
    pytest.mark.usefixtures("quiet_prefect"),
]


class Loop:
    """A pair whose first bundle is deployed, and what the monitor is asked with."""

    def __init__(self, pair: Path, home: Path, out: Path, patch: pytest.MonkeyPatch):
        self.pair, self.out, self.patch, self.said = pair, out, patch, list[str]()
        self.spool, self.folder = (
            home / "spool" / "tiny",
            home / "pairs" / "tiny" / "float32" / "cpu" / "vllm",
        )

    def counts(self, bundle: str, kept: int, method: str, k: int) -> None:
        """Twenty minutes of traffic, of whose 60 drafts each `kept` had their first token kept."""
        self.spool.mkdir(parents=True, exist_ok=True)
        line = {
            "version": 1,
            "begun": time.time(),
            "bundle": bundle,
            "method": method,
            "num_speculative_tokens": k,
            "rounds": 60,
            "accepted_at": [kept, 0],
        }
        (self.spool / "acceptance-20260101-here-1.ndjson").write_text(
            (json.dumps(line) + "\n") * 20
        )

    def engine(self, speeds: dict[str, float], accepted: str = "[2, 1]", fault: str = "") -> None:
        """How vLLM fares from now on."""
        for name, value in (("SPEEDS", json.dumps(speeds)), ("ACCEPTED", accepted)):
            self.patch.setenv(f"FAKE_ENGINE_{name}", value)
        self.patch.setenv("FAKE_PEER_FAULT", fault)

    def run(self, **changes: Any) -> dict[str, Any]:
        """The check and what follows from it."""
        given = {
            "engine": "vllm",
            "source": "drift",
            "pair": str(self.pair),
            "device": "cpu",
            "out": self.out,
            "methods": ("ngram", "draft_model"),
            "levels": (1,),
            "tune_prompts": 8,
            "bench_prompts": 8,
            "max_tokens": 8,
            **changes,
        }
        settings = PipelineSettings.model_validate(given)
        return step.recalibrate(space_of(settings), settings, self.said.append, run_loop)

    def served(self) -> tuple[str, str, int]:
        """Name of the bundle that `current` leads to, its method and its K."""
        current = self.out / "vllm" / "tiny" / "current"
        config = settings_of(current)["speculative"]
        return current.resolve().name, config["method"], config["num_speculative_tokens"]


@pytest.fixture
def loop(
    run: Any, pair_file: Path, own_stores: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Loop:
    """First traffic: a draft model with two tokens is fastest, and every draft has its first token
    kept."""
    with_server(install(tmp_path / "peers", monkeypatch, ("vllm",)))
    monkeypatch.setattr(deploy, "SERVE_SECONDS", 0.3)
    made = Loop(pair_file, own_stores / "draftwell", tmp_path / "dist", monkeypatch)
    made.engine({"draft_model:2": 1.6, "draft_model": 1.2, "ngram": 1.1})
    prompts = write_requests(tmp_path / "first.jsonl", "the")
    done = run(f"{short_demo(pair_file, prompts, made.out)} --set levels=1 --set threads=2")
    assert done.exit_code == 0, (done.output, done.exception)
    assert made.served() == ("1-cpu", "draft_model", 2)
    return made


class Service:
    """The bundle of `current`, served on a port by a shell script in the place of systemd."""

    def __init__(self, loop: Loop, folder: Path):
        self.port, self.pid = free_port(), folder / "pid"
        script = loop.out / "vllm" / "tiny" / "current" / "serve.sh"
        self.command = (
            f"if [ -e '{self.pid}' ]; then kill $(cat '{self.pid}'); fi; "
            f"'{script}' --port {self.port} > '{folder}/serve.log' 2>&1 & echo $! > '{self.pid}'"
        )

    def bundle(self) -> str:
        """What it serves, as soon as it answers."""
        wait_until(self.answers, "it does not answer", seconds=300)
        request = Request(f"http://127.0.0.1:{self.port}/v1/completions", b'{"max_tokens": 1}')
        with urlopen(request, timeout=60) as answer:
            return str(json.load(answer)["bundle"])

    def answers(self) -> bool:
        try:
            urlopen(f"http://127.0.0.1:{self.port}/v1/models", timeout=10).close()
        except OSError:
            return False
        return True


@pytest.fixture
def service(loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    """Runs until the test has ended."""
    monkeypatch.setenv("DRAFTWELL_SPOOL", "")
    for name, value in server_environment("tiny").items():
        monkeypatch.setenv(name, value)
    made = Service(loop, tmp_path)
    subprocess.run(["/bin/sh", "-c", made.command], check=True)
    yield made
    os.kill(int(made.pid.read_text()), signal.SIGKILL)


def test_other_traffic_brings_another_method_and_length_which_are_then_served(
    loop: Loop, service: Service, tmp_path: Path
) -> None:
    assert service.bundle() == "tiny/1-cpu"
    loop.counts("tiny/1-cpu", 60, "draft_model", 2)
    loop.engine({}, fault="start")  # steady traffic starts no engine
    assert loop.run()["state"] == "steady"
    with raises_code("spool_empty", "nothing holds no counts"):
        loop.run(spool=tmp_path / "nothing")
    with raises_code("no_prompts"):
        loop.run(prompts=tmp_path / "nothing.jsonl")

    write_requests(loop.spool / "gateway-1.jsonl", "a")
    loop.counts("tiny/1-cpu", 30, "draft_model", 2)
    loop.engine({"ngram:8": 1.9, "ngram": 1.3, "draft_model": 0.8}, "[1, 0]")
    with raises_code("nothing_restarted", "2-cpu is ready", "--set restart="):
        loop.run()
    assert service.bundle() == "tiny/1-cpu", "nobody has restarted it"
    done = loop.run(restart=service.command)
    assert done["state"] == "deployed", done
    assert loop.served() == ("2-cpu", "ngram", 8)
    assert service.bundle() == "tiny/2-cpu"

    loop.counts("tiny/2-cpu", 30, "ngram", 8)
    assert loop.run()["state"] == "steady", "the reference is the new bundle's"
    loop.counts("tiny/2-cpu", 60, "ngram", 8)
    loop.engine({}, fault="start")
    with (loop.spool / "gateway-1.jsonl").open("a") as file:
        file.write('{"prompt": "one more"}\n')  # as a gateway does all the time
    again = loop.run(restart=service.command)
    assert again["state"] == "answered", again
    assert "tried again after" in again["why"]
    assert service.bundle() == "tiny/2-cpu"


OPTIONS = {
    "port": 9123,
    "served_name": "llama",
    "image": "registry.example/vllm:0.32",
    "replicas": 1,
    "max_num_seqs": 64,
    "cpus": 2,
    "max_model_len": 96,
    "cache": 1,
    "memory": 0.8,
    "gpus": 1,
}


def test_what_a_person_decided_about_the_bundle_stays(loop: Loop, tmp_path: Path) -> None:
    """Its options, the temperature that it is tuned for, the threads that it was measured with, and
    the files that are the user's."""
    before = (loop.out / "vllm" / "tiny" / "current").resolve()
    manifest = json.loads((before / "manifest.json").read_text())
    manifest["settings"].update(OPTIONS)
    manifest["settings"]["tuned"]["temperature"] = 0.7
    manifest["settings"]["gate"]["threads"] = 1
    (before / "manifest.json").write_text(json.dumps(manifest))
    (before / ".env").write_text("VLLM_API_KEY=secret\n")
    (before / ".env").chmod(0o600)
    (before / "compose.override.yaml").write_text("services: {vllm: {mem_limit: 8g}}\n")
    loop.counts("tiny/1-cpu", 30, "draft_model", 2)
    loop.engine({"ngram:8": 1.9, "ngram": 1.3, "draft_model": 0.8}, "[1, 0]")
    done = loop.run(prompts=write_requests(tmp_path / "new.jsonl", "a"), restart="true")
    assert done["state"] == "deployed", done
    assert loop.served() == ("2-cpu", "ngram", 8)
    after = Path(done["bundle"])
    settings = settings_of(after)
    assert {name: settings[name] for name in OPTIONS} == OPTIONS
    assert (settings["tuned"]["temperature"], settings["gate"]["threads"]) == (0.7, 1)
    assert verdict("champion", "cpu-vllm-sampled") is not None
    assert ((after / ".env").read_text(), (after / ".env").stat().st_mode & 0o777) == (
        "VLLM_API_KEY=secret\n",
        0o600,
    )
    assert (after / "compose.override.yaml").read_text() == "services: {vllm: {mem_limit: 8g}}\n"
    assert "draftwell-tiny:2-cpu" in (after / "chart" / "values.yaml").read_text()
    assert "greedy" in done["report"]["since_tuning"]["why"]
    judged = tuned(loop.folder, sampled=True).contents.settings
    assert judged is not None
    assert judged["num_speculative_tokens_per_batch_size"] == [[1, 1, 8]], (
        "one length would be drafted at 2 to 64, which nobody measured"
    )
    assert "[[1, 1, 8], [2, 64, 0]]" in (after / "serve.sh").read_text()


def test_a_gate_that_fails_leaves_what_is_served_and_is_not_tried_each_hour(
    loop: Loop, service: Service, tmp_path: Path
) -> None:
    loop.counts("tiny/1-cpu", 30, "draft_model", 2)
    prompts = write_requests(tmp_path / "new.jsonl", "a")
    loop.engine({"ngram:8": 1.9, "ngram": 1.3, "draft_model": 0.8}, fault="lossy")
    assert loop.run(prompts=prompts, restart=service.command)["state"] == "refused"
    assert (loop.served()[0], service.bundle()) == ("1-cpu", "tiny/1-cpu")
    loop.engine({}, fault="start")
    write_requests(tmp_path / "new.jsonl", "any")
    assert "tried again after" in loop.run(prompts=prompts, restart=service.command)["why"]
    assert (loop.served()[0], service.bundle()) == ("1-cpu", "tiny/1-cpu")


def test_what_was_stopped_resumes_with_the_prompts_that_it_began_with(
    loop: Loop, tmp_path: Path
) -> None:
    """Killed while it tuned; then stopped before the restart, when nothing is drifted any more."""
    loop.counts("tiny/1-cpu", 30, "draft_model", 2)
    folder = tmp_path / "recorded"
    write_requests(folder / "1.jsonl", "a")
    speeds = {"ngram:8": 1.9, "ngram": 1.3, "draft_model": 0.8}
    loop.engine(speeds, fault="killed@draft_model")
    with raises_code("engine_killed"):
        loop.run(prompts=folder)
    assert loop.served()[0] == "1-cpu"
    kept = kept_results(loop.folder / "measurements.jsonl")
    assert kept
    write_requests(folder / "2.jsonl", "any")  # the gateway has recorded more
    loop.engine(speeds)
    with raises_code("restart_failed"):
        loop.run(prompts=folder, restart="exit 3")
    assert "resuming the recalibration that was begun" in loop.said
    after = kept_results(loop.folder / "measurements.jsonl")
    assert {name: after[name] for name in kept} == kept
    assert loop.served()[0] == "2-cpu"
    loop.engine({}, fault="start")
    done = loop.run(prompts=folder, restart=f"touch '{tmp_path}/restarted'")
    assert (done["state"], (tmp_path / "restarted").exists()) == ("deployed", True)
    loop.counts("tiny/2-cpu", 60, "ngram", 8)
    (tmp_path / "restarted").unlink()
    assert loop.run(prompts=folder, restart=f"touch '{tmp_path}/restarted'")["state"] == "steady"
    assert not (tmp_path / "restarted").exists()


def test_too_few_prompts_are_one_line_and_nothing_is_begun(loop: Loop, tmp_path: Path) -> None:
    loop.counts("tiny/1-cpu", 30, "draft_model", 2)
    loop.engine({}, fault="start")
    with raises_code("too_few_prompts", "39 different prompts", "40 are needed"):
        loop.run(prompts=write_requests(tmp_path / "few.jsonl", "a", 39))
    assert not (loop.folder / "recalibration.json").exists()


def test_the_command(
    run: Any,
    vllm: Any,
    pair_file: Path,
    own_stores: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    from draftwell.flows.cli import engine as engine_commands

    asked: list[PipelineSettings] = []
    outcome = {"state": "refused", "why": "the gate failed"}

    def instead(space: Any, settings: PipelineSettings, *more: Any) -> dict[str, Any]:
        asked.append(settings)
        return outcome

    monkeypatch.setattr(engine_commands, "recalibrate", instead)
    monkeypatch.setattr(engine_commands, "space_of", lambda settings: None)
    with_server(tmp_path / "peers")
    words = f"monitor --engine vllm --pair {pair_file}"
    done = run(
        words,
        f"--set recalibrate=true --set prompts={tmp_path} --set restart=true --set levels=1,4",
        "--set",
        "methods=ngram, suffix",
        f"--set minutes=5 --set bundles={tmp_path}",
    )
    assert (done.exit_code, done.stdout.strip()) == (1, "refused: the gate failed"), (
        done.output,
        done.exception,
    )
    assert asked[0] == PipelineSettings(
        engine="vllm",
        source="drift",
        pair=str(pair_file),
        prompts=tmp_path,
        restart="true",
        levels=(1, 4),
        minutes=5.0,
        out=tmp_path,
        methods=("ngram", "suffix"),
    )
    outcome["state"] = "steady"
    assert run(words, f"--set recalibrate=true --set bundles={tmp_path}").exit_code == 0
    for wrong, said in (
        (f"{words} --set minutes=5", "--set minutes means nothing without recalibrate=true"),
        (
            f"monitor --pair {pair_file} --set recalibrate=true",
            "--set recalibrate means nothing with --engine draftwell",
        ),
    ):
        refused = run(wrong)
        assert refused.exit_code == 2
        assert said in refused.stderr
