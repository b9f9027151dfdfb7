"""A champion whose strategy is lossy: what it would serve is collected when it is published, and
its traffic is held against that."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from draftwell.components.drift.prompts import prompts_of_trace
from draftwell.components.drift.schema import DRIFTED, NOT_ENOUGH, STEADY
from draftwell.flows.context import StepContext
from draftwell.flows.steps import monitor as monitor_step, publish as publish_step, reference_traces
from draftwell.flows.steps.reference_traces import Served, of_release, served_reference
from draftwell.registry.releases import ReleaseVersion
from draftwell.serving.artifacts.decoding_config import DecodingConfig
from draftwell.serving.errors import DraftwellError
from draftwell.serving.recording.trace import TraceSet
from draftwell.serving.recording.trace_schema import LOSSY
from draftwell.serving.runtime.strategies import StrategyResources, build_strategy
from tests.support.collecting import collect_traces
from tests.support.loop import traffic
from tests.support.patching import replace_everywhere

STRATEGY, PARAMETERS = "lossy_sd", {"num_speculative_tokens": 5}


@pytest.fixture(scope="module")
def step(place: Path, pair_file: Path) -> StepContext:
    return traffic.station_of(pair_file)


@pytest.fixture(scope="module")
def release(step: StepContext, place: Path) -> ReleaseVersion:
    """The champion."""
    return traffic.crown(step, place / "dist", STRATEGY)


@pytest.fixture(scope="module")
def champion(release: ReleaseVersion) -> Served:
    return of_release(release)


@pytest.fixture
def reference(step: StepContext, champion: Served) -> Path:
    return served_reference(step.workspace, champion)


@pytest.fixture(scope="module")
def pool(step: StepContext, release: ReleaseVersion, place: Path) -> pa.Table:
    """What the champion answers to 80 prompts of the calibrated sort."""
    return collect_traces(
        step.pair,
        traffic.prompts(80, seed=2),
        place / "pool",
        max_tokens=traffic.TOKENS,
        rollout=1,
        prefix_kinds=(LOSSY,),
        strategy=build_strategy(STRATEGY, dict(PARAMETERS), StrategyResources()),
    ).read()


@pytest.fixture
def check(step: StepContext, champion: Served, tmp_path: Path) -> Callable[..., Any]:
    return lambda rows, **more: monitor_step.check(
        step.workspace, spool=traffic.spool(tmp_path / "spool", rows), **more
    )[0]


def test_what_it_would_serve_is_collected_on_the_prompts_that_it_was_calibrated_on(
    step: StepContext, champion: Served, reference: Path
) -> None:
    mine, theirs = TraceSet(reference), step.workspace.traces
    assert set(mine.read(["kind"]).column("kind").to_pylist()) == {LOSSY}
    rows = mine.read(["prompt_id", "prompt_tokens", "token", "correction"]).to_pylist()
    begun = {row["prompt_id"]: tuple(row["prompt_tokens"]) for row in rows if row["prompt_tokens"]}
    assert begun == {prompt.id: prompt.tokens[0] for prompt in prompts_of_trace(TraceSet(theirs))}
    assert len(begun) == 16
    assert any(row["token"] != row["correction"] for row in rows), (
        "or it says nothing that a lossless strategy would not"
    )
    header, other = mine.header, TraceSet(theirs).header
    assert (header.max_tokens, header.temperature, header.stop_token_ids) == (
        other.max_tokens,
        other.temperature,
        other.stop_token_ids,
    )


def test_unchanged_traffic_is_steady_and_other_traffic_is_a_drift(
    check: Callable[..., Any], pool: pa.Table, reference: Path
) -> None:
    same, changed = (
        check(change(traffic.some(pool, 40, seed=3)))
        for change in (lambda rows: rows, traffic.elsewhere)
    )
    assert (same.verdict, same.kinds, same.reference.digest) == (
        STEADY,
        (LOSSY,),
        TraceSet(reference).digest(),
    ), same.reasons
    assert same.notes == ()
    names = {item.name for item in same.checks}
    assert names >= {"confidence_psi", "acceptance", "verifier", "novelty"}
    assert "table" not in names, "it counts drafts along the target's own texts"
    assert changed.verdict == DRIFTED
    assert same.verifier.prompts_then < 16, (
        "the verifier has learnt from the other prompts of the reference"
    )


def test_what_a_lossless_champion_served_before_is_not_held_against_it(
    check: Callable[..., Any], pool: pa.Table
) -> None:
    """However much it has changed; nor the other way round."""
    before = traffic.of_kind(traffic.elsewhere(traffic.some(pool, 40, seed=3)), "target")
    report = check(before)
    assert (report.verdict, report.kinds, report.feedback.prompts) == (NOT_ENOUGH, (LOSSY,), 0)
    assert report.reasons[0].startswith(
        "40 of the newest prompts were answered by a lossless strategy"
    )
    assert report.notes == ("40 prompts of the feedback left out: answered by a lossless strategy",)


def test_without_such_a_reference_there_is_no_verdict_until_the_next_release_collects_it(
    check: Callable[..., Any], step: StepContext, pool: pa.Table, reference: Path, tmp_path: Path
) -> None:
    shutil.move(reference, tmp_path / "away")
    for rows in (
        traffic.some(pool, 40, seed=3),
        traffic.elsewhere(traffic.some(pool, 40, seed=3)),
        traffic.of_kind(traffic.elsewhere(traffic.some(pool, 40, seed=3)), "target"),
    ):
        report = check(rows)
        assert report.verdict == NOT_ENOUGH
        assert len(report.reasons) == 1
        assert report.reasons[0].startswith(
            "there is no reference yet of what lossy_sd, which is lossy, serves as "
            "release.tiny.cpu "
        )
        assert "publishing it again collects it" in report.reasons[0]
    publish_step.run_publish(step, {"by": "hand"})
    assert TraceSet(reference).digest() == TraceSet(tmp_path / "away").digest()
    assert check(traffic.some(pool, 40, seed=3)).verdict == STEADY


def test_a_collection_that_was_cut_short_is_no_reference_and_is_ended_by_the_next_release(
    check: Callable[..., Any],
    step: StepContext,
    pool: pa.Table,
    reference: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = TraceSet(reference).digest()
    TraceSet(reference).shards[0].unlink()
    assert check(traffic.some(pool, 40, seed=3)).verdict == NOT_ENOUGH
    publish_step.run_publish(step, {"by": "hand"})
    assert TraceSet(reference).digest() == whole
    monkeypatch.setattr(
        reference_traces, "collect_traces", lambda *_, **__: pytest.fail("collected twice")
    )
    publish_step.run_publish(step, {"by": "hand"})


def test_a_reference_that_is_named_is_compared_with_as_before(
    check: Callable[..., Any], step: StepContext, pool: pa.Table
) -> None:
    traces = step.workspace.traces
    report = check(traffic.of_kind(traffic.some(pool, 40, seed=3), "target"), reference=traces)
    assert (report.kinds, report.reference.digest, report.feedback.prompts) == (
        ("target",),
        TraceSet(traces).digest(),
        40,
    )
    lossy = check(traffic.some(pool, 40, seed=4), reference=traces)
    assert lossy.verdict == NOT_ENOUGH
    assert "leave reference out" in lossy.reasons[0]


def test_a_recalibrations_release_is_kept_in_the_pairs_own_workspace(
    step: StepContext, champion: Served, reference: Path, release: ReleaseVersion, tmp_path: Path
) -> None:
    shutil.rmtree(reference)
    assert champion.lossy is not None
    reference_traces.keep_served(
        StepContext(step.workspace.aside(tmp_path / "aside"), step.pair), release, champion.lossy
    )
    assert reference_traces.is_usable(reference)
    assert not (tmp_path / "aside").exists()


def test_another_config_or_other_traces_have_another_reference(
    step: StepContext, champion: Served, reference: Path
) -> None:
    config = champion.lossy
    assert config is not None
    for other in (
        DecodingConfig("lossy_sd", {"num_speculative_tokens": 4}, {}, config.provenance),
        DecodingConfig("fuzzy_sd", PARAMETERS, {}, config.provenance),
    ):
        changed = Served(
            champion.name,
            champion.fingerprint,
            {**champion.artifacts, "decoding_config": other},
            champion.release,
        )
        assert served_reference(step.workspace, changed) != reference
    again = DecodingConfig(
        config.strategy, config.parameters, {"reason": "measured again"}, config.provenance
    )
    same = Served(
        "another",
        champion.fingerprint,
        {**champion.artifacts, "decoding_config": again},
        champion.release,
    )
    assert served_reference(step.workspace, same) == reference


def test_a_lossless_release_pays_nothing(
    step: StepContext, champion: Served, release: ReleaseVersion, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = champion.lossy
    assert config is not None
    replace_everywhere(
        monkeypatch,
        reference_traces,
        "of_release",
        lambda *_: pytest.fail("its artifacts are not wanted"),
    )
    reference_traces.keep_served(
        step, release, DecodingConfig("vanilla_sd", {}, {}, config.provenance)
    )


@pytest.mark.parametrize(
    "error",
    [DraftwellError("another collection is writing"), OSError(28, "No space left on device")],
)
def test_a_collection_that_fails_stops_no_release(
    check: Callable[..., Any],
    step: StepContext,
    pool: pa.Table,
    reference: Path,
    error: Exception,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shutil.move(reference, tmp_path / "away")

    def failing(*_: Any, **__: Any) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(reference_traces, "collect_traces", failing)
        assert publish_step.run_publish(step, {"by": "hand"}).version
    assert check(traffic.some(pool, 40, seed=3)).verdict == NOT_ENOUGH
    shutil.move(tmp_path / "away", reference)


def test_a_reference_that_cannot_be_read_is_collected_again(
    check: Callable[..., Any], step: StepContext, pool: pa.Table, reference: Path
) -> None:
    whole, shard = TraceSet(reference).digest(), TraceSet(reference).shards[0]
    shard.write_bytes(shard.read_bytes()[:1000])
    assert check(traffic.some(pool, 40, seed=3)).verdict == NOT_ENOUGH
    publish_step.run_publish(step, {"by": "hand"})
    assert TraceSet(reference).digest() == whole


def test_what_another_lossy_champion_served_before_is_left_out(
    check: Callable[..., Any], pool: pa.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its texts are of the same kind, and others all the same."""
    monkeypatch.setattr(
        monitor_step, "promoted", lambda champion: datetime.now(UTC) + timedelta(hours=1)
    )
    report = check(traffic.elsewhere(traffic.some(pool, 40, seed=3)))
    assert (report.verdict, report.feedback.prompts) == (NOT_ENOUGH, 0)
    assert report.notes[0].startswith("what was recorded before ")
    assert report.notes[0].endswith(" is left out")
