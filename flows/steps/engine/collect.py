"""Texts and figures of another engine: what it writes, and how fast its ways to speculate are."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftwell.components.bench.categories import category_of
from draftwell.components.bench.engines.figures import by_category
from draftwell.components.engines.port import EngineSettings
from draftwell.components.engines.texts import open_texts, rows_of, write_texts
from draftwell.components.engines.vllm_methods import OFF, Method
from draftwell.flows.steps.engine.space import REPORT, EngineSpace
from draftwell.serving.errors import DraftwellError

if TYPE_CHECKING:
    from draftwell.components.bench.engines.figures import Figure
    from draftwell.components.prompts.prompt import Prompt
    from draftwell.components.tune.engines.ngram_replay import Text
    from draftwell.flows.settings import PipelineSettings
    from draftwell.serving.runtime.requests import Sampling

TEXTS = "loop-texts.jsonl"
"""Of the flow, in the engine's folder of the workspace."""


def bench_on_engine(
    space: EngineSpace,
    prompts: Sequence[Prompt],
    methods: Sequence[Method],
    sampling: Sampling,
    at_once: int = 1,
) -> list[Figure]:
    """Ways to speculate beside plain decoding, by category of prompts, too; nothing is kept."""

    lab = space.lab(prompts, sampling, at_once, max(2, -(-len(prompts) // at_once)))
    with lab.open():
        figures = {
            method: lab.measure(method, "bench", (at_once,))[0]
            for method in methods
            if method.name != OFF
        }
    named = zip(map(tuple, lab.prompts), prompts, strict=True)
    categories = list({ids: category_of(one.task, len(ids)) for ids, one in named}.values())
    return [
        figure.model_copy(
            update={"categories": by_category(lab.found(method, "bench", at_once), categories)}
        )
        for method, figure in figures.items()
    ]


def collect_as(
    settings: PipelineSettings, space: EngineSpace, prompts: Sequence[Prompt]
) -> dict[str, Any]:
    """Texts of plain decoding with the flows' settings, for the tuning; those of an earlier run
    stay where they are of the same prompts."""
    (space.folder / REPORT).unlink(missing_ok=True)  # of an earlier run
    sampling = space.pair.sampling(max_tokens=settings.max_tokens)
    file, plain = space.folder / TEXTS, Method()
    try:
        made = collect_on_engine(space, prompts, plain, sampling, file, fresh=settings.fresh)
    except DraftwellError as error:
        if error.code != "other_texts":
            raise
        space.workspace.say("    texts of other prompts or settings: collected again")
        made = collect_on_engine(space, prompts, plain, sampling, file, fresh=True)
    return {name: value for name, value in made.items() if name != "acceptance"}


def collected_texts(space: EngineSpace) -> list[Text]:
    """What `collect_as` has made."""
    return [(row["prompt_ids"], row["tokens"]) for row in rows_of(space.folder / TEXTS)]


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
    resumes after the last text.

    Args:
        sampling: of the first prompt; each further prompt has the next seed. `logprobs` says how
            many tokens are named.
        file: gets a line for every text; one of other prompts or settings is refused
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
    texts = open_texts(file, subject, fresh=fresh)
    with ExitStack() as stack:
        engine = space.engine(method.label)
        stack.callback(engine.stop)
        settings = EngineSettings(
            speculation=method.speculative_config(space.files), slots=at_once, context=context
        )
        return write_texts(
            texts,
            engine,
            settings,
            prompts,
            ids,
            sampling,
            decode=space.pair.decode,
            progress=space.bar,
        )
