"""Draft lengths by load on their way from the tuning into the decoding config."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from draftwell.components.collect.settings import CollectionSettings
from draftwell.components.prompts.overlap import hashes_of
from draftwell.components.prompts.prompt import Prompt
from draftwell.components.tune.evidence import TuningEvidence
from draftwell.components.tune.levels import Level
from draftwell.components.tune.settings import TuneSettings
from draftwell.flows.context import StepContext
from draftwell.flows.steps import at_once, collect as collect_step, tune as tune_step
from draftwell.serving.artifacts.base import Provenance
from draftwell.serving.artifacts.decoding_config import DecodingConfig
from draftwell.serving.runtime.strategies import StrategyChoice
from tests.support.loop import traffic
from tests.support.models.tiny import table_pair

CHOICE = StrategyChoice("vanilla_sd", {"num_speculative_tokens": 4})


def test_each_class_of_temperatures_keeps_the_table_that_was_measured_of_its_choice(
    pair_file: Path, own_stores: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(own_stores)
    step = traffic.station_of(pair_file)
    measured: list[Any] = []
    lengths = iter([{1: 4, 2: 0}, {1: 4, 2: 2, 4: 0}, {1: 4, 2: 4}])

    def tune(inputs: Any, settings: TuneSettings, *given: Any, **more: Any) -> TuningEvidence:
        return TuningEvidence(
            choice=CHOICE,
            temperature=settings.temperature,
            constraints=settings.constraints,
        )

    def measure(
        pair: Any, resources: Any, choice: Any, prompts: Any, sampling: Any, bar: Any
    ) -> Any:
        measured.append((choice, sampling.temperature, sampling.max_tokens))
        return [Level(at_once=n, k=k, open=(k,)) for n, k in next(lengths).items()], []

    monkeypatch.setattr(tune_step, "measure_levels", measure)
    monkeypatch.setattr(tune_step, "tune_strategy", tune)
    for temperature in (0.0, 0.7, 0.0):
        asked = CollectionSettings(max_tokens=12, temperature=temperature)
        traces = collect_step.run_collect(step, traffic.prompts(2, seed=1), asked)
        settings = TuneSettings(max_tokens=8, temperature=temperature)
        evidence = tune_step.run_tune(step, traces, traffic.prompts(2, seed=5), settings)
    found = DecodingConfig.load(step.workspace.folder("decoding_config"))
    assert found.sampled is not None
    assert found.sampled.draft_length_by_batch == {1: 4, 2: 2, 4: 0}
    assert found.draft_length_by_batch == evidence.draft_length_by_batch == {1: 4, 2: 4}
    assert measured == [(CHOICE, temperature, 8) for temperature in (0.0, 0.7, 0.0)]
    tune_step.choose_plain(step, "it is slower")
    plain = DecodingConfig.load(step.workspace.folder("decoding_config"))
    assert (plain.strategy, plain.draft_length_by_batch) == ("autoregressive", {})


def test_several_at_once_are_measured_on_prompts_that_nothing_learnt_from(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rows = [Prompt(f"p{i}", None, [f"question {i}"]) for i in range(20)]
    made_of = Provenance(
        pair="tiny", fingerprint="f" * 64, training_prompts=tuple(hashes_of(rows[:4]))
    )
    DecodingConfig("prompt_lookup", {}, {}, made_of).save(tmp_path)
    space = SimpleNamespace(
        folder=lambda kind: tmp_path,
        found=lambda pair, kind: None,
        files=lambda: SimpleNamespace(draft=None),
    )
    pair: Any = SimpleNamespace(
        fingerprint="f" * 64, device="cpu", engine=lambda: None, sampling=lambda **given: None
    )
    sent: list[Any] = []

    def beside(pair: Any, sides: Any, groups: Any, *given: Any) -> dict[str, Any]:
        sent.extend(tuple(ids) for group in groups for ids in group)
        return {}

    monkeypatch.setattr(at_once, "room", lambda engine, most: most)
    monkeypatch.setattr(at_once, "ids_of", lambda pair, prompt: [int(prompt.id[1:])])
    monkeypatch.setattr(at_once, "built", lambda step, choice: choice)
    monkeypatch.setattr(at_once, "peak_during", lambda run, device: None)
    monkeypatch.setattr(at_once, "beside_plain", beside)
    at_once.measure_at_once(StepContext(space, pair), rows)  # type: ignore[arg-type]
    assert sent
    assert not {(i,) for i in range(4)} & set(sent)


@pytest.mark.parametrize(("other", "kept"), [({}, True), ({"fingerprint": "e" * 64}, False)])
def test_a_champions_config_is_built_upon_only_if_it_is_of_this_pair(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, other: dict[str, str], kept: bool
) -> None:
    made_of = Provenance(pair="tiny", fingerprint="f" * 64, device_class="cpu-x")
    champion = DecodingConfig("spide", {}, {}, made_of.model_copy(update=other))
    monkeypatch.setattr(tune_step, "champion_decoding", lambda step: champion)
    space: Any = SimpleNamespace(folder=lambda kind: tmp_path / kind)
    step = StepContext(space, table_pair())
    assert tune_step.previous_config(step, "cpu-x") is (champion if kept else None)
