"""The draft length of our own engine by the number of requests that it decodes together: what a
server looks up before each step (`Strategy.draft_length_by_batch`).

The number of requests doubles as far as the models have slots. Each length decodes the same groups
of prompts in turn with plain decoding, limited as a server limits drafts; the fastest one that is
surely faster is taken, else 0. Drafts pay less the more requests there are: so nothing larger is
measured where nothing pays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from draftwell.components.bench.engines.figures import Figure, figure_of
from draftwell.components.bench.engines.measure import (
    Beside,
    Group,
    decode_together,
    groups_of,
    places_of,
    side_of,
)
from draftwell.components.bench.interleaved import (
    REFERENCE,
    WARMUP_TOKENS,
    Progress,
    take_turns,
)
from draftwell.components.collect.decoding import room
from draftwell.components.engines.port import Decoded
from draftwell.components.prompts.prompt import Prompt, ids_of
from draftwell.components.report.intervals import TAIL
from draftwell.components.tune.levels import Level, level_of
from draftwell.serving.runtime.pair import LoadedPair
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.strategies import (
    PLAIN,
    Strategy,
    StrategyChoice,
    StrategyResources,
    build_strategy,
)

GROUPS = 4
"""Groups of requests that each length decodes, for each number of requests."""
MOST_TOKENS = 32
"""New tokens of a request: as many as show the speed, in a fraction of the tuning's time."""
MOST_REQUESTS = 64


def measure_levels(
    pair: LoadedPair,
    resources: StrategyResources,
    choice: StrategyChoice,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    progress: Progress | None = None,
) -> tuple[list[Level], list[Figure]]:
    """Draft lengths by the number of requests that are decoded together, and what was measured of
    each; nothing of a choice that never drafts, or of a pair with a single slot.

    Args:
        choice: its own length was confirmed for a single request, and holds for one.
        sampling: of the first request of a group; each further one has the next seed.
    """
    build = partial(build_strategy, choice.name, dict(choice.parameters))
    longest = build(resources.private()).longest_draft
    requests = list(request_counts(room(pair.engine(), MOST_REQUESTS)))
    if not longest or not requests:
        return [], []
    sampling = replace(sampling, max_tokens=min(sampling.max_tokens, MOST_TOKENS))
    contenders = {REFERENCE: build_strategy(PLAIN.name, {}, resources.private())}
    for length in sorted({longest, (longest + 1) // 2}):
        strategy = contenders[str(length)] = build(resources.private())
        strategy.draft_length_by_batch = {1: length}
    ids = [ids_of(pair, prompt) for prompt in prompts]
    levels, measured = [Level(at_once=1, k=longest, open=(longest,))], list[Figure]()
    for count in requests:
        groups = groups_of(ids, count, GROUPS)
        figures = beside_plain(pair, contenders, groups, sampling, progress)
        levels.append(level_of(count, figures))
        measured += figures.values()
        if levels[-1].k == 0:
            break
    return levels, measured


def request_counts(slots: int) -> Iterator[int]:
    """2, 4, 8, … up to the slots.

    >>> list(request_counts(10)), list(request_counts(1))
    ([2, 4, 8], [])
    """
    count = 2
    while count <= slots:
        yield count
        count *= 2


def beside_plain(
    pair: LoadedPair,
    contenders: dict[str, Strategy],
    groups: Sequence[Group],
    sampling: Sampling,
    progress: Progress | None,
) -> dict[int, Figure]:
    """Draft length → its speed over plain decoding's, all on the same groups in turn.

    Args:
        contenders: plain decoding, and the others by their length.
    """
    short = replace(sampling, max_tokens=min(sampling.max_tokens, WARMUP_TOKENS))
    for strategy in contenders.values():
        decode_together(pair.engine(), strategy, groups[0], short)

    def turn(strategy: Strategy) -> Callable[[int], Decoded]:
        return lambda group: decode_together(pair.engine(), strategy, groups[group], sampling)

    turns = {label: turn(strategy) for label, strategy in contenders.items()}
    sides = {
        label: side_of([decoded for [decoded] in items])
        for label, items in take_turns(turns, len(groups), progress=progress).items()
    }
    plain = sides.pop(REFERENCE)
    return {
        int(label): figure_of(
            label,
            Beside(at_once=len(groups[0]), plain=plain, other=side, prompts=places_of(groups)),
            TAIL / len(sides),
        )
        for label, side in sides.items()
    }
