"""What a workspace's artifacts were made from: a distilled draft counts, and what is not known
stays visible in what is made from it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from draftwell.components.prompts.overlap import hashes_of
from draftwell.components.prompts.prompt import Prompt
from draftwell.components.tune.evidence import TuningEvidence
from draftwell.flows.context import StepContext, artifact_prompts, training_prompts
from draftwell.flows.steps import tune
from draftwell.flows.steps.monitor import untouched
from draftwell.flows.workspace import Workspace
from draftwell.serving.artifacts.acceptance_table import AcceptanceTable
from draftwell.serving.artifacts.base import Provenance
from draftwell.serving.artifacts.decoding_config import DecodingConfig
from draftwell.serving.runtime.strategies import StrategyChoice
from tests.support.loop.publishing import distilled

ROWS = [Prompt(f"p{i}", None, [f"question {i}"]) for i in range(6)]
MARK = "f" * 64


def made(**values: Any) -> Provenance:
    return Provenance(pair="tiny", fingerprint=MARK, **values)


@pytest.fixture
def space(own_stores: Path, tmp_path: Path) -> Workspace:
    """A pair with a distilled draft that was trained on two prompts; its models are never
    fetched."""
    draft = distilled()
    draft.provenance = made(training_prompts=hashes_of(ROWS[:2]))
    draft.save(tmp_path / "draft")
    (tmp_path / "pair.yaml").write_text(
        "name: drafted\ndescription: d\nlicence: none\ntarget: {path: nowhere}\ndraft: "
        "{artifact: draft}\n"
    )
    return Workspace(str(tmp_path / "pair.yaml"), "float32", device="cpu")


def test_nothing_is_measured_on_what_the_draft_was_distilled_on(space: Workspace) -> None:
    used = training_prompts(space)
    assert dict(used.by_name) == {"distilled_draft": frozenset(hashes_of(ROWS[:2]))}
    assert used.untouched(ROWS, 3)[0] == ROWS[2:5]
    assert dict(artifact_prompts({}, space.spec.folder / "draft").by_name) == dict(used.by_name)


def test_an_artifact_that_knows_part_of_its_prompts_is_named_with_what_it_lacks(
    space: Workspace,
) -> None:
    AcceptanceTable(
        [0] * 20, [0] * 20, made(training_prompts=hashes_of(ROWS[3:4]), unknown_prompts=["traces"])
    ).save(space.folder("acceptance_table"))
    used = training_prompts(space, kinds=("acceptance_table", "verifier"))
    assert used.unknown == ("acceptance_table (made from: traces)",)
    assert [prompt.id for prompt in used.untouched(ROWS)[0]] == ["p2", "p4", "p5"], (
        "what it does know is left out"
    )


def config_after(space: Workspace, evidence: TuningEvidence) -> DecodingConfig:
    """The config that a tuning leaves in a workspace."""
    pair: Any = SimpleNamespace(name="drafted", fingerprint=MARK, device="cpu")
    return tune.config_with(StepContext(space, pair), evidence, "7" * 64, "cpu-test")


def evidence(temperature: float, prompts: list[Prompt], *unknown: str) -> TuningEvidence:
    return TuningEvidence(
        choice=StrategyChoice("vanilla_sd"),
        temperature=temperature,
        training_prompts=tuple(hashes_of(prompts)),
        unknown_prompts=unknown,
    )


def test_a_config_tuned_on_unknown_prompts_says_so_and_keeps_saying_it(space: Workspace) -> None:
    """Also when the other class of requests is tuned later, on traces that are known."""
    first = config_after(space, evidence(0.0, ROWS[:1], "traces"))
    assert (first.provenance.unknown_prompts, first.evidence["unknown_prompts"]) == (
        ["traces"],
        ["traces"],
    )
    space.save(first)
    both = config_after(space, evidence(0.7, ROWS[1:2]))
    assert (both.provenance.unknown_prompts, both.provenance.training_prompts) == (
        ["traces"],
        hashes_of(ROWS[:2]),
    )
    space.save(both)
    again = config_after(space, evidence(0.0, ROWS[2:3]))
    assert (again.provenance.unknown_prompts, again.provenance.training_prompts) == (
        [],
        hashes_of(ROWS[1:3]),
    ), "the greedy one is replaced"
    assert artifact_prompts({"decoding_config": both}).unknown == (
        "decoding_config (made from: traces)",
    )


def test_monitoring_takes_prompts_that_the_verifier_has_not_learnt_from_whatever_the_traces() -> (
    None
):
    """Another digest is not other prompts."""
    import pyarrow as pa

    rows = pa.table(
        {
            "prompt_id": [prompt.id for prompt in ROWS],
            "kind": ["target"] * 6,
            "prompt_tokens": [[i] for i in range(6)],
        }
    )
    hashes = {prompt.id: hashes_of([prompt])[0] for prompt in ROWS}

    def left(known: list[str] | None, recorded: dict[str, str] | None = hashes) -> list[str]:
        verifier = SimpleNamespace(provenance=made(trace_digest="1" * 64, training_prompts=known))
        return untouched(verifier, "2" * 64, rows, recorded)

    assert left(hashes_of(ROWS[:4])) == ["p4", "p5"]
    assert left(hashes_of(ROWS)) == []
    assert left(None) == left(hashes_of(ROWS), None) == [prompt.id for prompt in ROWS], (
        "not known: as before"
    )
