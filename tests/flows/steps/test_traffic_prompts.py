"""Weekly flows use served traffic: the same prompts from collection to gate, and the pipeline's own
until there are enough."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from draftwell.components.prompts.prompt import Prompt
from draftwell.flows.failures import worth_retrying
from draftwell.flows.loading import prompts_of
from draftwell.flows.orchestration import loop_flow as loop
from draftwell.flows.settings import PipelineSettings
from draftwell.flows.steps import monitor as monitor_step, traffic_prompts as served
from draftwell.flows.workspace import Workspace
from draftwell.serving.errors import DraftwellError
from draftwell.serving.recording.trace import TraceSet
from tests.support.errors import raises_code
from tests.support.loop import traffic


@pytest.fixture
def settings(
    own_stores: Path, pair_file: Path, prompts_file: Path, monkeypatch: pytest.MonkeyPatch
) -> PipelineSettings:
    monkeypatch.setenv("DRAFTWELL_MODELS", str(own_stores / "models"))
    return PipelineSettings(
        pair=str(pair_file),
        prompts=prompts_file,
        source="traffic",
        spool=own_stores / "spool",
        collect_prompts=20,
        max_tokens=8,
        bench_prompts=16,
        threads=1,
    )


@pytest.fixture
def space(settings: PipelineSettings) -> Workspace:
    return Workspace(settings.pair)


def serve(settings: PipelineSettings, count: int) -> list[Prompt]:
    """A spool with so many answers and their requests."""
    assert settings.spool is not None
    asked = traffic.prompts(count, seed=5)
    step = traffic.station_of(Path(settings.pair))
    rows = traffic.serve(step, settings.spool.with_name(f"served-{count}"), asked).read()
    traffic.spool(settings.spool, rows, asked)
    return asked


def texts(prompts: Sequence[Prompt]) -> set[str]:
    return {prompt.prompt for prompt in prompts}


def taken(settings: PipelineSettings, space: Workspace) -> dict[str, list[Prompt]]:
    return prompts_of(served.settle_prompts(settings))


def test_a_week_is_made_of_served_prompts(settings: PipelineSettings, space: Workspace) -> None:
    """Not one of the pipeline's, and the gate's are none that anything was chosen on."""
    own = prompts_of(settings)
    assert taken(settings, space) == own, "without a spool"
    asked = serve(settings, 44)
    found = taken(settings, space)
    assert {name: len(rows) for name, rows in found.items()} == {
        "bench": 14,
        "collect": 14,
        "calibrate": 8,
        "tune": 8,
    }
    assert set.union(*map(texts, found.values())) == texts(asked), "no prompt is in two steps"


def test_prompts_stay_those_of_the_collection_while_the_spool_grows(
    settings: PipelineSettings, space: Workspace
) -> None:
    """Drawn again at each step, the gate would get prompts that were tuned on."""
    serve(settings, 44)
    assert settings.spool is not None
    fixed = served.settle_prompts(settings)
    before = prompts_of(fixed)
    with (settings.spool / "requests.jsonl").open("a") as file:
        file.writelines(
            json.dumps({"prompt": prompt.prompt}) + "\n"
            for prompt in traffic.prompts(10, seed=9, words=traffic.OTHERS)
        )
    assert prompts_of(fixed) == before
    assert taken(settings, space) != before


def test_an_unavailable_registry_is_waited_for(
    settings: PipelineSettings, space: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it would look like "nothing to compare with", and prompts of all temperatures would
    be collected on."""

    def unavailable(*arguments: Any) -> None:
        raise DraftwellError("the registry failed", code="registry_failed") from ConnectionError(
            "refused"
        )

    serve(settings, 44)
    monkeypatch.setattr(monitor_step, "served", unavailable)
    with raises_code("registry_failed") as caught:
        served.settle_prompts(settings)
    assert worth_retrying(None, None, SimpleNamespace(data=caught.value))


def test_too_few_or_none(settings: PipelineSettings, space: Workspace) -> None:
    assert settings.spool is not None
    own = prompts_of(settings)
    serve(settings, served.FEWEST - 1)
    assert taken(settings, space) == own
    asked = serve(settings, served.FEWEST)
    assert texts(taken(settings, space)["collect"]) <= texts(asked)
    (settings.spool / "requests.jsonl").write_text("")
    assert texts(taken(settings, space)["collect"]) <= texts(asked), "those of the last time"
    settings.spool.rename(settings.spool.with_name("elsewhere"))
    assert taken(settings, space) == own


def test_the_collection_reads_the_spool(
    settings: PipelineSettings, space: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop.shown, "table", lambda *given: None)
    serve(settings, 44)
    done = loop.collect.fn(settings)
    assert done["traces"] == {
        "traces": TraceSet(space.traces).digest(),
        "traces_sampled": TraceSet(space.traces_at(1.0)).digest(),
    }
    names = set(TraceSet(space.traces).read(["prompt_id"]).column("prompt_id").to_pylist())
    assert len(names) == 14, "of 20: 44 prompts are shared with three other steps"
    assert all(name.startswith("spool/") for name in names)
    assert done["settings"]["prompts"] == str(space.root / served.PROMPTS)
    assert loop.collect.fn(settings) == done


def test_served_prompts_are_masked_before_they_are_stored(
    settings: PipelineSettings, space: Workspace
) -> None:
    serve(settings, 44)
    assert settings.spool is not None
    with (settings.spool / "requests.jsonl").open("a") as file:
        file.write(json.dumps({"prompt": "mail ann@example.org"}) + "\n")
    fixed = served.settle_prompts(settings.model_copy(update={"redact": True}))
    assert fixed.prompts is not None
    stored = fixed.prompts.read_text()
    assert "mail [email]" in stored
    assert "ann@" not in stored


def test_token_ids_that_cannot_be_masked_are_no_prompts(
    settings: PipelineSettings, space: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the others there would be enough, and a sample of the texts alone is too small."""
    own, masking = prompts_of(settings), settings.model_copy(update={"redact": True})
    tokens = Prompt("t", None, [""], tokens=((1, 2),))
    rows = [Prompt(str(i), None, [f"ask {i}"]) for i in range(served.FEWEST)]
    serve(settings, 44)
    monkeypatch.setattr(served, "spooled_prompts", lambda *given, **options: [tokens, *rows[1:]])
    assert taken(masking, space) == own
    assert settings.spool is not None
    with raises_code("too_few_prompts", "1 of 40", "token ids"):
        served.newest_prompts(masking, settings.spool)
    monkeypatch.setattr(served, "spooled_prompts", lambda *given, **options: [tokens, *rows])
    assert served.newest_prompts(masking, settings.spool) == rows
