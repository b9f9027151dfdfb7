"""`draftwell step calibrate`: what its artifacts name as their origin, and that neither it nor
`tune` makes anything of a bad trace."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from draftwell.components.prompts.overlap import hashes_of
from draftwell.components.prompts.prompt import prompts_digest, read_prompts
from draftwell.serving.artifacts.acceptance_table import AcceptanceTable
from draftwell.serving.artifacts.correction_memory import CorrectionMemory
from draftwell.serving.recording.trace import TraceSet
from tests.support.loop.bad_traces import BAD, changed, contents, refused, with_values

Spoil = Callable[[Path, Path], Path]


@pytest.fixture
def traces(run: Any, pair_file: Path, prompts_file: Path, own_stores: Path) -> Path:
    """Greedy traces of a few prompts."""
    out = own_stores / "traces"
    done = run(
        f"step collect --pair {pair_file} --prompts {prompts_file} --set limit=4 --set "
        f"max_tokens=8 "
        f"--set rollout=3 --set prefix_kinds=target --set out={out}",
    )
    assert done.exit_code == 0, (done.output, done.exception)
    return out


def without_rollouts(rows: pa.Table) -> pa.Table:
    """As a server spools them."""
    for name in ("rollout_tokens", "rollout_q", "rollout_confidence", "rollout_entropy"):
        rows = with_values(rows, name, [None] * len(rows))
    return rows


def with_nan(name: str) -> Spoil:
    def one(rows: pa.Table) -> pa.Table:
        figures = rows.column(name).to_pylist()
        figures[5] = float("nan") if isinstance(figures[5], float) else [0.5, float("nan"), 0.5]
        return with_values(rows, name, figures)

    return lambda folder, into: changed(folder, into, one)


def without_draft_tokens(rows: pa.Table) -> pa.Table:
    return with_values(rows, "draft_token", [None] * len(rows))


Cases = dict[str, tuple[Spoil, tuple[str, ...]]]
UNFIT: Cases = {
    "empty": (BAD["empty"][0], ("no rows", "draftwell step collect")),
    **{name: BAD[name] for name in ("no shards", "another pair", "truncated", "holes")},
}
OF_CALIBRATE: Cases = {
    "no draft tokens": (
        lambda folder, into: changed(folder, into, without_draft_tokens),
        ("draft's token",),
    ),
    "NaN figure": (with_nan("confidence"), ("confidence",)),
}
OF_TUNE: Cases = {
    "no rollouts": (lambda folder, into: changed(folder, into, without_rollouts), ("no rollouts",)),
    "NaN figure": (with_nan("rollout_confidence"), ("rollout_confidence",)),
}


@pytest.mark.slow
def test_bad_traces_change_nothing(
    run: Any, pair_file: Path, prompts_file: Path, traces: Path, own_stores: Path
) -> None:
    space = own_stores / "draftwell" / "pairs" / "tiny" / "float32"

    def calibrate(folder: Path) -> Any:
        return run(
            f"step calibrate --pair {pair_file} --prompts {prompts_file} --set limit=2 "
            f"--set publish=false --set traces={folder}",
        )

    def tune(folder: Path) -> Any:
        return run(
            f"step choose --pair {pair_file} --prompts {prompts_file} --set limit=2 --set "
            f"max_tokens=4 "
            f"--set publish=false --set traces={folder}",
        )

    done = calibrate(traces)
    assert done.exit_code == 0, (done.output, done.exception)
    table, memory = (
        kind.load(space / "artifacts" / kind.kind) for kind in (AcceptanceTable, CorrectionMemory)
    )
    assert table.provenance.trace_digest == TraceSet(traces).digest()
    assert memory.provenance.trace_digest is None, (
        "it was decoded from prompts, whatever the traces hold"
    )
    assert memory.provenance.parameters["prompts_digest"] == prompts_digest(
        read_prompts(prompts_file)[4:6]
    ), "the traces have four"
    assert memory.provenance.training_prompts == hashes_of(read_prompts(prompts_file)[4:6])
    assert table.provenance.training_prompts == hashes_of(read_prompts(prompts_file)[:4])
    sampled = own_stores / "sampled"
    done = run(
        f"step collect --pair {pair_file} --prompts {prompts_file} --set limit=2 --set "
        f"max_tokens=4 "
        f"--set temperature=0.7 --set out={sampled}",
    )
    assert done.exit_code == 0, (done.output, done.exception)
    long = own_stores / "long.jsonl"
    long.write_text(json.dumps({"id": "the long one", "prompt": "an onion " * 2000}) + "\n")
    old = contents(space)
    sampled_too: Cases = {
        "sampled": (
            lambda folder, into: sampled,
            ("temperature 0.7", "draftwell step collect --set temperature=0"),
        )
    }
    for command, own in ((calibrate, OF_CALIBRATE), (tune, OF_TUNE)):
        for number, (name, (spoil, words)) in enumerate({**UNFIT, **own, **sampled_too}.items()):
            try:
                refused(command(spoil(traces, own_stores / f"{command.__name__}{number}")), *words)
                assert contents(space) == old
            except AssertionError as error:
                error.add_note(f"{command.__name__}, {name}")
                raise
    refused(tune(with_nan("rollout_entropy")(traces, own_stores / "entropy")), "rollout_entropy")
    done = run(
        f"step calibrate --pair {pair_file} --prompts {long} --set publish=false --set "
        f"traces={traces}"
    )
    refused(done, "the long one")
    assert contents(space) == old


@pytest.mark.slow
def test_sampled_texts_are_counted_into_the_same_table(
    run: Any, pair_file: Path, prompts_file: Path, traces: Path, own_stores: Path
) -> None:
    """Greedy counts stay when sampled ones are added, and the other way round; each is refused
    traces of the other."""
    folder = (
        own_stores / "draftwell" / "pairs" / "tiny" / "float32" / "artifacts" / "acceptance_table"
    )
    few = f"--pair {pair_file} --prompts {prompts_file}"
    done = run(
        "step collect",
        few,
        "--set limit=2 --set max_tokens=12 --set temperature=0.7 --set rollout=2 --set "
        "prefix_kinds=target",
    )
    assert done.exit_code == 0, (done.output, done.exception)
    refused(
        run(f"step calibrate --pair {pair_file} --set temperature=0.7 --set publish=false"),
        "draftwell step calibrate --pair",
    )
    assert not folder.exists()
    greedy = (
        f"step calibrate {few} --set limit=2 --set max_tokens=4 --set publish=false --set "
        f"traces={traces}"
    )
    assert run(greedy).exit_code == 0
    alone = AcceptanceTable.load(folder)
    refused(
        run(
            f"step calibrate --pair {pair_file} --set temperature=0.7 --set publish=false --set "
            f"traces={traces}",
        ),
        "temperature 0,",
    )
    refused(
        run(f"step calibrate --pair {pair_file} --set temperature=1 --set publish=false"),
        "temperature 0.7,",
        "--set temperature=1",
    )
    done = run(f"step calibrate --pair {pair_file} --set temperature=0.7 --set publish=false")
    assert done.exit_code == 0, (done.output, done.exception)
    assert "at temperature 0.7" in done.stdout
    both = AcceptanceTable.load(folder)
    assert (both.total, both.accepted) == (alone.total, alone.accepted)
    assert sum(both.at(1.0).total) > 0
    assert both.provenance.parameters["sampled_temperature"] == 0.7
    assert both.at(1.0).provenance.training_prompts == sorted(
        hashes_of(read_prompts(prompts_file)[:2])
    )
    assert run(greedy).exit_code == 0
    kept = AcceptanceTable.load(folder)
    assert (kept.at(1.0).total, kept.at(1.0).accepted) == (
        both.at(1.0).total,
        both.at(1.0).accepted,
    )
