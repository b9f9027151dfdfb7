"""The pipeline step that trains an EAGLE-3 head for a pair's target, on what the target writes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftwell.components.collect.plan import exclusive_folder
from draftwell.components.distil.distil import (
    SHARD,
    Source,
    ids_that_fit,
    longest_prompt,
    own_outputs_on,
    target_alone,
)
from draftwell.components.distil.eagle3.distil import distil_head
from draftwell.components.distil.eagle3.network import default_features
from draftwell.components.distil.eagle3.plots import training_plot
from draftwell.components.distil.eagle3.published import read_published
from draftwell.components.distil.eagle3.start import check_startable
from draftwell.components.distil.eagle3.training import HeadRecipe
from draftwell.components.distil.instructions import kept_instructions
from draftwell.components.distil.writers import Writer
from draftwell.components.prompts.overlap import different, hashes_of
from draftwell.components.report.drawing import check_drawing, note_artifact
from draftwell.flows.context import pictures_of, training_prompts
from draftwell.flows.workspace import Workspace, in_turn
from draftwell.registry.store import Store
from draftwell.serving.artifacts.base import Provenance, digest_of
from draftwell.serving.artifacts.pair_files import fingerprint, weights_digest
from draftwell.serving.errors import DraftwellError
from draftwell.serving.files import write_json
from draftwell.serving.number_format import dtype_of
from draftwell.serving.runtime.model_files import read_config

if TYPE_CHECKING:
    from draftwell.components.prompts.prompt import Prompt
    from draftwell.flows.settings import PipelineSettings
    from draftwell.flows.steps.engine.space import EngineSpace
    from draftwell.serving.artifacts.eagle3_head import Eagle3Head
    from draftwell.serving.runtime.pair import LoadedPair

Say = Callable[[str], None]
AT_ONCE = 32
"""Requests in one batch."""
NEW_TOKENS = 128
"""Tokens that the target writes after a prompt, at most."""

NO_HEAD = ("unsupported_architecture", "too_shallow", "no_room", "no_prompt_fits")
"""Codes of targets that no head can be trained for: the loop continues without one."""


@dataclass(frozen=True)
class HeadRequest:
    """What a user asked for.

    Args:
        prompts: what the target is asked; None lets it invent `invented` instructions.
        minutes: training time; ignored where `tokens` is given.
        work: folder of unfinished work; None takes `eagle3` in the workspace.
        seed: of the start and of the order of batches.
    """

    prompts: Sequence[Prompt] | None = None
    invented: int = 2000
    minutes: float = 60.0
    tokens: int | None = None
    work: Path | None = None
    seed: int = 0


@in_turn("draftwell step train")
def run_train_eagle3(
    space: Workspace, wanted: HeadRequest, *, say: Say = print
) -> tuple[Eagle3Head, dict[str, Any]]:
    """Train a head, put it into the workspace, and return it with the report of
    `draftwell.components.distil.eagle3` and the `curves` of training.

    A run that was stopped resumes: shards and checkpoint are in the work folder.

    Raises:
        DraftwellError: a head cannot start from the target (`start.check_startable`), or it is too
            shallow; or as in `train_head`.
    """

    check_drawing()
    work = wanted.work or space.root / "eagle3"
    with exclusive_folder(work, "training of a head", "choose another work="):
        pair = load_target(space, say)
        layers = default_features(pair.modules["target"].config.num_hidden_layers)
        recipe = HeadRecipe(
            layers=layers, minutes=wanted.minutes, tokens=wanted.tokens, seed=wanted.seed
        )
        source = source_of(space, pair, wanted, layers, work, say)
        made, report = distil_head(source, recipe, work, say=say)
        head = made.bound_to(space.spec.name, fingerprint(space.files(), space.dtype))
        folder = space.save(head)
    report["digest"] = digest_of(folder)
    write_json(space.reports / "eagle3_head.json", report)
    note_artifact(training_plot(report, space.reports / "eagle3_head.png"), report["digest"])
    say(
        f"{work} keeps the target's texts and the training: remove it when no further head shall "
        "be trained on these prompts"
    )
    return head, report


@in_turn("draftwell step train")
def run_import_eagle3(space: Workspace, folder: Path) -> Eagle3Head:
    """Put a head that was trained elsewhere for the pair's target into the workspace.

    Raises:
        DraftwellError: as in `published.read_published` and `model_files.read_config`.
    """
    files = space.files()
    made = Provenance(
        pair=space.spec.name,
        fingerprint=fingerprint(files, space.dtype),
        unknown_prompts=["eagle3_head"],
        parameters={"published": folder.name},
    )
    target = read_config(files.target).get_text_config()
    head = read_published(folder, target, weights_digest(files.target), made)
    space.save(head)
    return head


def train_as(settings: PipelineSettings, space: EngineSpace, prompts: Sequence[Prompt]) -> str:
    """A head for another engine with the flows' settings, where the pair has none or time for one
    was named, on the prompts that texts were collected for; returns what came of it."""
    own, minutes = space.workspace, settings.train_minutes
    if settings.methods is not None and "eagle3" not in settings.methods:
        return "no head is needed for the methods that were named"
    if minutes is None and space.files.head is not None:
        return f"the pair has a head: {space.files.head.name}"
    learnt = training_prompts(own, kinds=("eagle3_head",)).by_name.get("eagle3_head")
    if not settings.fresh and learnt == frozenset(hashes_of(prompts)):
        return "the head of an earlier run, trained on the same prompts"
    minutes = minutes or settings.engine_minutes / 5
    try:
        head, report = run_train_eagle3(
            own, HeadRequest(prompts=prompts, minutes=minutes), say=own.say
        )
    except DraftwellError as error:
        if error.code not in NO_HEAD:
            raise
        return f"none is trained: {error}"
    made = Store().publish(
        own.folder(head.kind),
        pair=own.spec.name,
        metrics=report["curves"],
        plots=pictures_of(own, head.kind),
    )
    return (
        f"trained for {minutes:g} minutes, {report['accepted_length']:.2f} tokens of a draft are "
        f"kept; {made.name} {made.version}"
    )


def curves_of(space: Workspace, folder: Path) -> dict[str, Any]:
    """The curves of the training of a head, name → pairs of step and value; none where the
    workspace's report is of another one."""
    try:
        report = json.loads((space.reports / "eagle3_head.json").read_text())
    except (OSError, ValueError):
        return {}
    return dict(report["curves"]) if report.get("digest") == digest_of(folder) else {}


def load_target(space: Workspace, say: Say) -> LoadedPair:
    """The pair's target alone."""
    say(f"loading the target of {space.spec.name}")
    pair = target_alone(
        space.spec.name,
        space.files().target,
        NEW_TOKENS,
        dtype=dtype_of(space.dtype),
        slots=AT_ONCE,
        chat=space.spec.chat,
    )
    check_startable(pair.modules["target"])
    return pair


def source_of(
    space: Workspace,
    pair: LoadedPair,
    wanted: HeadRequest,
    layers: tuple[int, ...],
    work: Path,
    say: Say,
) -> Source:
    """What is learned from: prompts as ids, and a writer that gives the states of the layers."""

    donor, writer = weights_digest(space.files().target), Writer(pair, AT_ONCE, features=layers)
    asked = wanted.prompts
    if asked is None:
        asked = kept_instructions(writer, pair, wanted.invented, donor, work, say)
    asked = different(asked)  # a prompt that is repeated would be learned from and held out
    return Source(
        pair,
        donor,
        writer,
        ids_that_fit(pair, asked, longest_prompt(pair, NEW_TOKENS), say),
        [],
        NEW_TOKENS,
        SHARD,
        data=own_outputs_on(wanted.prompts),
        hashes=hashes_of(asked),
    )
