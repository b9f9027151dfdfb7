"""What the tuner knows of each strategy, and the worked example of docs/add_a_strategy.md."""

from __future__ import annotations

import re
import types
from typing import Any

import pytest

from draftwell.components.prompts.prompt import Prompt
from draftwell.components.replay.replay import replay_strategy
from draftwell.components.replay.texts import Texts, read_texts
from draftwell.components.tune.search.search import Search
from draftwell.components.tune.search.space import MEASURED, REPLAYED, combinations
from draftwell.serving.artifacts.hardware_profile import HardwareProfile
from draftwell.serving.errors import DraftwellError
from draftwell.serving.runtime.strategies import STRATEGIES, StrategyResources
from draftwell.serving.runtime.strategies.lossless import draft_lengths
from tests.support.collecting import collect_traces
from tests.support.models.resources import NEEDED, ORIGIN, table_resources
from tests.support.models.tiny import VOCAB, table_pair
from tests.support.paths import REPO

PROFILE = HardwareProfile(1.0, {1: 10.0, 4: 11.0, 8: 12.0}, 0.1, ORIGIN)


ORDER_AT_FIRST = [
    "vanilla_sd",
    "svip",
    "draft_verify",
    "adaedl",
    "hf_dynamic",
    "spide",
    "pearl",
    "prompt_lookup",
    "specdec_pp",
    "sprinter",
    "duo_decoding",
    "csd",
    "fuzzy_sd",
    "mentored",
    "lossy_sd",
    "pyramid_assisted",
    "pyramid_fuzzy",
]
"""Strategies that were replayed, then those that were measured, when this was written: a new one
may stand anywhere between them."""


def test_the_searched_strategies_and_their_order() -> None:
    """The order is that of trials where spaces are equally large: a new strategy does not change
    that of the others."""
    assert [name for name in [*REPLAYED, *MEASURED] if name in ORDER_AT_FIRST] == ORDER_AT_FIRST
    assert [name for name in REPLAYED if name in ORDER_AT_FIRST] == ORDER_AT_FIRST[:8]
    assert set(STRATEGIES) - set(REPLAYED) - set(MEASURED) == {"autoregressive"}, (
        "plain decoding has nothing to tune"
    )


SIZES = {
    "vanilla_sd": 12,
    "svip": 30,
    "draft_verify": 15,
    "adaedl": 15,
    "hf_dynamic": 28,
    "spide": 288,
    "pearl": 9,
    "specdec_pp": 27,
    "prompt_lookup": 16,
    "sprinter": 9,
    "duo_decoding": 2,
    "double": 6,
    "csd": 100,
    "fuzzy_sd": 12,
    "mentored": 12,
    "lossy_sd": 12,
    "fly": 12,
    "asd": 18,
    "pyramid_assisted": 204,
    "pyramid_fuzzy": 510,
    "suffix": 12,
    "rest": 6,
    "lookahead": 4,
    "swift": 4,
    "medusa": 3,
    "eagle3": 45,
    "hybrid": 4,
}


def test_every_searched_strategy_has_a_size() -> None:
    assert set(SIZES) == {*REPLAYED, *MEASURED}, "add the number of its configurations to SIZES"


@pytest.mark.parametrize("name", SIZES)
def test_the_number_of_configurations(name: str) -> None:
    found = combinations(name)
    assert len(set(found)) == len(found) == SIZES[name]


@pytest.mark.parametrize("name", ["pyramid_assisted", "pyramid_fuzzy"])
@pytest.mark.parametrize(("l_d", "l_q"), [(5, 20), (3, 25), (2, 4), (1, 1)])
def test_pyramids_lengths_are_free_of_one_another(name: str, l_d: int, l_q: int) -> None:
    """The paper's fastest are 5 of 20 and 3 of 25 (Table 2), its rule of thumb half."""
    lengths = [
        (one.parameters["num_draft_tokens"], one.parameters["num_speculative_tokens"])
        for one in combinations(name)
    ]
    assert (l_d, l_q) in lengths
    assert all(drafted < max(2, ready) for drafted, ready in lengths), (
        "longer drafts than the target is given are drafts of that length"
    )


@pytest.mark.parametrize("name", ["pyramid_assisted", "pyramid_fuzzy"])
def test_what_a_paper_found_the_fastest_is_among_the_few_that_are_tried(name: str) -> None:
    """Of hundreds five are measured; by chance 5 of 20 is none of them."""
    nothing: Any = None
    search = Search(nothing, StrategyResources(), PROFILE, 8, nothing, "")
    lengths = [
        (one.parameters["num_draft_tokens"], one.parameters["num_speculative_tokens"])
        for one in search.choices(name, 5)
    ]
    assert len(lengths) == 5
    assert {(5, 20), (3, 25)} < set(lengths)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Texts, StrategyResources]:
    """A tiny trace, and the artifacts that a replay may ask for."""
    pair, resources = table_pair(), table_resources(VOCAB)
    prompts = [
        Prompt(f"p{i}", None, [text]) for i, text in enumerate(["hello world", "one two one two"])
    ]
    trace = collect_traces(
        pair, prompts, tmp_path_factory.mktemp("trace"), max_tokens=12, rollout=8, hidden=False
    )
    return read_texts(trace), resources


@pytest.mark.parametrize("name", REPLAYED)
def test_what_is_declared_replayable_can_be_replayed(
    texts: tuple[Texts, StrategyResources], name: str
) -> None:
    traced, resources = texts
    try:
        replayed = replay_strategy(
            traced, name, NEEDED.get(name, {}), resources, PROFILE, extend=True
        )
    except DraftwellError as error:
        pytest.fail(f"{name} stands in REPLAYED, but its replay fails: {error}")
    assert replayed.stats.emitted == sum(len(text.output) for text in traced.texts)


def test_the_worked_example_of_the_guide_is_a_strategy() -> None:
    text = (REPO / "docs" / "add_a_strategy.md").read_text(encoding="utf-8")
    [source] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    module: Any = types.ModuleType("patient_sd")
    vars(module).update(vars(draft_lengths), __name__="patient_sd")
    exec(compile(source, "patient_sd.py", "exec", dont_inherit=True), module.__dict__)
    cls = module.PatientSD
    assert (cls.name, cls.lossless) == ("patient_sd", True)
