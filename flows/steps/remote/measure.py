"""Figures and texts of an engine at an address."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftwell.components.bench.engines.at_address import LoadFigure, measure_loads
from draftwell.components.engines.port import EngineSettings
from draftwell.components.engines.texts import open_texts, write_texts
from draftwell.flows.steps.remote.space import RemoteSpace

if TYPE_CHECKING:
    from draftwell.components.engines.remote.counters import Counters
    from draftwell.components.prompts.prompt import Prompt
    from draftwell.serving.runtime.requests import Sampling

TEXTS = "texts.jsonl"


def bench_at_address(
    space: RemoteSpace, prompts: Sequence[Prompt], sampling: Sampling, levels: Sequence[int]
) -> list[LoadFigure]:
    """An engine at each number of requests at once, beside plain decoding where there is some;
    nothing is kept. What the figures lack, or who else used the engine, becomes a remark."""
    ids = space.encoded(prompts, sampling.max_tokens)
    before = space.dialect.counters(space.engine.client)
    found = measure_loads(space.engine, space.plain, ids, levels, sampling, progress=space.bar)
    gained = space.dialect.counters(space.engine.client).since(before)
    space.remarks.extend([*missing(space, found), *others(space, gained)])
    return found


def missing(space: RemoteSpace, figures: Sequence[LoadFigure]) -> list[str]:
    """What could not be said, and how it could."""
    found = []
    if space.plain is None:
        found.append(
            f"no request can switch speculation off at {space.address.url} "
            f"({space.dialect.name}), so nothing was compared with plain decoding: name an address "
            "of the same model without speculation with --set plain=…"
        )
    acceptance = figures[0].acceptance
    if not acceptance.drafted:
        found.append("nothing was drafted, or the engine does not say what became of drafts")
    elif not acceptance.accepted_at:
        found.append("the engine does not say how many tokens were accepted by position")
    return found


def others(space: RemoteSpace, gained: Counters | None) -> list[str]:
    """A line where the engine decoded more than was asked of it here."""
    own = space.engine.new_tokens
    if space.plain is not None and space.plain.address == space.address:
        own += space.plain.new_tokens
    if gained is None or gained.new_tokens is None or gained.new_tokens <= own:
        return []
    return [
        f"{gained.new_tokens - own} tokens of others' requests were decoded meanwhile: measure on "
        "an engine that nobody else asks"
    ]


def collect_at_address(
    space: RemoteSpace,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    file: Path,
    *,
    at_once: int,
    fresh: bool = False,
) -> dict[str, Any]:
    """Texts, top log-probabilities and acceptance, one JSON object a line; a run that was stopped
    resumes after the last text.

    Args:
        sampling: of the first prompt; each further prompt has the next seed. `logprobs` says how
            many tokens are named.
        file: gets a line for every text; one of other prompts, settings or of another engine is
            refused unless `fresh`.
    Returns:
        As `write_texts`.
    """
    ids = space.encoded(prompts, sampling.max_tokens)
    subject = space.subject(ids, sampling, logprobs=sampling.logprobs)
    return write_texts(
        open_texts(file, subject, fresh=fresh),
        space.engine,
        EngineSettings(slots=at_once),
        prompts,
        ids,
        sampling,
        decode=space.pair.decode,
        progress=space.bar,
    )
