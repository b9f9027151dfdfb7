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
    top_p=0.9,
    rollout=6,
    batch=3,
    hidden=False,
    prefix_kinds=("draft", "target"),
    turns=2,
    seed=7,
)


def test_the_digest_of_the_inputs_is_that_of_earlier_versions() -> None:
    pair = replace(table_pair(), fingerprint="f" * 64)
    plan = work_of(pair, PROMPTS, SETTINGS).plan
    assert plan.inputs == "45dfe059451f10f99351c8d45a2adf59be2251e17b7bf74f566c21db50a1f252"
    assert (plan.prompts, plan.shard_prompts, plan.batch, plan.room) == (3, 32, 3, 482)
    strategy = build_strategy(
        "lossy_sd", {"tau": 0.2}, StrategyResources({"correction_memory": CorrectionMemory.empty()})
    )
    lossy = work_of(
        pair, PROMPTS, SETTINGS.model_copy(update={"prefix_kinds": ("lossy",)}), strategy
    )
    assert lossy.plan.inputs == "b0d141a18326b214ff64a9e6ce6b18ded7af5eaf6189b7afe664d5d4e2cefdd1"


def test_the_digest_does_not_depend_on_how_many_texts_are_written_at_once() -> None:
    pair = table_pair()
    one, other = (
        work_of(pair, PROMPTS, SETTINGS.model_copy(update={"batch": batch})).plan
        for batch in (1, 3)
    )
    assert one.inputs == other.inputs
    assert (one.batch, other.batch) == (1, 3)
