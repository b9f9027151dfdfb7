"""Choosing how another engine speculates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from draftwell.components.bench.engines.measure import measurements_of
from draftwell.components.engines.vllm import lacks
from draftwell.components.engines.vllm_methods import CASCADE, OFF
from draftwell.components.export.schedules import sglang_adaptive, tensorrt_llm_schedule
from draftwell.components.prompts.overlap import hashes_of
from draftwell.components.tune.engines.candidates import left_out
from draftwell.components.tune.engines.lab import Lab
from draftwell.components.tune.engines.tune import tune_engine
from draftwell.flows.steps.engine.release import save_choice
from draftwell.flows.steps.engine.space import EngineSpace
from draftwell.flows.steps.picked import take_marked
from draftwell.serving.errors import DraftwellError
from draftwell.serving.files import json_digest

if TYPE_CHECKING:
    from draftwell.components.bench.engines.measure import Beside
    from draftwell.components.prompts.prompt import Prompt
    from draftwell.components.results import Results
    from draftwell.components.tune.engines.budget import Budget
    from draftwell.components.tune.engines.choice import EngineChoice
    from draftwell.components.tune.engines.ngram_replay import Text
    from draftwell.components.tune.engines.settings import EngineTuneSettings

SEARCH = 3
"""Version of the search in `tune_engine`: a choice that an earlier version made is made again, from
the measurements that are kept."""


def tune_on_engine(
    space: EngineSpace,
    prompts: Sequence[Prompt],
    settings: EngineTuneSettings,
    *,
    fresh: bool = False,
    texts: Sequence[Text] | None = None,
    budget: Budget | None = None,
) -> EngineChoice:
    """Choose how the engine speculates; the choice is put into the workspace, as an artifact.

    Args:
        texts: greedy texts of the target that were collected, which decide which n-grams are looked
            up.
        budget: of time; None takes as long as it takes.
    """

    lab, store = lab_of(space, prompts, settings, fresh=fresh)
    lab.budget = budget or lab.budget
    if store.read:
        space.workspace.say(
            f"{store.read} measurements of an earlier run are reused: --fresh measures again"
        )
    choice = tune_engine(lab, settings, lacks, texts)
    save_choice(
        space,
        choice,
        temperature=settings.temperature,
        subject=tuning_subject(store, settings, texts),
        exports=exports(choice),
        prompt_hashes=hashes_of(prompts),
        texts=None if texts is None else json_digest(texts),
    )
    return choice


def with_marked(space: EngineSpace) -> EngineSpace:
    """The space after the head that a person marked in MLflow was taken into the workspace, and the
    draft that a person marked was found to be the pair's."""
    device = space.workspace.device.partition(":")[0]
    taken = take_marked(space.workspace, device, ("eagle3_head", "distilled_draft"))
    return replace(space) if taken else space  # another one knows nothing of the files before


def refuse_if_nothing_is_left(space: EngineSpace, settings: EngineTuneSettings) -> None:
    """Refuse a tuning in which none of the methods that a person named can be tried: plain decoding
    would be no answer to that.

    Raises:
        DraftwellError: the line says why for each (`no_method_left`).
    """

    out = left_out(settings, space.files, lacks)
    if all(name in out for name in settings.methods if name != OFF):
        reasons = "; ".join(f"{name}, {why}" for name, why in out.items())
        raise DraftwellError(
            (
                f"none of the methods that were named can be tried ({reasons or 'off alone'}): "
                "name others with --methods"
            ),
            code="no_method_left",
        )


def tuning_subject(
    store: Results[Beside], settings: EngineTuneSettings, texts: Sequence[Text] | None
) -> str:
    """Digest of all that a choice depends on but for the time that there was."""
    return json_digest([SEARCH, store.subject, settings.model_dump(mode="json"), texts])


def lab_of(
    space: EngineSpace, prompts: Sequence[Prompt], settings: EngineTuneSettings, *, fresh: bool
) -> tuple[Lab, Results[Beside]]:
    """What a tuning measures with, and its store."""

    ids, context = space.encoded(prompts, settings.max_tokens)
    sampling = space.pair.sampling(
        max_tokens=settings.max_tokens, temperature=settings.temperature, seed=settings.seed
    )
    slots = max(settings.levels)
    subject = space.subject(
        ids,
        sampling,
        slots=slots,
        context=context,
        explore=settings.explore,
        groups=settings.groups,
    )
    store = measurements_of(subject, space.measurements(settings.temperature), fresh=fresh)
    return Lab(
        space.engine, space.files, ids, sampling, slots, context, settings.groups, store, space.bar
    ), store


def exports(choice: EngineChoice) -> dict[str, Any]:
    """The choice as settings of further engines; one that cannot express it is missing."""

    found: dict[str, Any] = {}
    if choice.levels and choice.method == "eagle3":
        found["sglang_adaptive"] = sglang_adaptive(
            [(level.at_once, level.open) for level in choice.levels]
        )
    if choice.levels and choice.method not in (OFF, CASCADE):
        found["tensorrt_llm"] = tensorrt_llm_schedule(
            [(level.at_once, level.k) for level in choice.levels]
        )
    return found
