"""`draftwell step choose` and its station: what is kept, what goes on, what is refused, and the
champion beside it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftwell.components.prompts.overlap import hashes_of
from draftwell.components.prompts.prompt import prompts_digest, read_prompts
from draftwell.serving.artifacts.decoding_config import DecodingConfig
from draftwell.serving.runtime.strategies import PLAIN, StrategyChoice, served_choice
from tests.support.loop.bad_traces import foreign
from tests.support.loop.tiny_files import snapshot


@pytest.fixture
def tune(run: Any, pair_file: Path, prompts_file: Path, own_stores: Path) -> Callable[..., Any]:
    """Runs the command on a pair that was collected."""
    done = run(
        f"step collect --pair {pair_file} --prompts {prompts_file} --set limit=6 --set "
        f"max_tokens=12"
    )
    assert done.exit_code == 0, done.output
    return lambda *more: run(
        f"step choose --pair {pair_file} --prompts {prompts_file} --set limit=2 "
        "--set max_tokens=8 --set trials=4 --set publish=false",
        *more,
    )


@pytest.fixture
def space(own_stores: Path) -> Path:
    return own_stores / "draftwell" / "pairs" / "tiny" / "float32"


def refused(done: Any, *words: str) -> None:
    assert done.exit_code == 2, (done.output, done.exception)
    line = done.stderr.strip().splitlines()[-1]
    assert line.startswith("Error: ")
    for word in words:
        assert word in line


@pytest.mark.slow
def test_what_is_kept_and_that_it_goes_on(
    tune: Callable[..., Any], space: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from draftwell.components.tune import evaluator as contest

    real, counted = contest.Evaluator.__call__, []

    def dies(self: Any, configs: Any, prompts: Any, **more: Any) -> Any:
        counted.append(configs)
        if len(counted) == 3:
            raise KeyboardInterrupt
        return real(self, configs, prompts, **more)

    with monkeypatch.context() as patch:
        patch.setattr(contest.Evaluator, "__call__", dies)
        assert tune().exit_code != 0
    assert {path.name for path in (space / "cpu" / "tuning").iterdir()} == {
        "trials.jsonl",
        "rungs.jsonl",
    }
    assert not (space / "cpu" / "artifacts" / "decoding_config").exists()
    counted.clear()
    with monkeypatch.context() as patch:
        patch.setattr(
            contest.Evaluator,
            "__call__",
            lambda self, configs, prompts, **more: (
                counted.append(configs) or real(self, configs, prompts, **more)
            ),
        )
        done = tune()
    assert done.exit_code == 0, (done.output, done.exception)
    assert {path.name for path in (space / "cpu" / "tuning").iterdir()} == {"trials.jsonl"}, (
        "a finished tuning has nothing to resume"
    )
    report = json.loads((space / "cpu" / "reports" / "tuning.json").read_text())
    assert (
        len(counted)
        < len(report["rungs"])
        + 1
        + len([t for t in report["trials"] if t["source"] == "measured"])
        + 1
    )
    assert done.stdout.startswith(f"chosen: {report['strategy']}")
    kept = json.loads((space / "cpu" / "artifacts" / "decoding_config" / "config.json").read_text())
    assert kept["evidence"]["trace_digest"] == report["trace_digest"]


@pytest.mark.slow
def test_a_file_that_is_no_study_stays_as_it_is(
    tune: Callable[..., Any], space: Path, own_stores: Path
) -> None:
    study = own_stores / "mine.jsonl"
    assert tune(f"--set study={study}").exit_code == 0
    before = snapshot(space)
    # the second: as up to 0.6
    for other in (b"no trials at all " * 100, b"SQLite format 3\x00" * 100):
        study.write_bytes(other)
        refused(tune(f"--set study={study}"), "mine.jsonl is no file of trials", "--set study=")
        assert study.read_bytes() == other
    refused(tune(f"--set study={own_stores}/nowhere/mine.jsonl"), "nowhere", "does not exist")
    assert snapshot(space) == before


@pytest.mark.slow
def test_prompts_that_were_collected_on_are_not_measured_on(
    tune: Callable[..., Any], run: Any, space: Path, pair_file: Path, prompts_file: Path
) -> None:
    """The same file for each command, as a user does it: six prompts for the traces, the next two
    are measured on."""
    done = tune()
    assert done.exit_code == 0, (done.output, done.exception)
    assert "6 prompts left out: they were used to make traces" in done.stderr
    rows = read_prompts(prompts_file)
    evidence = json.loads((space / "cpu" / "reports" / "tuning.json").read_text())
    assert evidence["prompts_digest"] == prompts_digest(rows[6:8])
    made = DecodingConfig.load(space / "cpu" / "artifacts" / "decoding_config").provenance
    assert made.training_prompts == hashes_of(rows[:8])
    done = run(
        f"step choose --pair {pair_file} --prompts {prompts_file} --set limit=2 --set traces="
        f"{space}/traces --set publish=false --set max_tokens=4 --set trials=1",
    )
    assert done.exit_code == 0, (done.output, done.exception)
    done = run(
        f"step collect --pair {pair_file} --prompts {prompts_file} --set max_tokens=4 --set "
        f"fresh=true"
    )
    assert done.exit_code == 0, (done.output, done.exception)
    refused(tune(), "no prompt is left: all 12 were used to make traces", "--prompts")


@pytest.mark.slow
def test_a_padded_target_leaves_nothing_behind(
    tune: Callable[..., Any], space: Path, own_stores: Path
) -> None:
    before = snapshot(own_stores)
    done = tune("--set pad_target=500000")
    assert done.exit_code == 0, (done.output, done.exception)
    assert "neither saved nor registered" in done.stderr
    assert snapshot(own_stores) == before


@pytest.mark.slow
def test_constraints_reach_the_tuner(tune: Callable[..., Any], space: Path) -> None:
    done = tune("--set max_cost_ratio=0.01 --set max_quality_loss=0.1 --set max_tokens=14")
    assert done.exit_code == 0, (done.output, done.exception)
    assert "max_quality_loss changes nothing without lossless_only=false" in done.stderr
    assert (
        "predicting texts of 12 tokens, which is all that the trace has, and measuring 14"
        in done.stderr
    )
    assert done.stdout.startswith("chosen: autoregressive")
    assert "keeps to the constraints" in done.stdout
    constraints = json.loads((space / "cpu" / "reports" / "tuning.json").read_text())["constraints"]
    assert constraints == {
        "lossless_only": True,
        "max_quality_loss": 0.1,
        "max_rouge_l_loss": 2.0,
        "max_cost_ratio": 0.01,
    }


def test_an_unfit_trace_is_refused_before_the_machine_is_measured(
    tune: Callable[..., Any],
    run: Any,
    space: Path,
    pair_file: Path,
    prompts_file: Path,
    own_stores: Path,
) -> None:
    sampled = own_stores / "sampled"
    done = run(
        f"step collect --pair {pair_file} --prompts {prompts_file} --set limit=2 --set "
        f"max_tokens=4 "
        f"--set temperature=0.7 --set out={sampled}",
    )
    assert done.exit_code == 0, done.output
    before = snapshot(space)
    for bad, word in (
        (foreign(space / "traces", own_stores / "foreign"), "stranger"),
        (sampled, "sampled at temperature 0.7"),
    ):
        refused(tune(f"--set traces={bad}"), word)
        assert snapshot(space) == before, "a hardware profile would lie there"


@pytest.mark.slow
def test_each_class_of_temperatures_is_tuned_by_itself(
    tune: Callable[..., Any], run: Any, space: Path, pair_file: Path, prompts_file: Path
) -> None:
    """On traces of its own, which lie beside the greedy ones; the other choice stays as it is, with
    its evidence."""
    kept = space / "cpu" / "artifacts" / "decoding_config"
    refused(tune("--set temperature=0.7"), "no traces", "--set temperature=0.7")
    done = run(
        f"step collect --pair {pair_file} --prompts {prompts_file} --set limit=4 --set "
        f"max_tokens=12 "
        "--set temperature=0.7",
    )
    assert done.exit_code == 0, done.output
    assert tune("--set temperature=0.7").exit_code == 0
    first = DecodingConfig.load(kept)
    assert (first.strategy, first.evidence) == ("autoregressive", {}), (
        "nothing is tuned for greedy requests yet"
    )
    assert first.sampled is not None
    assert (first.sampled.temperature, first.sampled.evidence["temperature"]) == (0.7, 0.7)
    done = tune("--set max_tokens=7")
    assert done.exit_code == 0, (done.output, done.exception)
    both = DecodingConfig.load(kept)
    assert both.sampled == first.sampled
    assert both.evidence["max_tokens"] == 7
    assert (
        both.provenance.trace_digest
        == both.evidence["trace_digest"]
        != first.sampled.evidence["trace_digest"]
    )
    assert tune("--set temperature=0.7 --set max_tokens=6").exit_code == 0
    again = DecodingConfig.load(kept)
    assert (again.evidence, again.provenance.trace_digest) == (
        both.evidence,
        both.provenance.trace_digest,
    )
    assert again.sampled is not None
    assert again.sampled.evidence["max_tokens"] == 6
    written = {p.name for p in (space / "cpu" / "reports").iterdir()}
    assert {"tuning.json", "tuning.html", "tuning_sampled.json", "tuning_sampled.html"} <= written


@pytest.mark.slow
def test_the_champion_is_asked_of_a_registry_that_exists(
    tune: Callable[..., Any], space: Path, own_stores: Path, pair_file: Path, empty_database: Path
) -> None:
    from draftwell.flows.loading import open_pair
    from draftwell.flows.steps.tune import champion_decoding
    from draftwell.registry.pairs import fetch, find_pair
    from draftwell.registry.promotion import promote
    from draftwell.registry.store import Store
    from tests.support.loop.publishing import release, verdict

    step = open_pair(str(pair_file))
    assert champion_decoding(step) is None
    assert not (own_stores / "mlflow.db").exists(), "none is made for the question"
    shutil.copyfile(empty_database, own_stores / "mlflow.db")
    assert champion_decoding(step) is None
    spec = find_pair(str(pair_file))
    made = release(Store(), spec, fetch(spec), own_stores / "made")
    promote(Store(), "tiny", "cpu", made.version, verdict(made))
    served = champion_decoding(step)
    assert served is not None
    assert (served_choice(served, 0.0), served_choice(served, 1.0)) == (
        StrategyChoice("spide", {"gamma": 4}),
        PLAIN,
    )
    assert tune().exit_code == 0
    report = json.loads((space / "cpu" / "reports" / "tuning.json").read_text())
    assert "gamma" in report["left_out"]["champion"], (
        "it was released by another version: said, and left out"
    )
