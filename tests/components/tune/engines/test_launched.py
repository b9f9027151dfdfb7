"""A tuning over engines that a launcher starts: what fails is left out, a killed one resumes, and
where one runs at a time intervals are wider."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from draftwell.components.bench.engines.figures import figure_of
from draftwell.components.bench.engines.measure import Beside, Side, measurements_of
from draftwell.components.engines import launcher as module
from draftwell.components.engines.launch_template import LaunchTemplate
from draftwell.components.engines.launched import LaunchedEngine
from draftwell.components.engines.launcher import Launcher, listens
from draftwell.components.engines.port import Decoded
from draftwell.components.engines.remote.address import parse_address
from draftwell.components.engines.vllm_methods import Method, VllmFiles
from draftwell.components.export.launch_options import launch_options
from draftwell.components.tune.engines import candidates, tune
from draftwell.components.tune.engines.lab import Lab
from draftwell.components.tune.engines.settings import EngineTuneSettings
from draftwell.components.tune.engines.tune import tune_engine
from draftwell.serving.runtime.requests import Sampling
from tests.support.launching.ports import two_free_ports
from tests.support.paths import REPO

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="groups of processes of Linux")

PLAYED = REPO / "tests" / "support" / "launching" / "played_vllm.py"
PROMPTS = [[5 + i, 6] for i in range(8)]
METHODS = ("ngram", "draft_model", "eagle3")
SETTINGS = EngineTuneSettings(methods=METHODS)
PACE = {"eagle3(k=3)": 1.8, "ngram(k=3,n=2)": 1.2}
"""Way → times plain decoding."""
FILES = VllmFiles(Path("target"), draft=Path("draft"), head=Path("head"))


class Clocked(LaunchedEngine):
    """Its answers take as long as they should, not as long as they do on a busy machine."""

    def decode(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> Decoded:
        made = super().decode(prompts, sampling)
        seconds = 0.1 / PACE.get(self.label, 1.0)
        answers = [one.model_copy(update={"seconds": seconds}) for one in made.answers]
        return Decoded(seconds=seconds, answers=answers)


@contextmanager
def lab(
    folder: Path, more: str = "", *, port: str = "{port}", lines: list[str] | None = None
) -> Iterator[Lab]:
    """With its engines, which end with it."""
    first = two_free_ports()
    where = port if port.startswith("{") else str(first)
    command = f"{sys.executable} {PLAYED} {where} {{speculation_options}}"
    said: list[str] = [] if lines is None else lines
    with Launcher(
        LaunchTemplate(f"{command} {more}"),
        parse_address(f"http://127.0.0.1:{first}"),
        folder,
        say=said.append,
    ) as launcher:

        def make(label: str) -> Clocked:
            said.append(f"make {label}")
            return Clocked(label, launcher, lambda one: launch_options("vllm", one))

        store = measurements_of({}, folder / "measurements.jsonl")
        bench = Lab(
            make, FILES, PROMPTS, Sampling(max_tokens=6), 1, 64, 8, store, apart=launcher.alternates
        )
        bench.lengths = dict.fromkeys(METHODS, (3,))
        with bench.open():
            yield bench
    assert not any(listens(address.url) for address in launcher.addresses)


@pytest.fixture(autouse=True)
def asked_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ASK_SECONDS", 0.05)


@pytest.fixture(autouse=True)
def few_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidates, "NGRAMS", (2,))
    monkeypatch.setattr(tune, "EXPLORED", 2)


def test_what_dies_and_what_does_not_start_is_left_out_with_its_reason(tmp_path: Path) -> None:
    with lab(tmp_path, "--die-with ngram --refuse draft_model") as bench:
        found = tune_engine(bench, SETTINGS)
    assert found.chosen == Method("eagle3", 3)
    assert "the drafter has no weights" in found.left_out["ngram"]
    assert "no such method here" in found.left_out["draft_model(k=3)"]


def test_a_killed_tuning_goes_on_with_what_was_not_measured(tmp_path: Path) -> None:
    settings = EngineTuneSettings(methods=("ngram", "eagle3"))

    def stopped(done: int, total: int, label: str) -> None:
        if label == "eagle3(k=3)":
            raise KeyboardInterrupt

    with lab(tmp_path) as bench:
        bench.progress = stopped
        with pytest.raises(KeyboardInterrupt):
            tune_engine(bench, settings)
    lines: list[str] = []
    with lab(tmp_path, lines=lines) as bench:
        assert bench.store.read == 4, "one way, and its halves"
        assert tune_engine(bench, settings).chosen == Method("eagle3", 3)
    made = [line for line in lines if line.startswith("make")]
    assert [made.count(f"make {name}") for name in ("ngram(k=3,n=2)", "eagle3(k=3)")] == [0, 1]


def test_one_address_is_shared_by_halves(tmp_path: Path) -> None:
    order: list[str] = []
    with lab(tmp_path, port="fixed") as bench:
        bench.progress = lambda done, total, label: order.append(label)
        (figure,) = bench.measure(Method("eagle3", 3), "confirm")
        beside = bench.found(Method("eagle3", 3), "confirm")
    assert order == ["off"] * 4 + ["eagle3(k=3)"] * 8 + ["off"] * 4
    assert beside.apart
    assert beside.plain.outputs == beside.other.outputs
    assert len(beside.plain.seconds) == len(PROMPTS)
    assert figure.ratio == pytest.approx(1.8)
    in_turn = figure_of("eagle3", beside.model_copy(update={"apart": False}))
    assert figure.low <= in_turn.low
    assert figure.high >= in_turn.high


def side(seconds: Sequence[float]) -> Side:
    return Side(
        seconds=list(seconds),
        tokens=[8] * len(seconds),
        each_seconds=[[one] for one in seconds],
        outputs=[[[5] * 8] for _ in seconds],
    )


def test_a_machine_that_changed_between_the_halves_leaves_the_choice_open() -> None:
    """The other one looks faster in one half only: in turn that would not have happened."""
    plain, other = side([2.0] * 4 + [1.0] * 4), side([1.0] * 8)
    prompts = [[i] for i in range(8)]
    apart = figure_of("x", Beside(at_once=1, plain=plain, other=other, prompts=prompts, apart=True))
    assert apart.low < 1.0 < apart.ratio
    steady = side([2.0] * 8)
    sure = figure_of("x", Beside(at_once=1, plain=steady, other=other, prompts=prompts, apart=True))
    assert (sure.low, sure.high) == pytest.approx((2.0, 2.0))
