"""What a collection is bound to: its digest stays the same from version to version, so that
unfinished collections resume."""

from __future__ import annotations

from dataclasses import replace

from draftwell.components.collect.settings import CollectionSettings
from draftwell.components.collect.work import work_of
from draftwell.components.prompts.prompt import Prompt
from draftwell.serving.artifacts.correction_memory import CorrectionMemory
from draftwell.serving.runtime.strategies import StrategyResources, build_strategy
from tests.support.models.tiny import table_pair

PROMPTS = [
    Prompt(
        "a", "qa", ["one", "two"], messages=({"role": "system", "content": "s"},), answers=("yes",)
    ),
    Prompt("b", None, ["x"], raw=True),
    Prompt("c", None, ["y"], tokens=((1, 2, 3),)),
]
SETTINGS = CollectionSettings(
    max_tokens=24,
    temperature=0.5,
    top_k=5,
    top_p=0.9,
    rollout=6,
    rollout_kinds=("target", "draft"),
    batch=3,
    hidden=False,
    prefix_kinds=("draft", "target"),
    turns=2,
    seed=7,
)


def test_the_digest_of_the_inputs_is_that_of_earlier_versions() -> None:
    pair = replace(table_pair(), fingerprint="f" * 64)
    plan = work_of(pair, PROMPTS, SETTINGS).plan
    assert plan.inputs == "4c0c2ad79c6f4ea935b455aea0de832ce660af8374c0314c2c5aea6b4f3eac6e"
    assert (plan.prompts, plan.shard_prompts, plan.batch, plan.room) == (3, 32, 3, 482)
    strategy = build_strategy(
        "lossy_sd", {"tau": 0.2}, StrategyResources({"correction_memory": CorrectionMemory.empty()})
    )
    lossy = work_of(
        pair, PROMPTS, SETTINGS.model_copy(update={"prefix_kinds": ("lossy",)}), strategy
    )
    assert lossy.plan.inputs == "1772ca738c2bc30777b2d5aef80de0232e34b8397ec0ad5e5dc03cc22ef30748"


def test_the_digest_does_not_depend_on_how_many_texts_are_written_at_once() -> None:
    pair = table_pair()
    one, other = (
        work_of(pair, PROMPTS, SETTINGS.model_copy(update={"batch": batch})).plan
        for batch in (1, 3)
    )
    assert one.inputs == other.inputs
    assert (one.batch, other.batch) == (1, 3)
