"""Judging an engine at an address as it runs, beside the same model without speculation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from draftwell.components.bench.engines.figures import Figure, figure_of
from draftwell.components.bench.engines.measure import groups_of, measure_beside
from draftwell.components.gate.engine_checks import differences, judge_engine
from draftwell.flows.steps.champion import champion_number
from draftwell.flows.steps.remote.space import RemoteSpace
from draftwell.registry.gates import load_gates
from draftwell.registry.releases import engine_device
from draftwell.serving.bundle.verdict import GateVerdict, Skipped, settled
from draftwell.serving.errors import DraftwellError

if TYPE_CHECKING:
    from draftwell.components.prompts.prompt import Prompt

GROUPS = 8
"""At each load above one."""


def gate_as_it_runs(
    space: RemoteSpace, prompts: Sequence[Prompt], max_tokens: int, levels: Sequence[int]
) -> GateVerdict:
    """The verdict on greedy requests; nothing is kept. See `judged_as_it_runs`."""
    return judged_as_it_runs(space, prompts, max_tokens, levels)[0]


def judged_as_it_runs(
    space: RemoteSpace, prompts: Sequence[Prompt], max_tokens: int, levels: Sequence[int]
) -> tuple[GateVerdict, list[Figure]]:
    """The verdict on greedy requests and its figures, one for each level; nothing is kept.

    Args:
        levels: requests at once.
    Raises:
        DraftwellError: nothing decodes plainly (`no_plain_engine`), or what the engines raise.
    """
    plain = space.plain
    if plain is None:
        raise DraftwellError(
            f"{space.address.url} ({space.dialect.name}) cannot decode plainly on request, so "
            "there is nothing to compare with: name the same model without speculation with "
            "--set plain=URL, an engine whose requests can switch speculation off "
            "(Draftwell, some builds of llama.cpp), or the command that starts it with --set "
            "launcher=…",
            code="no_plain_engine",
        )
    ids, sampling = space.encoded(prompts, max_tokens), space.pair.sampling(max_tokens=max_tokens)
    figures, unlike = list[Figure](), []
    for level in levels:
        groups = groups_of(ids, level, GROUPS)
        beside = measure_beside(plain, space.engine, groups, sampling, progress=space.bar)
        figures.append(figure_of("as it runs", beside))
        unlike += differences(beside, groups, plain, space.workspace.dtype, sampling)
    thresholds = load_gates()
    verdict = judge_engine(figures, unlike, thresholds) + GateVerdict.of([regression(space)])
    return settled(verdict, thresholds, space.dialect.name), figures


def regression(space: RemoteSpace) -> Skipped:
    """Why it is not compared with the champion."""
    device = engine_device(space.workspace.device.partition(":")[0], space.dialect.name)
    number = champion_number(space.workspace, device)
    if number is None:
        return Skipped("regression", "there is no champion", applies=False)
    why = (
        f"the champion, release {number}, has to be started: name the command with --set launcher=…"
    )
    return Skipped("regression", why)
