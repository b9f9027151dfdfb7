"""The pipeline step that trains an EAGLE-3 head for a pair's target, on what the target writes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftwell.components.collect.plan import exclusive_folder
from draftwell.components.distil.distil import LONGEST_PROMPT, Source
from draftwell.components.distil.eagle3.distil import distil_head
from draftwell.components.distil.eagle3.network import default_features
from draftwell.components.distil.eagle3.plots import training_plot
from draftwell.components.distil.eagle3.recipe import HeadRecipe
from draftwell.components.distil.eagle3.start import check_startable
from draftwell.components.distil.instructions import kept_instructions
from draftwell.components.distil.writers import writer_of
from draftwell.components.prompts.overlap import different, hashes_of
from draftwell.components.prompts.prompt import ids_of
from draftwell.components.report.drawing import check_drawing, note_artifact
from draftwell.flows.workspace import Workspace
from draftwell.serving.artifacts.base import digest_of
from draftwell.serving.artifacts.pair_files import PairFiles, fingerprint, weights_digest
from draftwell.serving.device import core_ids
from draftwell.serving.files import write_json
from draftwell.serving.number_format import dtype_of
from draftwell.serving.runtime.pair import LoadSettings, load_pair

if TYPE_CHECKING:
    from draftwell.components.prompts.prompt import Prompt
    from draftwell.serving.artifacts.eagle3_head import Eagle3Head
    from draftwell.serving.runtime.pair import LoadedPair

Say = Callable[[str], None]
SHARD = 64
"""Prompts of a shard of the corpus, at most what a killed run writes again."""
AT_ONCE = 32
"""Requests in one batch, where the target writes over the engine's slots."""


@dataclass(frozen=True)
class HeadRequest:
    """What a user asked for.

    Args:
        prompts: what the target is asked; None lets it invent `invented` instructions.
        minutes: training time; ignored where `tokens` is given.
        max_tokens: tokens that the target writes after a prompt at most.
        work: folder of unfinished work; None takes `eagle3` in the workspace.
        seed: of the start and of the order of batches.
    """

    prompts: Sequence[Prompt] | None = None
    invented: int = 2000
    head_tokens: int = 8192
    unrolled: int = 4
    minutes: float = 60.0
    tokens: int | None = None
    max_tokens: int = 128
    work: Path | None = None
    seed: int = 0


def run_train_eagle3(
    space: Workspace, wanted: HeadRequest, *, say: Say = print
) -> tuple[Eagle3Head, dict[str, Any]]:
    """Train a head, put it into the workspace, and return it with the report of
    `draftwell.components.distil.eagle3` and the `curves` of training.

    A run that was stopped resumes: shards and checkpoint are in the work folder.

    Raises:
        DraftwellError: a head cannot start from the target (`start.check_startable`), or it is too
            shallow; or as in `train_on`.
    """

    check_drawing()
    work = wanted.work or space.root / "eagle3"
    with exclusive_folder(work, "training of a head", "choose another --work"):
        pair = load_target(space, wanted, say)
        layers = default_features(pair.modules["target"].config.num_hidden_layers)
        recipe = HeadRecipe(
            layers=layers,
            head_tokens=wanted.head_tokens,
            steps=wanted.unrolled,
            minutes=wanted.minutes,
            tokens=wanted.tokens,
            seed=wanted.seed,
        )
        source = source_of(space, pair, wanted, layers, work, say)
        made, report = distil_head(source, recipe, work, say=say)
        head = made.bound_to(space.spec.name, fingerprint(space.files(), space.dtype))
        folder = space.save(head)
    report["digest"] = digest_of(folder)
    write_json(space.reports / "eagle3_head.json", report)
    note_artifact(training_plot(report, space.reports / "eagle3_head.png"), report["digest"])
    say(
        f"{work} keeps {size_of(work) / 1e9:.1f} GB of the target's texts and of training: "
        "remove it when no further head shall be trained "
        "on these prompts"
    )
    return head, report


def curves_of(space: Workspace, folder: Path) -> dict[str, Any]:
    """The curves of the training of a head, name → pairs of step and value; none where the
    workspace's report is of another one."""
    try:
        report = json.loads((space.reports / "eagle3_head.json").read_text())
    except (OSError, ValueError):
        return {}
    return dict(report["curves"]) if report.get("digest") == digest_of(folder) else {}


def size_of(folder: Path) -> int:
    """Bytes of all files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def load_target(space: Workspace, wanted: HeadRequest, say: Say) -> LoadedPair:
    """The pair's target alone, in a form that can be trained against."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    say(f"loading the target of {space.spec.name}")
    pair = load_pair(
        PairFiles(space.spec.name, space.files().target),
        LoadSettings.model_validate(
            {
                "dtype": dtype_of(space.dtype),
                "slots": AT_ONCE,
                "max_context": LONGEST_PROMPT + wanted.max_tokens,
                "chat": space.spec.chat,
                "keep_modules": True,
            }
        ),
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

    donor = weights_digest(space.files().target)
    writer = writer_of(pair, min(AT_ONCE, 16 * len(core_ids())), features=layers)
    asked = (
        wanted.prompts
        if wanted.prompts is not None
        else kept_instructions(writer_of(pair, AT_ONCE), pair, wanted.invented, donor, work, say)
    )
    asked = different(asked)  # a prompt that is repeated would be learned from and held out
    rows = [ids for p in asked if 0 < len(ids := ids_of(pair, p)) <= LONGEST_PROMPT]
    if len(rows) < len(asked):
        say(f"{len(asked) - len(rows)} prompts of more than {LONGEST_PROMPT} tokens are left out")
    of = (
        "instructions it invented"
        if wanted.prompts is None
        else f"{len(wanted.prompts)} prompts of the user's"
    )
    return Source(
        pair,
        donor,
        writer,
        rows,
        [],
        wanted.max_tokens,
        SHARD,
        name=space.spec.name,
        data=f"the target's own greedy outputs on {of}",
        hashes=hashes_of(asked),
    )
