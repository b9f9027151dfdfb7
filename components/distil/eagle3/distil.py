"""From a target and prompts to an EAGLE-3 head: corpus with states, start, training, artifact.

Every step keeps what is finished in a work folder, as `draftwell.components.distil.distil` does: a
second call resumes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from draftwell.components.distil.corpus import (
    Conversation,
    corpus_digest,
    frequent_tokens,
    write_corpus,
)
from draftwell.components.distil.distil import LONGEST_PROMPT, Source, output_tokens
from draftwell.components.distil.eagle3.network import Eagle3Network, head_config
from draftwell.components.distil.eagle3.recipe import Borrowed, HeadRecipe
from draftwell.components.distil.eagle3.start import check_startable, start_from_target
from draftwell.components.distil.eagle3.training import train_head
from draftwell.components.distil.stored_corpus import read_stored
from draftwell.components.distil.training import Log
from draftwell.components.report.provenance import git_commit, library_versions, plain
from draftwell.serving.artifacts.base import Provenance
from draftwell.serving.artifacts.eagle3_head import Eagle3Head
from draftwell.serving.errors import DraftwellError
from draftwell.serving.files import json_digest, write_atomically


def distil_head(
    source: Source,
    recipe: HeadRecipe,
    work: Path,
    *,
    more: Sequence[list[int]] = (),
    log: Log = lambda name, value, step: None,
    say: Callable[[str], None] = print,
) -> tuple[Eagle3Head, dict[str, Any]]:
    """Train a head.

    Args:
        source: its writer gives the states of `recipe.layers` (`writers.LeanWriter`); no prompts
            are set aside, 2 % of the conversations are.
        work: gets the folders `corpus`, for shards, and `checkpoint_folder`, of this very training.
        more: ids of further prompts to learn on; their shards come after the others and leave those
            as they are.
        log, say: as in `train_head`.
    Returns:
        the artifact, and what `train_head` returns with `corpus`.
    Raises:
        DraftwellError: no prompts, or a target that a head cannot start from
            (`start.check_startable`).
    """
    batches = [prompts for prompts in (source.prompts, more) if prompts]
    if not batches:
        raise DraftwellError(
            (
                f"no prompt fits into {LONGEST_PROMPT} tokens and the target's context: give "
                "shorter ones"
            ),
            code="no_prompt_fits",
        )
    check_startable(source.target.modules["target"])  # refused before hours are spent on the corpus
    shards = [
        shard
        for prompts in batches
        for shard in write_corpus(
            source.writer,
            prompts,
            work / "corpus",
            donor=source.donor,
            new_tokens=source.new_tokens,
            batch=source.batch,
            say=say,
        )
    ]
    return train_on(
        source,
        read_stored(shards),
        recipe,
        checkpoint_folder(source, recipe, work, more),
        log=log,
        say=say,
    )


def checkpoint_folder(
    source: Source, recipe: HeadRecipe, work: Path, more: Sequence[list[int]] = ()
) -> Path:
    """Where the checkpoint of a training is, known before its text is: on other prompts or with
    other settings another begins."""
    of = [
        source.donor,
        source.writer.identity,
        source.new_tokens,
        recipe.head_tokens,
        recipe.identity(),
        source.prompts,
        list(more),
    ]
    return work / f"head-{json_digest(of)[:16]}"


def pinned_shards(folder: Path, work: Path) -> list[Path]:
    """The shards that are in a folder now, or were when `work` was first used: a run that resumes
    continues with the same text.

    Raises:
        DraftwellError: there are none, or one of those that were used is gone.
    """
    record = work / "shards.json"
    if not record.is_file():
        names = sorted(path.name for path in folder.glob("shard-*.safetensors"))
        if not names:
            raise DraftwellError(
                (
                    f"{folder} holds no shards (shard-*.safetensors): name the folder that a "
                    "corpus was written to"
                ),
                code="no_shards",
            )
        work.mkdir(parents=True, exist_ok=True)
        write_atomically(record, json.dumps(names, indent=2).encode())
    found = [folder / name for name in json.loads(record.read_text())]
    if missing := [path for path in found if not path.is_file()]:
        raise DraftwellError(
            (
                f"{missing[0]} is gone, which the training in {work} began with: put it back, "
                "or name another --work"
            ),
            code="no_shards",
        )
    return found


def train_on(
    source: Source,
    corpus: Sequence[Conversation],
    recipe: HeadRecipe,
    folder: Path,
    *,
    log: Log = lambda name, value, step: None,
    say: Callable[[str], None] = print,
) -> tuple[Eagle3Head, dict[str, Any]]:
    """As `distil_head`, on a corpus that was written already.

    Args:
        folder: of the checkpoint.
    Raises:
        DraftwellError: the corpus lacks the states of the layers, or another run's checkpoint.
    """
    module = source.target.modules["target"]
    check_states(corpus, module, recipe)
    rows = module.get_output_embeddings().weight.shape[0]
    ids = frequent_tokens(
        corpus, recipe.head_tokens, min(rows, source.target.models["target"].vocab_size)
    )
    network = Eagle3Network(head_config(module.config, len(ids), recipe.layers))
    start_from_target(network, module, corpus, recipe.seed)
    found = train_head(
        network,
        corpus,
        Borrowed.of(module, ids),
        recipe,
        folder,
        bound={"target": source.donor},
        log=log,
        say=say,
    )
    made_of = provenance_of(source, recipe, corpus, found, head_tokens=len(ids))
    state = {name: tensor.detach() for name, tensor in network.state_dict().items()}
    artifact = Eagle3Head(state, network.config, ids, recipe.layers, source.donor, made_of)
    return artifact, {
        **found,
        "corpus": {"conversations": len(corpus), "output_tokens": output_tokens(corpus)},
    }


def check_states(corpus: Sequence[Conversation], module: Any, recipe: HeadRecipe) -> None:
    """Refuse a corpus without the states of three layers; of which layers they are, it does not
    say."""
    width, wanted = (
        (corpus[0].hidden.shape[-1] if corpus else 0),
        (len(recipe.layers) + 1) * module.config.hidden_size,
    )
    if width != wanted:
        raise DraftwellError(
            f"the corpus has {width} numbers at a position, a head of this target reads "
            f"{wanted}: write it with the "
            "states of the head's layers",
            code="not_of_the_head",
        )


def provenance_of(
    source: Source,
    recipe: HeadRecipe,
    corpus: Sequence[Conversation],
    found: dict[str, Any],
    *,
    head_tokens: int,
) -> Provenance:
    """Where a head comes from, with its acceptance on held-out conversations; its pair is the one
    that the target was loaded as."""
    parameters = {
        "layers": ",".join(map(str, recipe.layers)),
        "head_tokens": head_tokens,
        "unrolled_steps": recipe.steps,
        "seed": recipe.seed,
        "batch_tokens": recipe.batch_tokens,
        "peak_rate": recipe.peak_rate,
        "noise": recipe.noise,
        "steps": found["steps"],
        "tokens_processed": found["tokens"],
        "minutes": round(found["minutes"], 1),
        "conversations": len(corpus),
        "output_tokens": output_tokens(corpus),
        "data": source.data,
    }
    depths = {
        f"acceptance_depth_{depth}": float(share)
        for depth, share in enumerate(found["acceptance"], 1)
    }
    return Provenance(
        pair=source.name,
        fingerprint=source.target.fingerprint,
        trace_digest=corpus_digest(corpus),
        git_commit=git_commit(),
        library_versions=library_versions(),
        parameters={key: plain(value) for key, value in parameters.items()},
        metrics={
            **depths,
            "acceptance": sum(depths.values()) / len(depths),
            "accepted_length": float(found["accepted_length"]),
            "positions": float(found["positions"]),
        },
        training_prompts=None if source.hashes is None else sorted(set(source.hashes)),
        unknown_prompts=sorted(source.unknown),
    )
