"""The trial of exactness finds what differs, keeps what is done, and finds nothing on the default
pair."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from draftwell.components.bench.answers import exactness as trial
from draftwell.components.bench.answers.exactness import WAYS, differing, exactness, exactness_table
from draftwell.components.prompts.prompt import Prompt, demo_prompts
from draftwell.flows.workspace import Workspace
from draftwell.serving.artifacts.hardware_profile import HardwareProfile
from draftwell.serving.runtime.pair import LoadedPair
from draftwell.serving.runtime.strategies import StrategyChoice, StrategyResources
from tests.support.models.by_library import compiles
from tests.support.models.resources import ORIGIN
from tests.support.models.tiny import table_pair

PROMPTS = [Prompt(f"p{i}", "qa", [text]) for i, text in enumerate(["abc", "hello", "drafts"])]
CONFIGS = [StrategyChoice("vanilla_sd", {"num_speculative_tokens": 3})]


@pytest.fixture
def pair() -> LoadedPair:
    """A table is looked up alike in any company."""
    made = table_pair(slots=8)
    for model in made.models.values():
        model.exact = True
    return made


def found_for(pair: LoadedPair, file: Path | None = None) -> dict[str, trial.Found]:
    resources = StrategyResources({}, pair.special_tokens)
    sampling = pair.sampling(max_tokens=10)
    return exactness(pair, resources, CONFIGS, PROMPTS, sampling, file)


def test_every_way_is_tried_and_an_exact_model_differs_in_none(pair: LoadedPair) -> None:
    found = found_for(pair)
    assert set(found["vanilla_sd"]) == {*WAYS, "sampled"}
    assert differing(found) == 0
    assert "3 of 3" in str([list(column.cells) for column in exactness_table(found).columns])


def test_an_answer_that_depends_on_what_runs_beside_it_is_found(
    pair: LoadedPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mutant: the rows of a batch have another order of addition than a row alone."""
    target: Any = pair.models["target"]
    forward = target.forward

    def other_order(rows: Any) -> Any:
        outputs = forward(rows)
        if len(rows) > 1:
            said = outputs[0].whole
            said.values = said.adjusted = said.values.flip(-1)
        return outputs

    monkeypatch.setattr(target, "forward", other_order)
    found = found_for(pair)
    assert differing({"it": {"beside": found["vanilla_sd"]["beside"]}}) > 0
    assert differing({"it": {"alone": found["vanilla_sd"]["alone"]}}) == 0


def test_it_goes_on_where_it_was_ended_and_compares_with_the_run_before(
    pair: LoadedPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "answers.jsonl"
    first = found_for(pair, file)
    monkeypatch.setattr(trial, "decode_all", lambda *_: pytest.fail("decoded again"))
    again = found_for(pair, file)
    assert again.pop("autoregressive") == {"restarted": [None] * len(PROMPTS)}
    assert again == first


def test_what_is_drawn_is_compared_only_where_the_draft_is_exact_too(pair: LoadedPair) -> None:
    pair.models["draft"].exact = False
    assert set(found_for(pair)["vanilla_sd"]) == set(WAYS)


@pytest.mark.slow
@compiles
@pytest.mark.parametrize("dtype", ["bfloat16", "bfloat16-int8"])
def test_the_default_pairs_strategies_write_plain_decodings_text(dtype: str) -> None:
    """Four prompts of several tasks, in every way, in the number formats that are served."""
    names = ["vanilla_sd", "suffix", "pearl"] * (dtype == "bfloat16")
    configs = [StrategyChoice(name) for name in [*names, "hybrid"]]
    if dtype == "bfloat16":
        lengths = {"num_speculative_tokens": 3}
        configs += [StrategyChoice("eagle3", {**lengths, "top_k": width}) for width in (1, 2)]
    space = Workspace("default", dtype)
    pair = space.load(slots=trial.BESIDE, strategies=configs)
    assert pair.exact
    profile = HardwareProfile(1.0, {1: 4.0, 8: 8.0}, 0.1, ORIGIN)
    resources = space.resources(pair, [one.name for one in configs], profile=profile)
    sampling = pair.sampling(max_tokens=12)
    found = exactness(pair, resources, configs, demo_prompts()[::4][:4], sampling)
    assert differing(found) == 0, found
