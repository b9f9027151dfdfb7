"""What a choice gains for several requests at once, on prompts that nothing was chosen on, and the
memory that it takes meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from draftwell.components.bench.engines.figures import Figure
from draftwell.components.bench.engines.measure import decode_together, groups_of
from draftwell.components.bench.interleaved import REFERENCE
from draftwell.components.bench.peak_memory import peak_during
from draftwell.components.collect.decoding import room
from draftwell.components.gate.own_prompts import JudgingPrompts
from draftwell.components.prompts.overlap import TrainingPrompts
from draftwell.components.prompts.prompt import ids_of
from draftwell.components.tune.by_batch import GROUPS, MOST_TOKENS, beside_plain
from draftwell.flows.context import StepContext, artifact_prompts
from draftwell.serving.artifacts.decoding_config import DecodingConfig
from draftwell.serving.artifacts.kinds import READ_BY_STRATEGIES
from draftwell.serving.runtime.strategies import (
    PLAIN,
    Strategy,
    StrategyChoice,
    build_strategy,
    served_choice,
)

if TYPE_CHECKING:
    from draftwell.components.prompts.prompt import Prompt

AT_ONCE = 4
"""Requests."""


def measure_at_once(step: StepContext, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """`loads`: the figures of the workspace's choice for greedy requests, beside plain decoding, on
    those of the prompts that the gate judges on; `peak_bytes`: of this process while the choice
    decodes, None where the system does not say."""
    folder = step.workspace.folder(DecodingConfig.kind)
    config = DecodingConfig.load(folder, fingerprint=step.pair.fingerprint)
    choice = served_choice(config, 0.0)
    count = min(AT_ONCE, room(step.pair.engine(), AT_ONCE))
    found = {kind: step.workspace.found(step.pair, kind) for kind in READ_BY_STRATEGIES}
    made = {kind: one for kind, one in found.items() if one is not None}
    used = artifact_prompts({**made, DecodingConfig.kind: config}, step.workspace.files().draft)
    rows = JudgingPrompts.choose(prompts, used, TrainingPrompts(), None).prompts
    groups = groups_of([ids_of(step.pair, prompt) for prompt in rows], count, GROUPS)
    sampling = step.pair.sampling(max_tokens=MOST_TOKENS)
    served, loads = built(step, choice), list[Figure]()
    if choice.name != PLAIN.name and count > 1:
        sides = {REFERENCE: built(step, PLAIN), str(count): served}
        loads = [*beside_plain(step.pair, sides, groups, sampling, step.bar).values()]
    peak = peak_during(
        lambda: decode_together(step.pair.engine(), served, groups[0], sampling), step.pair.device
    )
    return {
        "loads": [figure.model_dump(mode="json") for figure in loads],
        "peak_bytes": None if peak is None else int(peak),
    }


def built(step: StepContext, choice: StrategyChoice) -> Strategy:
    """A strategy as it is served: its drafts are limited by how many requests there are."""
    resources = step.workspace.resources(step.pair, [choice.name])
    strategy = build_strategy(choice.name, dict(choice.parameters), resources.private())
    if choice.draft_length_by_batch:
        strategy.draft_length_by_batch = choice.draft_length_by_batch
    return strategy
