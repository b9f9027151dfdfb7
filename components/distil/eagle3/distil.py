"""From a target and prompts to an EAGLE-3 head: corpus with states, start, training, artifact.

Every step keeps what is finished in a work folder, as `draftwell.components.distil.distil` does: a
second call resumes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from draftwell.components.distil.corpus import (
    Conversation,
    frequent_tokens,
    read_corpus,
    write_corpus,
)
from draftwell.components.distil.distil import Source, check_prompts, output_tokens, provenance_of
from draftwell.components.distil.eagle3.network import Eagle3Network, head_config
from draftwell.components.distil.eagle3.recipe import Borrowed, HeadRecipe
from draftwell.components.distil.eagle3.start import check_startable, start_from_target
from draftwell.components.distil.eagle3.training import train_head
from draftwell.components.train.fit import Log, Say, silent
from draftwell.serving.artifacts.eagle3_head import Eagle3Head
from draftwell.serving.errors import DraftwellError
from draftwell.serving.files import json_digest


def distil_head(
    source: Source,
    recipe: HeadRecipe,
    work: Path,
    *,
    more: Sequence[list[int]] = (),
    log: Log = silent,
    say: Say = print,
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
    check_prompts(batches)
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
        read_corpus(shards),
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


def train_on(
    source: Source,
    corpus: Sequence[Conversation],
    recipe: HeadRecipe,
    folder: Path,
    *,
    log: Log = silent,
    say: Say = print,
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
    made_of = provenance_of(
        source,
        recorded(recipe, len(ids)),
        corpus,
        found,
        fingerprint=source.target.fingerprint,
        metrics=acceptance_metrics(found),
    )
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


def recorded(recipe: HeadRecipe, head_tokens: int) -> dict[str, Any]:
    """The settings that a head's provenance names."""
    return {
        "layers": ",".join(map(str, recipe.layers)),
        "head_tokens": head_tokens,
        "unrolled_steps": recipe.steps,
        "seed": recipe.seed,
        "batch_tokens": recipe.batch_tokens,
        "peak_rate": recipe.peak_rate,
        "noise": recipe.noise,
    }


def acceptance_metrics(found: Mapping[str, Any]) -> dict[str, float]:
    """Acceptance on held-out conversations as flat metrics."""
    depths = {
        f"acceptance_depth_{depth}": float(share)
        for depth, share in enumerate(found["acceptance"], 1)
    }
    return {
        **depths,
        "acceptance": sum(depths.values()) / len(depths),
        "accepted_length": float(found["accepted_length"]),
        "positions": float(found["positions"]),
    }
