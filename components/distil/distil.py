"""From a target and prompts to a measured draft: corpus, training, artifact, agreement.

Every step keeps what is finished in a work folder: shards of the target's own outputs, the training
checkpoint. A second call with the same inputs resumes where the first was stopped.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draftwell.components.collect.decoding import room
from draftwell.components.distil.artifact import agreement, to_artifact, with_draft
from draftwell.components.distil.corpus import (
    Conversation,
    corpus_digest,
    read_corpus,
    write_corpus,
)
from draftwell.components.distil.family import keep_layers
from draftwell.components.distil.training import Recipe, head_of, train_draft
from draftwell.components.distil.writers import Writer
from draftwell.components.prompts.prompt import Prompt, ids_of
from draftwell.components.report.provenance import provenance
from draftwell.components.train.fit import Say
from draftwell.serving.artifacts.base import Provenance
from draftwell.serving.artifacts.distilled_draft import DistilledDraft
from draftwell.serving.artifacts.pair_files import PairFiles
from draftwell.serving.errors import DraftwellError
from draftwell.serving.runtime.model_files import context_within, read_config
from draftwell.serving.runtime.pair import LoadedPair, LoadSettings, load_pair

CANDIDATE = "candidate"
"""Folder of the draft that was trained but not measured yet."""
SHARD = 64
"""Prompts of a shard of the corpus, at most what a killed run writes again."""
LONGEST_PROMPT = 640
"""Longer prompts are left out: they cost much and are seen once."""


@dataclass(frozen=True)
class Source:
    """What is distilled.

    Args:
        target: the pair, loaded with `keep_modules`; only its target is used.
        donor: sha256 of the target's weights.
        writer: how the target writes.
        prompts: ids of the prompts to learn on.
        untouched: (task, ids) of prompts that agreement is measured on.
        new_tokens: tokens that the target writes after a prompt at most.
        batch: prompts of a shard of the corpus.
        data: what the prompts are in a few words, for the provenance.
        hashes: of the prompts to learn on (`draftwell.components.prompts.overlap`), for the
            provenance; None where they are not known.
    """

    target: LoadedPair
    donor: str
    writer: Writer
    prompts: Sequence[list[int]]
    untouched: Sequence[tuple[str, list[int]]]
    new_tokens: int = 128
    batch: int = SHARD
    data: str = field(kw_only=True)
    hashes: Sequence[str] | None = field(default=None, kw_only=True)


def distil_draft(
    source: Source,
    recipe: Recipe,
    work: Path,
    *,
    new: Callable[[Any], Any] | None = None,
    say: Say = print,
) -> tuple[DistilledDraft, dict[str, Any]]:
    """Distil a draft.

    Args:
        work: folder for shards and checkpoint.
        new: makes the draft to train out of the target's module; None keeps the recipe's layers.
    Returns:
        the artifact with its provenance, and a report: what `train_draft` returns, `agreement` (of
        `artifact.agreement`, after rounding to int8) and `corpus`.
    Raises:
        DraftwellError: no prompts, or layers that the target lacks.
    """
    module = source.target.modules["target"]
    # refused before hours are spent on the corpus
    draft = new(module) if new else keep_layers(module, recipe.layers)
    corpus = texts_of(source, work, say)
    head = head_of(corpus, module, recipe.head_tokens, source.target.models["target"].vocab_size)
    progress = train_draft(draft, corpus, head, recipe, work, donor=source.donor, say=say)
    settings = {
        "layers": ",".join(map(str, recipe.layers)),
        "head_tokens": len(head.ids),
        "loss": recipe.loss,
    }
    # the fingerprint of its pair is not known before the draft is
    made_of = provenance_of(source, settings, corpus, progress).model_copy(
        update={"fingerprint": source.donor}
    )
    artifact = to_artifact(draft, head.ids, source.donor, made_of)
    artifact.save(work / CANDIDATE)
    report: dict[str, Any] = {**progress, "corpus": written(corpus)}
    if source.untouched:
        # as it will be loaded: rounded
        report["agreement"] = measured(source, DistilledDraft.load(work / CANDIDATE), say)
        artifact.provenance = made_of.model_copy(
            update={"metrics": agreement_metrics(report["agreement"])}
        )
    return artifact, report


def target_alone(
    name: str, folder: Path, new_tokens: int, *, chat: bool = True, **settings: Any
) -> LoadedPair:
    """A target in a form that can be trained against, with room for `LONGEST_PROMPT` and what it
    writes, as far as it was trained for that many positions.

    Args:
        new_tokens: as in `Source`.
        chat: as in `load_pair`.
        settings: of `LoadSettings`.
    Raises:
        DraftwellError: its positions leave no room for a prompt (`no_room`).
    """
    from transformers.utils import logging

    positions = positions_of(read_config(folder), new_tokens)
    logging.disable_progress_bar()
    return load_pair(
        PairFiles(name, folder),
        LoadSettings.model_validate({**settings, "max_context": positions}),
        chat=chat,
        keep_modules=True,
    )


def positions_of(config: Any, new_tokens: int) -> int:
    """Positions that a target of this configuration is loaded with, as in `target_alone`."""
    positions = context_within(config, LONGEST_PROMPT + new_tokens)
    assert positions is not None  # as many were wanted
    if positions <= new_tokens:
        raise DraftwellError(
            f"{new_tokens} new tokens leave no room for a prompt in the target's {positions} "
            "positions: lower max_tokens, where the command has it, or choose another target",
            code="no_room",
        )
    return positions


def longest_prompt(pair: LoadedPair, new_tokens: int) -> int:
    """Tokens of the longest prompt that a target of `target_alone` can be asked."""
    return pair.models["target"].max_context - new_tokens


def ids_that_fit(
    pair: LoadedPair, prompts: Sequence[Prompt], longest: int, say: Say
) -> list[list[int]]:
    """Token ids of prompts; those with more than `longest` are left out, and counted."""
    rows = [ids for prompt in prompts if 0 < len(ids := ids_of(pair, prompt)) <= longest]
    if len(rows) < len(prompts):
        say(f"{len(prompts) - len(rows)} prompts of more than {longest} tokens are left out")
    return rows


def own_outputs_on(prompts: Sequence[Prompt] | None) -> str:
    """What was learned, for the provenance, from a user's prompts or from invented ones."""
    given = "instructions it invented"
    if prompts is not None:
        given = f"{len(prompts)} prompts of the user's"
    return f"the target's own greedy outputs on {given}"


def texts_of(source: Source, folder: Path, say: Say) -> list[Conversation]:
    """What the target writes after its prompts; shards that are in the folder are not written
    again."""
    if not source.prompts:
        raise DraftwellError(
            f"no prompt fits into {LONGEST_PROMPT} tokens and the target's context: give "
            "shorter ones",
            code="no_prompt_fits",
        )
    return read_corpus(
        write_corpus(
            source.writer,
            source.prompts,
            folder,
            donor=source.donor,
            new_tokens=source.new_tokens,
            batch=source.batch,
            say=say,
        )
    )


def written(corpus: Sequence[Conversation]) -> dict[str, int]:
    """How much the target wrote."""
    return {
        "conversations": len(corpus),
        "output_tokens": sum(len(s.ids) - s.prompt for s in corpus),
    }


def measured(source: Source, draft: DistilledDraft, say: Callable[[str], None]) -> dict[str, Any]:
    """Agreement of the draft as it will run, on the untouched prompts."""
    say(f"measuring agreement on {len(source.untouched)} prompts that were not trained on")
    slots = room(source.target.engine(), len(source.untouched))
    pair = with_draft(
        source.target, draft, slots=slots, max_context=source.target.models["target"].max_context
    )
    return agreement(pair, source.untouched, max_tokens=source.new_tokens)


def provenance_of(
    source: Source,
    recipe: Mapping[str, Any],
    corpus: Sequence[Conversation],
    progress: Mapping[str, Any],
    metrics: Mapping[str, float] | None = None,
) -> Provenance:
    """Where a draft or a head comes from.

    Args:
        recipe: the settings that are recorded.
        progress: of `fit`.
    """
    parameters = {
        **recipe,
        "steps": progress["steps"],
        "tokens_processed": progress["tokens"],
        "minutes": round(progress["minutes"], 1),
        **written(corpus),
        "data": source.data,
    }
    return provenance(
        source.target,
        trace_digest=corpus_digest(corpus),
        parameters=parameters,
        metrics=metrics,
        training_prompts=source.hashes,
    )


def agreement_metrics(found: dict[str, Any]) -> dict[str, float]:
    """Agreement as flat metrics."""
    flat = {
        "agreement": found["agreement"],
        "agreement_positions": found["positions"],
        "agreement_mean_run": found["mean_run"],
    }
    tasks = {
        f"agreement_{re.sub(r'[^A-Za-z0-9_.-]', '_', task)}": share
        for task, share in found["tasks"].items()
        if task
    }
    return {name: float(value) for name, value in {**flat, **tasks}.items()}
