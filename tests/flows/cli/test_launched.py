"""`--engine URL` with a launcher: tune, gate and promote over a server that is played; and the gate
of an engine as it runs."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from draftwell.components.engines import launcher as module
from draftwell.components.engines.launch_template import LaunchTemplate
from draftwell.components.engines.launcher import Launcher, listens
from draftwell.components.engines.remote.address import parse_address
from draftwell.components.export.launch_options import launch_options
from draftwell.flows.steps.engine import at_address
from draftwell.registry.releases import find_release
from draftwell.registry.store import Store
from draftwell.serving.artifacts.engine_config import EngineConfig
from tests.support.commands import split_name
from tests.support.launching.ports import two_free_ports
from tests.support.loop.refusals import line
from tests.support.paths import REPO
from tests.support.peers.releases import write_requests

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="groups of processes of Linux")

PLAYED = REPO / "tests" / "support" / "launching" / "played_vllm.py"
COMMAND = f"{sys.executable} {PLAYED} {{port}} --seconds-per-token .006 {{speculation_options}}"
NGRAM = {"method": "ngram", "num_speculative_tokens": 3}


@pytest.fixture
def at(
    run: Any,
    pair_file: Path,
    prompts_file: Path,
    own_stores: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., Any]:
    """Runs a command with an engine at an address that nobody listens on."""
    monkeypatch.setattr(module, "ASK_SECONDS", 0.05)
    port = two_free_ports()

    def called(command: str, *more: Any, url: str = f"http://127.0.0.1:{port}") -> Any:
        name, options = split_name(command)
        fixed = f"--engine {url} --pair {pair_file} --prompts {prompts_file} --set max_tokens=8"
        done = run(f"{name} {fixed} {options}", *more)
        assert not listens(url) or url != f"http://127.0.0.1:{port}"
        return done

    return called


@pytest.mark.slow
def test_tune_gate_and_promote_at_an_address(
    at: Callable[..., Any], run: Any, pair_file: Path, more: Path, own_stores: Path
) -> None:
    """Slow: two dozen starts of a server."""
    done = at("step choose --set methods=ngram --set limit=8", "--launcher", COMMAND)
    assert done.exit_code == 0, (done.output, done.exception)
    assert "chosen: ngram(k=" in done.stdout, "plain decoding is slower by much"
    assert "options for vllm: --speculative-config" in done.stdout
    release = find_release(Store(), "tiny", "cpu-vllm", "candidate")
    home = own_stores / "draftwell" / "pairs" / "tiny" / "float32" / "cpu"
    config = EngineConfig.load(home / "artifacts" / "engine_config")
    assert (config.contents.engine, config.contents.version) == ("vllm", "0.32.0")
    assert config.contents.settings is not None
    assert f"ngram(k={config.contents.settings['num_speculative_tokens']}" in done.stdout
    assert COMMAND not in config.contents.model_dump_json()
    judged = at(f"gate --prompts {more}", "--set", f"launcher={COMMAND}")
    assert judged.exit_code == 0, (judged.output, judged.exception)
    assert Store().get_aliases("release", "tiny.cpu-vllm")["challenger"] == release.version
    promoted = run(f"release promote --set engine=vllm --pair {pair_file}")
    assert promoted.exit_code == 0, (promoted.output, promoted.exception)


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    return write_requests(tmp_path / "chats.jsonl")


@pytest.mark.slow
def test_the_one_command_ends_in_a_card_at_an_address(
    run: Any, pair_file: Path, chats: Path, own_stores: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slow: some starts of a server. The launcher is in a file, as it is too long for a line."""
    monkeypatch.setattr(module, "ASK_SECONDS", 0.05)
    file = chats.with_name("launcher")
    file.write_text(COMMAND)
    words = f"tune --engine http://127.0.0.1:{two_free_ports()} --pair {pair_file}"
    few = "--set methods=ngram --set max_tokens=8 --json --device cpu"
    done = run(f"{words} --prompts {chats} {few}", "--launcher", file)
    assert done.exit_code == 0, (done.output, done.exception)
    card = json.loads(done.stdout)
    assert card["engine"].startswith("vllm 0.32.0 at http")
    assert card["strategy"].startswith("ngram(")
    assert card["speed"]["prompts"] >= 16
    assert (card["verdict"], card["release"]) == ("passed", 1)
    release = find_release(Store(), "tiny", "cpu-vllm", "candidate")
    assert Store().read_file(release.published, "card/card.json")


def test_the_card_of_an_engine_as_it_runs_is_of_no_release(
    run: Any,
    pair_file: Path,
    chats: Path,
    own_stores: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # the processor of this machine says nothing of an engine elsewhere
    monkeypatch.setattr(at_address, "is_local", lambda url: False)
    with running(tmp_path / "engines", NGRAM, None) as (url, plain):
        done = run(
            f"tune --engine {url} --pair {pair_file} --prompts {chats} --device cpu --json "
            f"--set plain={plain} --set max_tokens=8"
        )
    # on a busy machine the speed of so few tokens may be left undecided
    assert done.exit_code in (0, 3), (done.output, done.exception)
    card = json.loads(done.stdout)
    assert (card["strategy"], card["release"], card["bundle"]) == ("as it runs", None, None)
    assert [one["name"] for one in card["by_requests"]] == ["1", "4"]
    assert card["speed"]["ratio"] > 0
    assert card["machine"] == "that of 127.0.0.1"


@pytest.mark.slow
def test_the_grid_says_what_the_choice_lost_and_a_tuning_resumes(at: Callable[..., Any]) -> None:
    """Slow: a dozen starts of a server."""
    tune = (
        "step choose --set methods=ngram --set limit=8 --set publish=false --set grid=true",
        "--launcher",
        COMMAND,
    )
    done = at(*tune)
    assert done.exit_code == 0, (done.output, done.exception)
    assert "the best of the others of 3 settings" in done.stdout
    again = at(*tune)
    assert "are reused" in again.stderr
    assert again.stdout.splitlines()[-2:] == done.stdout.splitlines()[-2:]


@contextmanager
def running(folder: Path, *speculations: Any, more: str = "") -> Iterator[list[str]]:
    """Addresses of servers that run, one for each way to speculate."""
    address = parse_address(f"http://127.0.0.1:{two_free_ports()}")
    with Launcher(LaunchTemplate(f"{COMMAND} {more}"), address, folder) as launcher:
        yield [
            launcher.start(f"engine {place}", launch_options("vllm", one)).address.url
            for place, one in enumerate(speculations)
        ]


def test_an_engine_is_judged_as_it_runs_beside_a_plain_one(
    at: Callable[..., Any], more: Path, tmp_path: Path
) -> None:
    report = tmp_path / "verdict.md"
    with running(tmp_path / "engines", NGRAM, None) as (url, plain):
        faster = at(f"gate --prompts {more} --set plain={plain} --report {report}", url=url)
        slower = at(f"gate --prompts {more} --set plain={url}", url=plain)
        few = at(f"gate --prompts {more} --set limit=4 --set plain={plain}", url=url)
        alone = at(f"gate --prompts {more}", url=url)
    assert faster.exit_code == 0, (faster.output, faster.exception)
    assert "speed over plain decoding" in report.read_text()
    assert slower.exit_code == 1
    assert few.exit_code == 3
    for remedy in ("--set plain=", "switch speculation off", "--set launcher="):
        assert remedy in line(alone)


def test_other_outputs_than_plain_decodings_fail(
    at: Callable[..., Any], more: Path, tmp_path: Path
) -> None:
    with running(tmp_path / "engines", NGRAM, None, more="--lossy") as (url, plain):
        done = at(f"gate --prompts {more} --set plain={plain}", url=url)
    assert done.exit_code == 1, (done.output, done.exception)
    assert "outputs differ" in done.output


@pytest.mark.parametrize(
    ("command", "more", "named"),
    [
        ("step choose", (), "--launcher"),
        ("step choose", ("--launcher", "serve {prot}"), "{prot}"),
        ("step choose", ("--launcher", "launch.txt"), "no file launch.txt"),
        ("gate", ("--set", "launcher=launch.txt"), "no file launch.txt"),
        ("step choose --set trials=3", ("--launcher", COMMAND), "--set trials"),
        ("gate --set plain=http://127.0.0.1:1", ("--set", f"launcher={COMMAND}"), "leave plain"),
        ("gate --release candidate", (), "--set launcher="),
        ("gate --set start_minutes=2", (), "--set start_minutes"),
        (
            "step choose --set methods=ngram",
            ("--launcher", "exit 3; {speculation_options}"),
            "exit code 3",
        ),
    ],
)
def test_a_mistake_is_one_line(
    at: Callable[..., Any], command: str, more: tuple[str, ...], named: str
) -> None:
    assert named in line(at(command, *more))


def test_each_command_reads_the_launcher_from_a_file(
    at: Callable[..., Any], run: Any, tmp_path: Path
) -> None:
    (tmp_path / "launch.txt").write_text("serve {prot}\n")
    file = str(tmp_path / "launch.txt")
    assert "{prot}" in line(at("step choose", "--launcher", file))
    assert "{prot}" in line(at("gate", "--set", f"launcher={file}"))
    tune = run("tune --engine http://127.0.0.1:1 --pair default --launcher", file)
    assert "{prot}" in line(tune)


@pytest.mark.slow
def test_llama_cpp_is_told_by_its_own_options_and_has_releases_of_its_own(
    at: Callable[..., Any], run: Any, pair_file: Path, more: Path
) -> None:
    """Slow: eight starts of a server."""
    launcher = ("--launcher", f"{COMMAND} --llama")
    done = at("step choose --set limit=8", *launcher)
    assert done.exit_code == 0, (done.output, done.exception)
    assert "left out: draft_model, the pair has no draft" in done.stderr
    assert "options for llama.cpp: --spec-type ngram-simple" in done.stdout
    assert re.search("--spec-ngram-simple-size-m [1-9]", done.stdout), (
        "its best is a matter of time"
    )
    judged = at(f"gate --prompts {more}", "--set", f"launcher={COMMAND} --llama")
    assert judged.exit_code == 0, (judged.output, judged.exception)
    assert Store().get_aliases("release", "tiny.cpu-llamacpp") == {"candidate": 1, "challenger": 1}
    promoted = run(f"release promote --set engine=llama.cpp --pair {pair_file}")
    assert promoted.exit_code == 0, (promoted.output, promoted.exception)
    assert line(at("step choose --set limit=8 --set levels=1,4", *launcher)).startswith(
        "Error: llama.cpp has one"
    )
