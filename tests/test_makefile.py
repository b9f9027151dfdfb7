"""What `make clean` keeps, that `make reset` asks, and where `make setup` gets PyTorch."""

import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.support.paths import REPO

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")

MADE_AGAIN = (
    ".draftwell/models/a/model.safetensors",
    ".draftwell/onnx/a.onnx",
    ".draftwell/gate.md",
    ".draftwell/bench.json",
    ".draftwell/gpu-kit/wheels/a.whl",
    "dist/tiny/1-cpu/manifest.json",
    "build/a",
)
KEPT = (
    ".draftwell/gpu/tiny-cuda-a.json",
    ".draftwell/mlflow/mlflow.db",
    ".draftwell/pairs/mine.yaml",
    ".draftwell/pairs/tiny/float32/traces/shard-00000.parquet",
    ".draftwell/spool/tiny/a.parquet",
    ".draftwell/judged/tiny/1-cpu/manifest.json",
    ".draftwell/prefect/prefect.db",
)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    shutil.copyfile(REPO / "Makefile", tmp_path / "Makefile")
    for folder in ("draftwell", "flows", "components", "registry", "serving", "tests"):
        (tmp_path / folder / "__pycache__").mkdir(parents=True)
    for name in (*MADE_AGAIN, *KEPT):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    return tmp_path


def make(folder: Path, *words: str, answer: str = "") -> subprocess.CompletedProcess[str]:
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "FORCE"))
    }
    return subprocess.run(
        ["make", *words],
        cwd=folder,
        env=environment,
        input=answer,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_demo_installs_what_the_loop_needs_and_a_test_all_of_it(checkout: Path) -> None:
    """Who wants to see the loop waits for no linter; nor for pip to compile what is never
    imported."""
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copyfile(REPO / name, checkout / name)
    installs = re.compile(r"pip install|\.ci/install")
    loop, everything = (
        [line for line in make(checkout, "-n", task).stdout.splitlines() if installs.search(line)]
        for task in ("demo", "test")
    )
    assert any(".ci/install run pipeline,server;" in line for line in loop)
    assert [line for line in loop if "dev" in line] == []
    assert everything[: len(loop)] == loop
    assert [
        "install dev pipeline,server,remote,dev;" in line for line in everything[len(loop) :]
    ] == [True]
    script = (REPO / ".ci" / "install").read_text()
    for text in (*(line for line in everything if "pip install" in line), script):
        assert "--no-compile" in text


def present(folder: Path, names: tuple[str, ...]) -> list[str]:
    return [name for name in names if (folder / name).exists()]


def test_clean_keeps_the_registry_and_whatever_cannot_be_made_again(checkout: Path) -> None:
    assert make(checkout, "clean").returncode == 0
    assert (present(checkout, MADE_AGAIN), present(checkout, KEPT)) == ([], list(KEPT))
    assert not (checkout / "flows" / "__pycache__").exists()


@pytest.mark.parametrize("answer", ["", "n\n", "yes please\n"])
def test_reset_removes_nothing_without_a_yes(checkout: Path, answer: str) -> None:
    assert make(checkout, "reset", answer=answer).returncode != 0
    assert present(checkout, KEPT) == list(KEPT)


@pytest.mark.parametrize(("words", "answer"), [((), "y\n"), (("FORCE=1",), "")])
def test_reset_removes_all_state_when_told(
    checkout: Path, words: tuple[str, ...], answer: str
) -> None:
    assert make(checkout, "reset", *words, answer=answer).returncode == 0
    assert not (checkout / ".draftwell").exists()


def test_peers_are_installed_from_exact_versions_and_only_once(checkout: Path) -> None:
    """A stand-in for Python notes what it is asked for. An environment without a stamp, of a
    stopped installation, is made again."""
    python, log = checkout / "python", checkout / "log"
    python.write_text(
        f'#!/bin/sh\necho "$@" >> {log}\n[ "$2" != venv ] || {{ mkdir -p "$3/bin"; cp "$0" '
        '"$3/bin/python"; }\n'
    )
    python.chmod(0o755)
    folder = checkout / "components" / "bench" / "peers"
    folder.mkdir(parents=True)
    (checkout / ".ci").mkdir(exist_ok=True)
    (checkout / ".ci" / "torch-index").write_text(
        '#!/bin/sh\n[ "$1" = cpu ] && echo --index-url some-index\n'
    )
    (checkout / ".ci" / "torch-index").chmod(0o755)
    for name in ("vllm", "llama.cpp"):
        shutil.copyfile(
            REPO / folder.relative_to(checkout) / f"requirements-{name}.txt",
            folder / f"requirements-{name}.txt",
        )
    assert (
        make(
            checkout, "peers", f"PYTHON={python}", "PEERS_DIR=made", "PEERS=vllm llama.cpp"
        ).returncode
        == 0
    )
    asked = log.read_text().splitlines()
    assert [line for line in asked if "venv" in line] == [
        "-m venv made/vllm",
        "-m venv made/llama.cpp",
    ]
    assert [line.split("-r ")[1] for line in asked if "--no-deps" in line] == [
        "made/vllm/.torch",
        "components/bench/peers/requirements-vllm.txt",
        "components/bench/peers/requirements-llama.cpp.txt",
    ]
    assert ["index" in line for line in asked if "--no-deps" in line] == [True, False, False], (
        "PyTorch's index has its build for CPUs"
    )
    assert (checkout / "made" / "vllm" / ".torch").read_text().count("\n") == 1
    assert present(checkout, ("made/vllm/.stamp", "made/llama.cpp/.stamp")) == [
        "made/vllm/.stamp",
        "made/llama.cpp/.stamp",
    ]
    (checkout / "made" / "vllm" / ".stamp").unlink()
    assert (
        make(
            checkout, "peers", f"PYTHON={python}", "PEERS_DIR=made", "PEERS=vllm llama.cpp"
        ).returncode
        == 0
    )
    assert [line for line in log.read_text().splitlines()[len(asked) :] if "venv" in line] == [
        "-m venv made/vllm"
    ]


@pytest.mark.parametrize("name", ["vllm", "llama.cpp"])
def test_versions_of_peers_are_exact(name: str) -> None:
    lines = (
        (REPO / "components" / "bench" / "peers" / f"requirements-{name}.txt")
        .read_text()
        .splitlines()
    )
    pins = [line for line in lines if not line.startswith("#")]
    assert pins
    assert [line for line in pins if line.count("==") != 1] == []


@pytest.mark.parametrize(
    ("words", "password", "started"),
    [
        ((), "", True),
        (("PREFECT_HOST=0.0.0.0",), "", False),
        (("PREFECT_HOST=",), "", False),
        (("PREFECT_HOST=10.0.0.7",), "ann:secret", True),
        (("PREFECT_HOST=::", "INSECURE=1"), "", True),
    ],
)
def test_prefects_server_lets_no_other_machine_in_without_a_password(
    checkout: Path,
    words: tuple[str, ...],
    password: str,
    started: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PREFECT_SERVER_API_AUTH_STRING", password)
    prefect = checkout / ".venv" / "bin" / "prefect"
    prefect.parent.mkdir(parents=True)
    prefect.write_text('#!/bin/sh\necho "$@" > started\n')
    prefect.chmod(0o755)
    (checkout / ".venv" / ".stamp").touch()
    done = make(checkout, "--assume-old=.venv/.stamp", "prefect-server", *words)
    assert (done.returncode == 0, (checkout / "started").exists()) == (started, started)
    assert started or "PREFECT_SERVER_API_AUTH_STRING=name:password" in done.stdout


# Where PyTorch comes from

TORCH_INDEX = REPO / ".ci" / "torch-index"
SILENT = "http://127.0.0.1:9"
"""An address where nobody answers."""


def torch_index(*words: str, path: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {
        "PATH": f"{path}:{os.environ['PATH']}".lstrip(":"),
        "PYTHON": sys.executable,
        **variables,
    }
    return subprocess.run(
        [str(TORCH_INDEX), *words], env=environment, capture_output=True, text=True, check=True
    )


@pytest.fixture
def index() -> Iterator[str]:
    """An index that answers."""

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/torch/" else 404)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


without_gpu = pytest.mark.skipif(
    not sys.platform.startswith("linux")
    or Path("/dev/nvidiactl").exists()
    or Path("/dev/dxg").exists(),
    reason="needs Linux without an NVIDIA GPU",
)


@without_gpu
def test_without_a_gpu_torch_is_a_build_for_cpus(index: str) -> None:
    done = torch_index("", index)
    assert done.stdout == f"--index-url {index}\n"
    assert "TORCH_INDEX=none" in done.stderr


def test_a_package_that_needs_a_build_for_cpus_gets_it_on_every_machine(
    index: str, tmp_path: Path
) -> None:
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho GPU 0\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    done = torch_index("cpu", index, path=str(tmp_path))
    assert done.stdout == f"--index-url {index}\n"
    assert "no GPU" not in done.stderr
    assert torch_index("cpu", SILENT).stdout == ""


@without_gpu
def test_an_index_that_does_not_answer_is_left_out_and_told() -> None:
    done = torch_index("", SILENT)
    assert done.stdout == ""
    assert done.stderr.startswith(f"{SILENT} does not answer: PyTorch from pip's own index")
    assert done.stderr.count("\n") == 1


def test_the_user_has_the_last_word_on_the_index(index: str, tmp_path: Path) -> None:
    assert (torch_index("none", index).stdout, torch_index(SILENT, index).stdout) == (
        "",
        f"--index-url {SILENT}\n",
    )
    assert (
        torch_index("", index, PIP_EXTRA_INDEX_URL="https://download.pytorch.org/whl/cu130").stdout
        == ""
    )
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho GPU 0\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    assert torch_index("", index, path=str(tmp_path)).stdout == "", (
        "with a GPU pip's own index has the right build"
    )


def test_no_other_package_is_looked_for_in_pytorchs_index(checkout: Path) -> None:
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copyfile(REPO / name, checkout / name)
    lines = [
        line
        for line in make(checkout, "-n", "setup", "TORCH_INDEX=mine").stdout.splitlines()
        if "pip install" in line
    ]
    assert [
        ('torch-index "mine"' in line, " torch " in line) for line in lines if "torch-index" in line
    ] == [(True, True)]
    assert ["--no-deps" in line for line in lines if "torch-index" in line] == [True], (
        "what PyTorch needs comes with the rest"
    )
    asked = [
        line
        for line in make(checkout, "-n", "hashes", "TORCH_INDEX=mine").stdout.splitlines()
        if "--dry-run" in line
    ]
    assert [("/.torch " in line, "torch-index" in line) for line in asked] == [
        (True, True),
        (False, False),
    ]
    assert [line for line in lines if "--report " not in line] == []


@pytest.mark.parametrize(
    ("build", "glibc", "lock", "files"),
    [
        ("2.13.0+cpu", "2.36", "", True),
        ("2.13.0+cpu", "2.41", "", True),
        ("2.13.0+cpu", "2.9", "", False),
        ("2.13.0+cpu", "2.36", "off", False),
        ("2.13.0", "2.36", "", False),
        ("2.13.0+cu130", "2.36", "", False),
    ],
)
def test_what_is_installed_has_the_hash_of_the_lock(
    tmp_path: Path, build: str, glibc: str, lock: str, files: bool
) -> None:
    """A stand-in for Python notes what pip is asked for; a build for CUDA brings libraries that no
    lock has, and where glibc is older than the lock's pip takes other files."""
    python, log = tmp_path / "python", tmp_path / "log"
    python.write_text(
        f'#!/bin/sh\ncase "$2" in *sysconfig*) echo here ;; *libc_ver*) echo {glibc} ;; '
        f'*torch*) echo "{build.partition("+")[2]}" ;; *) echo "$@" >> {log} ;; esac\n'
    )
    python.chmod(0o755)
    locks = tmp_path / ".ci" / "locks" / "here"
    locks.mkdir(parents=True)
    (locks / "run.txt").write_text(
        "# glibc 2.36\nnumpy==1 --hash=sha256:a\nsetuptools==2 --hash=sha256:b\n"
    )
    subprocess.run(
        [str(REPO / ".ci" / "install"), "run", "pipeline,server"],
        cwd=tmp_path,
        env={**os.environ, "PYTHON": str(python), "REPORTS": str(tmp_path / "r"), "LOCK": lock},
        check=True,
    )
    asked = [line.split(".json ")[1] for line in log.read_text().splitlines()]
    if not files:
        assert asked == ["-c constraints.txt -e .[pipeline,server]"]
        return
    assert asked == [
        f"--require-hashes --no-deps -r {tmp_path}/r/.first",
        "--require-hashes --no-deps --no-build-isolation -r .ci/locks/here/run.txt",
        "--no-deps --no-build-isolation -e .",
    ]


def test_only_a_run_with_the_papers_data_sets_writes_their_page(checkout: Path) -> None:
    """Other prompts are another page; and a quick run is one in any case."""
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copyfile(REPO / name, checkout / name)
    commands = {
        words: make(checkout, "-n", "papers", *words).stdout.splitlines()[-1]
        for words in ((), ("DATA=sets",), ("DATA=sets", "FLAGS=--set quick=true"))
    }
    assert [
        ("--set page=docs/papers.md" in command, '--data "sets"' in command)
        for command in commands.values()
    ] == [(False, False), (True, True), (False, True)]
