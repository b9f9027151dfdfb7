"""Texts and figures of another engine: what it writes, and how fast its ways to speculate are."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftwell.components.bench.engines.measure import measurements_of
from draftwell.components.engines.port import EngineSettings
from draftwell.components.engines.texts import EngineTexts
from draftwell.components.engines.vllm_methods import OFF, Method
from draftwell.components.tune.engines.lab import Lab
from draftwell.flows.steps.engine.space import EngineSpace, about
from draftwell.serving.files import json_digest

if TYPE_CHECKING:
    from draftwell.components.bench.engines.figures import Figure
    from draftwell.components.prompts.prompt import Prompt
    from draftwell.serving.runtime.requests import Sampling


def bench_on_engine(
    space: EngineSpace,
    prompts: Sequence[Prompt],
    methods: Sequence[Method],
    sampling: Sampling,
    at_once: int = 1,
) -> list[Figure]:
    """Ways to speculate beside plain decoding; nothing is kept."""

    ids, context = space.encoded(prompts, sampling.max_tokens)
    groups = max(2, -(-len(ids) // at_once))
    lab = Lab(
        space.engine,
        space.files,
        ids,
        sampling,
        at_once,
        context,
        groups,
        measurements_of({}),
        space.bar,
    )
    with lab.open():
        return [
            lab.measure(method, "bench", (at_once,))[0] for method in methods if method.name != OFF
        ]


def collect_on_engine(
    space: EngineSpace,
    prompts: Sequence[Prompt],
    method: Method,
    sampling: Sampling,
    file: Path,
    *,
    at_once: int = 8,
    fresh: bool = False,
) -> dict[str, Any]:
    """Texts, top log-probabilities and acceptance, one JSON object a line; a run that was stopped
    resumes after the last whole group.

    Args:
        sampling: of the first prompt; each further prompt has the next seed. `logprobs` says how
            many tokens are named.
        file: is written atomically after every group; one of other prompts or settings is refused
            unless `fresh`.
    Returns:
        `rows`, `tokens`, `tokens_per_second` (of those that were decoded now) and `acceptance` (of
        all).
    """

    ids, context = space.encoded(prompts, sampling.max_tokens)
    # a head that is trained later changes no plain text
    unused = {} if method.name != OFF else {"head": None, "plugin": None}
    subject = space.subject(
        ids, sampling, method=method.label, logprobs=sampling.logprobs, **unused
    )
    texts = EngineTexts(
        file, {**about(space), "subject": json_digest(subject), "method": method.label}, fresh=fresh
    )
    with ExitStack() as stack:
        engine = space.engine(method.label)
        stack.callback(engine.stop)
        settings = EngineSettings(
            speculation=method.speculative_config(space.files), slots=at_once, context=context
        )
        return texts.write(
            engine, settings, prompts, ids, sampling, decode=space.pair.decode, progress=space.bar
        )
