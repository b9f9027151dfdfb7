"""Starting the server: from a bundle, from the command line, and what it refuses."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import uvicorn
from transformers import LlamaForCausalLM

from draftwell.serving.artifacts.acceptance_table import AcceptanceTable
from draftwell.serving.artifacts.base import Artifact, Provenance
from draftwell.serving.artifacts.datastore import Datastore
from draftwell.serving.artifacts.eagle3_head import Eagle3Head
from draftwell.serving.device import device_class
from draftwell.serving.errors import DraftwellError
from draftwell.serving.runtime.commands import Role
from draftwell.serving.server.app import create_app
from draftwell.serving.server.deployment.deployments import Deployments
from draftwell.serving.server.http.keys import KEY_VARIABLE
from draftwell.serving.server.lifecycle import DrainingServer, serve_bundles
from draftwell.serving.server.main import run as run_server
from draftwell.serving.server.model import loading
from draftwell.serving.server.settings import ServerSettings
from tests.support.errors import raises_code
from tests.support.models.heads import random_eagle3
from tests.support.server.bundles import load_bundle, make_bundle
from tests.support.server.served_pair import served_pair, serving
from tests.support.server.server_process import ENTRY, server_process, wait_until


def test_the_strategy_is_the_one_that_was_tuned(
    tmp_path: Path, tiny_models: dict[Role, Path]
) -> None:
    bundle = make_bundle(
        tmp_path / "bundle", tiny_models, "spide", {"tau": 0.6}, machine=device_class("cpu")
    )
    served = load_bundle(bundle, slots=2, max_context=64)
    assert (served.name, served.strategy.name, served.strategy.config.tau) == ("tiny", "spide", 0.6)
    assert (served.pair.dtype, served.slots, served.max_context) == ("float32", 2, 64)
    table = served.strategy.artifact(AcceptanceTable)
    assert table.total == [50] * 20, "state starts from the artifact, untouched by the warm-up"
    served.pair.engine().generate(
        served.encode("hello"), served.pair.sampling(max_tokens=12), served.strategy
    )
    assert sum(table.total) > 50 * 20, "and learns from what is served"


@pytest.mark.parametrize(
    ("options", "governed"), [({}, True), ({"threads": 2}, False), ({"deterministic": True}, False)]
)
def test_threads_adapt_unless_a_number_was_named_or_answers_must_repeat(
    tmp_path: Path, tiny_models: dict[Role, Path], options: dict[str, Any], governed: bool
) -> None:
    before = torch.get_num_threads()
    try:
        served = load_bundle(
            make_bundle(
                tmp_path / "bundle", tiny_models, "vanilla_sd", machine=device_class("cpu")
            ),
            max_context=64,
            **options,
        )
        assert (served.governor is not None) == governed
        assert Deployments(served).current.scheduler.engine.governor is served.governor
        torch.set_num_threads(1)  # as a governor may have them when the next bundle is loaded
        assert (
            load_bundle(tmp_path / "bundle", served, max_context=64, **options).governor
            is served.governor
        )
    finally:
        torch.set_num_threads(before)


def test_a_server_offers_the_strategies_that_it_was_told_to(
    tmp_path: Path, tiny_models: dict[Role, Path]
) -> None:
    bundle = make_bundle(tmp_path / "bundle", tiny_models, "spide", machine=device_class("cpu"))
    served = load_bundle(bundle, slots=1, max_context=64, strategies=" vanilla_sd, prompt_lookup,")
    with serving(served) as (url, _), httpx.Client(base_url=url, timeout=60) as http:
        offer = [strategy["name"] for strategy in http.get("/v1/speculation").json()["strategies"]]
        assert sorted(offer) == ["autoregressive", "prompt_lookup", "spide", "vanilla_sd"]
        codes = {}
        for name in ("vanilla_sd", "lossy_sd", "spide", "autoregressive"):
            body = {
                "model": "tiny",
                "prompt": "hello",
                "max_tokens": 2,
                "speculation": {"strategy": name},
            }
            codes[name] = http.post("/v1/completions", json=body).status_code
        assert codes == {"vanilla_sd": 200, "lossy_sd": 400, "spide": 200, "autoregressive": 200}


LOADING = """
import signal, sys, threading, time
from pathlib import Path

from draftwell.serving.errors import DraftwellError
from draftwell.serving.server.main import run
from draftwell.serving.server.model import loading
from draftwell.serving.server.settings import ServerSettings

seen = []


def from_bundle(settings, serving_now=None):
    seen.append(threading.current_thread())
    print("loading", flush=True)
    time.sleep(float(sys.argv[2]))
    raise DraftwellError("enough")


loading.from_bundle = from_bundle
signal.signal(signal.SIGINT, signal.default_int_handler)
try:
    run(ServerSettings(bundle=Path(sys.argv[1]), port=0))
except DraftwellError:
    print(seen[0] is not threading.main_thread(), seen[0].is_alive(), signal.getsignal(signal.SIGINT) is signal.default_int_handler)
"""  # noqa: E501


@pytest.mark.slow
def test_models_are_loaded_on_a_thread_that_ends(tmp_path: Path) -> None:
    """Else its team of threads would make every forward of the scheduler's thread twice as long."""
    done = subprocess.run(
        [sys.executable, "-c", LOADING, str(tmp_path), "0"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == ["loading", "True False True"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_server_that_still_loads_can_be_ended(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    """By a code of its own: a container's first process ignores signals that it has not asked
    for."""
    with subprocess.Popen(
        [sys.executable, "-c", LOADING, str(tmp_path), "600"], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "loading\n"
            process.send_signal(number)
            assert process.wait(60) == code
        finally:
            process.kill()


SWITCHING = """
import gc, sys, time
from pathlib import Path

from draftwell.serving.server.main import run
from draftwell.serving.server.model import loading
from draftwell.serving.server.settings import ServerSettings

load = loading.from_bundle


def from_bundle(settings, serving_now=None):
    if serving_now is not None:
        assert gc.isenabled()  # it serves
        print("loading", flush=True)
        time.sleep(600)
    return load(settings, serving_now)


loading.from_bundle = from_bundle
run(ServerSettings(bundle=Path(sys.argv[1]), port=0, slots=1, max_context=64))
"""


@pytest.mark.slow
def test_a_server_ends_though_it_loads_another_bundle(
    tmp_path: Path, tiny_models: dict[Role, Path]
) -> None:
    bundle = make_bundle(tmp_path / "bundle", tiny_models, "vanilla_sd")
    with server_process([sys.executable, "-c", SWITCHING, str(bundle)]) as (process, url):
        assert httpx.get(f"{url}/ready", timeout=60).status_code == 200
        process.send_signal(signal.SIGHUP)
        assert process.stdout is not None
        assert process.stdout.readline() == "loading\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


@pytest.mark.parametrize(("value", "name"), [(" ,", "--strategies"), ("vanila_sd", "vanilla_sd")])
def test_strategies_that_are_none_are_refused(value: str, name: str) -> None:
    with pytest.raises(DraftwellError, match=name):
        _ = ServerSettings(bundle=Path("x"), strategies=value).offered


def test_deterministic_serving_leaves_the_state_alone(
    tmp_path: Path, tiny_models: dict[Role, Path]
) -> None:
    served = load_bundle(make_bundle(tmp_path / "bundle", tiny_models, "spide"), deterministic=True)
    served.pair.engine().generate(
        served.encode("hello"), served.pair.sampling(max_tokens=12), served.strategy
    )
    assert served.strategy.artifact(AcceptanceTable).total == [50] * 20


@pytest.mark.parametrize(("deterministic", "tokens"), [(False, 32), (True, 64)])
def test_a_step_reads_prompts_by_time_unless_answers_may_not_depend_on_it(
    tmp_path: Path,
    tiny_models: dict[Role, Path],
    monkeypatch: pytest.MonkeyPatch,
    deterministic: bool,
    tokens: int,
) -> None:
    """In this process: the server's loop is replaced by one that looks at the engine and ends."""
    found: list[int] = []

    class Looked(DrainingServer):
        def run(self, sockets: Any = None) -> None:
            budget = self._deployments.current.scheduler.engine.budget
            assert budget is not None
            budget.learn(0.020, {})
            budget.learn(0.080, {"target": 60})
            found.append(budget.room("target", answering=8, waiting=1))

    monkeypatch.setattr("draftwell.serving.server.lifecycle.DrainingServer", Looked)
    bundle = make_bundle(tmp_path / "bundle", tiny_models, "vanilla_sd")
    settings = ServerSettings(
        bundle=bundle, port=0, slots=1, threads=1, deterministic=deterministic
    )
    assert run_server(settings) == 0
    assert found == [tokens]


def other_template(target: Path) -> None:
    (file,) = target.glob("chat_template.jinja")
    file.write_text("<|start|>Be brief. {{ messages[-1].content }}<|end|>")


def another_end(target: Path) -> None:
    file = target / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": [5, 7]}))


@pytest.mark.parametrize("change", [other_template, another_end])
def test_models_are_shared_only_where_what_lies_beside_the_weights_is_the_same(
    tmp_path: Path, tiny_models: dict[Role, Path], change: Callable[[Path], None]
) -> None:
    """Chat template and stop tokens are no part of the fingerprint."""
    first = load_bundle(
        make_bundle(tmp_path / "first", tiny_models, "vanilla_sd"), slots=2, max_context=64
    )
    changed = {role: tmp_path / "changed" / role for role in tiny_models}
    for role, folder in changed.items():
        shutil.copytree(tiny_models[role], folder)
    change(changed["target"])
    second = load_bundle(
        make_bundle(tmp_path / "second", changed, "vanilla_sd"),
        slots=2,
        max_context=64,
        serving_now=first,
    )
    assert second.pair.fingerprint == first.pair.fingerprint, "the weights are the same"
    alone = load_bundle(tmp_path / "second", slots=2, max_context=64)
    asked = [{"role": "user", "content": "hi"}]
    assert (second.encode_chat(asked), second.stop_tokens) == (
        alone.encode_chat(asked),
        alone.stop_tokens,
    )
    assert (first.encode_chat(asked), first.stop_tokens) != (
        alone.encode_chat(asked),
        alone.stop_tokens,
    )


def test_a_head_of_other_layers_gets_models_of_its_own(
    tmp_path: Path, tiny_models: dict[Role, Path]
) -> None:
    """A target keeps the states of one head's layers: a head that was trained again over others is
    switched in with new models."""
    module = LlamaForCausalLM.from_pretrained(tiny_models["target"])

    def bundle(name: str, layers: tuple[int, ...], seed: int) -> Path:
        def head(provenance: Provenance) -> list[Artifact]:
            made = random_eagle3(module, 40, seed)[1]
            return [
                Eagle3Head(
                    made.state, made.config, made.head_tokens, layers, made.donor, provenance
                )
            ]

        return make_bundle(tmp_path / name, tiny_models, "eagle3", more=head)

    first = load_bundle(bundle("first", (0, 1, 1), 3), slots=2, max_context=64)
    again = load_bundle(bundle("again", (0, 1, 1), 4), slots=2, max_context=64, serving_now=first)
    assert again.pair is first.pair
    other = load_bundle(bundle("other", (0, 0, 1), 5), slots=2, max_context=64, serving_now=again)
    assert other.pair is not again.pair
    for served in (again, other):
        done = served.pair.engine().generate(
            served.encode("hello"), served.pair.sampling(max_tokens=6), served.strategy
        )
        assert done.session.stats.drafted
    plain = make_bundle(tmp_path / "plain", tiny_models, "autoregressive")
    assert load_bundle(plain, slots=2, max_context=64, serving_now=other).pair is other.pair, (
        "without a head any target will do"
    )
    # slots of a model that answers are not forgotten by the thread that loads
    alone = load_bundle(plain, slots=2, max_context=64)
    with_head = load_bundle(
        bundle("with head", (0, 1, 1), 3), slots=2, max_context=64, serving_now=alone
    )
    assert with_head.pair is not alone.pair
    assert not alone.pair.models["target"].features  # type: ignore[attr-defined]


def test_a_second_model_set_is_loaded_only_where_there_is_memory_for_it(
    tmp_path: Path, tiny_models: dict[Role, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = make_bundle(tmp_path / "plain", tiny_models, "autoregressive")
    first = load_bundle(plain, slots=2, max_context=64)
    changed = {role: tmp_path / "changed" / role for role in tiny_models}
    for role, folder in changed.items():
        shutil.copytree(tiny_models[role], folder)
    other_template(changed["target"])
    other = make_bundle(tmp_path / "other", changed, "autoregressive")
    monkeypatch.setattr(loading, "free_memory", lambda device: 1000)
    with monkeypatch.context() as patch:
        patch.setattr(loading, "load_pair", None)
        with raises_code("no_room_to_switch", "GB are free", "--slots"):
            load_bundle(other, slots=2, max_context=64, serving_now=first)
    assert load_bundle(plain, slots=2, max_context=64, serving_now=first).pair is first.pair
    monkeypatch.setattr(loading, "free_memory", lambda device: None)
    assert load_bundle(other, slots=2, max_context=64, serving_now=first).pair is not first.pair


def test_texts_of_all_clients_are_proposed_to_one_tenant_only_where_that_was_asked_for(
    tmp_path: Path, tiny_models: dict[Role, Path]
) -> None:
    def store(provenance: Provenance) -> list[Artifact]:
        return [Datastore.from_texts([[1, 2, 3, 4, 5]], provenance)]

    bundle = make_bundle(tmp_path / "suffix", tiny_models, "suffix", more=store)
    cases: list[tuple[dict[str, Any], bool]] = [
        ({}, True),
        ({"state": "tenant"}, False),
        ({"state": "tenant", "shared_datastore": True}, True),
        ({"state": "tenant", "deterministic": True}, True),
    ]
    for options, used in cases:
        served = load_bundle(bundle, slots=1, max_context=64, **options)
        for tenant in (None, "a"):
            strategy = served.strategies.get("suffix", tenant)
            assert (strategy.optional_artifact(Datastore) is not None) is used, options
        assert ("rest" in served.strategies.names()) is used, (
            "what needs a datastore is not offered without one"
        )
    needs = make_bundle(tmp_path / "rest", tiny_models, "rest", more=store)
    with raises_code("datastore_of_all_tenants", "--shared-datastore"):
        load_bundle(needs, state="tenant")
    assert (
        load_bundle(
            needs, slots=1, max_context=64, state="tenant", shared_datastore=True
        ).strategy.name
        == "rest"
    )


def test_a_server_keeps_its_device_when_the_link_points_to_a_bundle_for_another(
    tmp_path: Path, tiny_models: dict[Role, Path]
) -> None:
    """On a host with both, a deployment for the CPU moves the link that the server on CUDA
    follows."""
    bundle = make_bundle(tmp_path / "bundle", tiny_models, "vanilla_sd")
    first = load_bundle(bundle, slots=2, max_context=64)
    first.pair.device = "cuda"  # as far as the switch can see
    deployments = Deployments(first)  # not started: nothing is to be asked
    assert not deployments.switch(
        lambda old: load_bundle(bundle, slots=2, max_context=64, serving_now=old)
    )
    assert (
        "made for cpu, and this server computes on cuda"
        in deployments.health()["last_switch_error"]
    )
    assert deployments.current.served is first


def refused(bundle: Path, code: str, *names: str, **options: Any) -> None:
    with raises_code(code, *names) as caught:
        load_bundle(bundle, **options)
    assert "\n" not in str(caught.value)


def test_a_bundle_without_a_choice_is_not_served_some_other_way(
    tmp_path: Path, tiny_models: dict[Role, Path]
) -> None:
    refused(
        make_bundle(tmp_path / "bundle", tiny_models, None),
        "no_decoding_config",
        str(tmp_path / "bundle"),
    )


def test_a_missing_artifact_is_found_before_the_first_request(
    tmp_path: Path, tiny_models: dict[Role, Path]
) -> None:
    bundle = make_bundle(tmp_path / "bundle", tiny_models, "spide", leave_out="acceptance_table")
    with pytest.raises(
        DraftwellError, match=r"^.*spide.*acceptance_table.*draftwell step calibrate.*[^\n]$"
    ):
        load_bundle(bundle)


def test_a_profile_of_another_machine_is_refused_where_it_matters(
    tmp_path: Path, tiny_models: dict[Role, Path], caplog: pytest.LogCaptureFixture
) -> None:
    bundle = make_bundle(tmp_path / "spide", tiny_models, "spide", machine="abacus")
    refused(bundle, "profile_of_another_machine", "abacus", "cpu-", "draftwell step calibrate")
    plain = make_bundle(tmp_path / "plain", tiny_models, "vanilla_sd", machine="abacus")
    assert load_bundle(plain, slots=1).strategy.name == "vanilla_sd"
    assert "tuned on abacus" in caplog.text


def test_a_profile_of_torchs_layers_is_not_used_with_the_librarys(
    tmp_path: Path, tiny_models: dict[Role, Path], caplog: pytest.LogCaptureFixture
) -> None:
    """The machine is the same, so the names of machines alone would let it pass."""
    by_torch = device_class("cpu") + "+torch-target"
    bundle = make_bundle(tmp_path / "spide", tiny_models, "spide", machine=by_torch)
    refused(bundle, "profile_of_another_machine", "+torch-target", "draftwell step calibrate")
    plain = make_bundle(tmp_path / "plain", tiny_models, "vanilla_sd", machine=by_torch)
    served = load_bundle(plain, slots=1)
    assert "spide" not in served.strategies.names(), "what reads the profile is not offered"
    assert "+torch-target" in caplog.text


def run(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*ENTRY, *options], capture_output=True, text=True, timeout=170, check=False
    )


def one_line(result: subprocess.CompletedProcess[str], *words: str) -> None:
    assert result.returncode == 2, result.stderr
    assert result.stdout == ""
    assert result.stderr.startswith("draftwell-serve: ")
    assert result.stderr.count("\n") == 1
    assert all(word in result.stderr for word in words), result.stderr


def test_help_has_an_example_and_loads_nothing_heavy() -> None:
    result = run("--help")
    assert result.returncode == 0
    assert "Example: draftwell-serve --bundle" in result.stdout
    loaded = subprocess.run(
        [sys.executable, "-c", "import sys, draftwell.serving.server.main; print(*sys.modules)"],
        capture_output=True,
        text=True,
        timeout=170,
        check=True,
    ).stdout.split()
    assert not {"torch", "transformers", "fastapi", "uvicorn", "numpy"} & set(loaded)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ([], "--bundle"),
        (["--bundle", "x", "--port", "99999"], "--port"),
        (["--bundle", "x", "--slots", "0"], "--slots"),
        (["--wat"], "--wat"),
    ],
)
def test_a_wrong_option_is_one_line(options: list[str], word: str) -> None:
    one_line(run(*options), word, "--help")


def test_a_missing_bundle_is_one_line(tmp_path: Path) -> None:
    one_line(
        run("--bundle", str(tmp_path / "none"), "--port", "0"),
        str(tmp_path / "none"),
        "draftwell deploy",
    )


def test_another_address_without_keys_is_one_line(tmp_path: Path) -> None:
    """Before the bundle is looked for, which is not there."""
    options = ["--bundle", str(tmp_path / "none"), "--host", "0.0.0.0", "--port", "0"]
    one_line(run(*options), "--host 0.0.0.0", "--api-key-file", "--insecure")


OPEN: list[dict[str, Any]] = [
    {"host": "0.0.0.0"},
    {"host": "::"},
    {"host": "10.0.0.7"},
    {"host": "example.org"},
    {"host": ""},
    {"cors_origin": ("https://site.example", "*")},
    {"cors_origin": ('["*"]',)},
    {"allowed_host": ("*",)},
]


@pytest.mark.parametrize("options", OPEN, ids=str)
def test_who_is_open_to_others_needs_keys_or_insecure(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    options: dict[str, Any],
) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)

    def start(code: str, *names: str, **more: Any) -> None:
        settings = ServerSettings(bundle=tmp_path / "none", **options, **more)
        with socket.create_server(("127.0.0.1", 0)) as listener, raises_code(code, *names):
            serve_bundles(settings, listener)

    named = f"--{next(iter(options)).replace('_', '-')}"
    start("open_without_keys", named, "--api-key-file", "--insecure")
    start("no_bundle", insecure=True)
    [line] = [line for line in caplog.messages if "event=started_without_keys" in line]
    assert "address=127.0.0.1:" in line
    monkeypatch.setenv(KEY_VARIABLE, "a-key-of-the-operators")
    start("no_bundle")


@pytest.mark.parametrize(
    "options",
    [{"host": "127.0.0.2"}, {"host": "::1"}, {"allowed_host": ("name.example",)}],
    ids=str,
)
def test_who_is_open_to_this_machine_alone_needs_no_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    settings = ServerSettings(bundle=tmp_path / "none", **options)
    with socket.create_server(("127.0.0.1", 0)) as listener, raises_code("no_bundle"):
        serve_bundles(settings, listener)


def test_a_port_in_use_is_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        one_line(run("--bundle", str(tmp_path), "--port", str(port)), f"127.0.0.1:{port}", "--port")


def test_what_outlasts_the_drain_is_answered_503_and_a_stream_ends_with_an_error() -> None:
    """Waiting, decoding and half told requests; none is left without an answer, and the server does
    not wait for them to end."""
    web = create_app(served_pair("autoregressive", slots=2), drain_seconds=0)
    deployments: Deployments = web.state.deployments
    scheduler, body = (
        deployments.current.scheduler,
        {"model": "tiny", "prompt": "hello", "max_tokens": 200, "temperature": 0},
    )
    step = scheduler.engine.step

    def slowly() -> None:
        time.sleep(0.1)
        step()

    scheduler.engine.step = slowly  # type: ignore[method-assign]
    it = DrainingServer(
        uvicorn.Config(web, port=0, log_level="error", timeout_graceful_shutdown=5),
        deployments,
        0.3,
    )
    serving = threading.Thread(target=it.run, daemon=True)
    serving.start()
    wait_until(lambda: it.started, "the server starts")
    url = f"http://127.0.0.1:{it.servers[0].sockets[0].getsockname()[1]}/v1/completions"
    answers: list[httpx.Response] = []
    lines: list[str] = []

    def tell() -> None:
        with httpx.stream("POST", url, json=body | {"stream": True}, timeout=30) as stream:
            lines.extend(line for line in stream.iter_lines() if line)

    asking = [
        threading.Thread(target=tell),
        *(
            threading.Thread(target=lambda: answers.append(httpx.post(url, json=body, timeout=30)))
            for _ in range(3)
        ),
    ]
    for thread in asking:
        before = deployments.users
        thread.start()
        wait_until(lambda before=before: deployments.users > before, "the request arrives")
    wait_until(
        lambda: (scheduler.running, scheduler.waiting, len(lines) > 1) == (2, 2, True),
        "two requests run and two wait",
    )
    asked_at = time.monotonic()
    it.handle_exit(signal.SIGTERM, None)
    for thread in (*asking, serving):
        thread.join(20)
    assert not any(thread.is_alive() for thread in (*asking, serving)), (
        "the rest would have taken 40 s"
    )
    assert time.monotonic() - asked_at > 0.3
    assert [(answer.status_code, answer.json()["error"]["type"]) for answer in answers] == [
        (503, "server_error")
    ] * 3
    assert (
        json.loads(lines[-1].removeprefix("data: "))["error"]["message"]
        == "the server is shutting down"
    )
    assert not scheduler.alive, "nothing decodes while state and feedback are written"


def test_the_command_answers_from_a_bundle_and_ends_on_sigterm(
    tmp_path: Path, tiny_models: dict[Role, Path]
) -> None:
    bundle = make_bundle(tmp_path / "bundle", tiny_models, "vanilla_sd")
    command = [*ENTRY, "--bundle", str(bundle), "--port", "0", "--slots", "1", "--threads", "1"]
    with server_process(command, stderr=subprocess.PIPE) as (process, url):
        body = {
            "model": "tiny",
            "messages": [{"role": "user", "content": "hi"}],
            "max_tokens": 3,
            "temperature": 0,
        }
        response = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
        assert response.status_code == 200, response.text
        answer = response.json()
        assert answer["usage"]["completion_tokens"] <= 3
        assert answer["speculation"]["strategy"] == "vanilla_sd"
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    assert "Traceback" not in errors
    assert process.returncode == 0
