"""Isolation: no test reads or writes a store, a cache or a home directory outside a temporary
folder.

One exception: converted models (`DRAFTWELL_MODELS`) are shared by all tests and runs, because
converting the default pair's target takes tens of seconds and its result never changes.
"""

import gc
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hypothesis
import pytest

REPO = Path(__file__).resolve().parent.parent
pytest.register_assert_rewrite("tests.support")
# A server, run or experiment of the developer's own would let the tests write there.
FOREIGN = (
    "PREFECT_API_URL",
    "PREFECT_API_KEY",
    "MLFLOW_REGISTRY_URI",
    "MLFLOW_RUN_ID",
    "MLFLOW_EXPERIMENT_NAME",
    "DRAFTWELL_PEERS",
    "DRAFTWELL_GATES",
    "DRAFTWELL_WEBHOOKS",
    "DRAFTWELL_WEBHOOK_SECRET",
)

# No deadline: a busy machine is slow, not wrong. Derandomised: a red run can be repeated.
hypothesis.settings.register_profile("house", deadline=None, derandomize=True)
hypothesis.settings.load_profile("house")


def store_settings(folder: Path) -> dict[str, str]:
    """The variables that place Draftwell's state and MLflow's database inside `folder`."""
    return {
        "DRAFTWELL_HOME": str(folder / "draftwell"),
        "MLFLOW_TRACKING_URI": f"sqlite:///{folder / 'mlflow.db'}",
    }


def process_settings(folder: Path) -> dict[str, str]:
    """The variables that libraries read once, at import, and that children of the tests inherit."""
    home = folder / "home"
    return {
        "HOME": str(home),
        "XDG_CACHE_HOME": str(home / ".cache"),
        "XDG_CONFIG_HOME": str(home / ".config"),
        "HF_HOME": str(home / "huggingface"),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "PREFECT_HOME": str(folder / "prefect"),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "300",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "DO_NOT_TRACK": "1",
        "MPLBACKEND": "Agg",
        # One thread: the models of most tests are tiny, and two threads on a busy machine wait for
        # each other. torch reads this when it is imported.
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        **store_settings(folder),
    }


def pytest_addoption(parser: pytest.Parser) -> None:
    """Speeds are measured when asked for: what a machine is, and what else runs on it, must not
    turn a test red."""
    parser.addoption(
        "--timed",
        action="store_true",
        help="run the tests that hold speeds and bfloat16 counts against bars (idle machine)",
    )
    parser.addoption(
        "--soak",
        action="store_true",
        help="run the long trials of whole loops (idle machine, up to an hour)",
    )
    parser.addoption(
        "--require",
        default="",
        metavar="WORDS",
        help="a test that is skipped for a reason with one of these words has failed "
        "(commas between them; upper and lower case are one)",
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """With `--require`: what is missing turns a run red, instead of a test into a skip."""
    report = yield
    words = [word.strip().lower() for word in item.config.getoption("--require").split(",")]
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
    if report.skipped and any(word and word in reason.lower() for word in words):
        report.outcome = "failed"
        report.longrepr = f"--require: {reason}"
    return report


TIMEOUTS = {"soak": 7200, "timed": 3600, "slow": 1800}
"""Marker → seconds after which a test has hung; quick tests have the `timeout` of
pyproject.toml."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what needs an idle machine, with its reason, and give the long tests more time than the
    quick ones.

    Where several processes run (each of them collects, as a worker), the longest files come first.
    """
    if hasattr(config, "workerinput"):
        from tests.support.side_by_side import place_of

        items.sort(key=lambda item: place_of(item.nodeid))
    for item in items:
        limits = [seconds for mark, seconds in TIMEOUTS.items() if item.get_closest_marker(mark)]
        if limits and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(max(limits)))
    for mark, what in (("timed", "a figure of this machine"), ("soak", "a long trial")):
        if not config.getoption(f"--{mark}"):
            for item in items:
                if item.get_closest_marker(mark):
                    item.add_marker(
                        pytest.mark.skip(reason=f"{what}: run it with --{mark} on an idle machine")
                    )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Who hands out the tests to several processes."""
    from tests.support.side_by_side import scheduler

    return scheduler(config, log)


def pytest_collection_finish() -> None:
    """Let the collector of garbage look at what the tests make alone, and less often than after
    every 700 objects."""
    gc.freeze()
    gc.set_threshold(10_000)
    gc.enable()


def pytest_configure(config: pytest.Config) -> None:
    """Set the environment before any test module imports a library that reads it at import
    (Prefect, the hub)."""
    # What is imported stays; to look through it for garbage takes a fifth of the time.
    gc.disable()
    folder = Path(tempfile.mkdtemp(prefix="draftwell-tests-"))
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    (folder / "home").mkdir()
    for name in FOREIGN:
        os.environ.pop(name, None)
    os.environ.update(process_settings(folder))
    os.environ.setdefault("DRAFTWELL_MODELS", str(REPO / ".draftwell" / "models"))


@pytest.fixture(scope="module", autouse=True)
def isolated_stores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Fresh stores for each test file; per file, so that its tests can share what was trained or
    published once.

    A test that needs a store of its own takes `own_stores`.
    """
    folder = tmp_path_factory.mktemp("stores")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in store_settings(folder).items():
            patch.setenv(name, value)
        yield folder


@pytest.fixture(scope="session", autouse=True)
def nothing_waits_for_the_disk() -> Iterator[None]:
    """No power is cut while a test runs (`support/lost_writes.py` plays that), so what is written
    need not be safe on disk; databases alone would wait for it thousands of times."""
    from sqlalchemy import Engine, event

    def unsafe(connection: Any, _: object) -> None:
        if isinstance(connection, sqlite3.Connection):
            connection.execute("PRAGMA synchronous = OFF")

    event.listen(Engine, "connect", unsafe)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", os.fstat)  # which refuses closed files, too
        yield


@pytest.fixture(scope="session", autouse=True)
def template_database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """MLflow's database is made once for each process of the tests, here, and copied where one is
    needed: making it takes seconds."""
    from draftwell.registry import connection

    template, take_turns = (
        tmp_path_factory.mktemp("template") / "mlflow.db",
        connection.one_at_a_time,
    )

    @contextmanager
    def copied(uri: str) -> Iterator[None]:
        with take_turns(uri):
            file = Path(uri.removeprefix(connection.SQLITE))
            fresh = uri.startswith(connection.SQLITE) and file != template and not file.exists()
            if fresh and not template.exists():
                connection.connect(f"{connection.SQLITE}{template}")
            if fresh:
                shutil.copyfile(template, file)
            yield

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connection, "one_at_a_time", copied)
        yield template


@pytest.fixture
def own_stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Fresh stores for a single test. Returns the folder that holds them."""
    for name, value in store_settings(tmp_path).items():
        monkeypatch.setenv(name, value)
    return tmp_path


@pytest.fixture(scope="session")
def empty_database(template_database: Path) -> Path:
    """MLflow's database without content, to copy where a test needs one before anybody asks the
    registry."""
    from draftwell.registry.connection import SQLITE, connect

    connect(f"{SQLITE}{template_database}")
    return template_database
