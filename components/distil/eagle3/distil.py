"""From a target and prompts to an EAGLE-3 head: corpus with states, start, training, artifact.

Every step keeps what is finished in a work folder, as `draftwell.components.distil.distil` does: a
second call resumes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from draftwell.components.distil.distil import Source, provenance_of, texts_of, written
from draftwell.components.distil.eagle3.network import Eagle3Network, head_config
from draftwell.components.distil.eagle3.start import check_startable, start_from_target
from draftwell.components.distil.eagle3.training import HeadRecipe, train_head
from draftwell.components.distil.training import head_of
from draftwell.components.train.fit import Say
from draftwell.serving.artifacts.eagle3_head import Eagle3Head

CORPUS = "corpus"
"""Folder of the shards, in the work folder."""


def distil_head(
    source: Source, recipe: HeadRecipe, work: Path, *, say: Say = print
) -> tuple[Eagle3Head, dict[str, Any]]:
    """Train a head.

    Args:
        source: its writer gives the states of `recipe.layers`; no prompts are set aside, 2 % of the
            conversations are.
        work: gets the folder `corpus`, for shards, and the checkpoint of this very training.
    Returns:
        the artifact, and what `train_head` returns with `corpus`.
    Raises:
        DraftwellError: no prompts, or a target that a head cannot start from
            (`start.check_startable`).
    """
    module = source.target.modules["target"]
    check_startable(module)  # refused before hours are spent on the corpus
    corpus = texts_of(source, work / CORPUS, say)
    head = head_of(corpus, module, recipe.head_tokens, source.target.models["target"].vocab_size)
    embeddings = module.get_input_embeddings().weight.detach()
    config = head_config(module.config, len(head.ids), recipe.layers)
    network = Eagle3Network(config, embeddings)
    start_from_target(network, module, corpus, recipe.seed)
    found = train_head(network, corpus, head, recipe, work, donor=source.donor, say=say)
    made_of = provenance_of(
        source,
        {
            "layers": ",".join(map(str, recipe.layers)),
            "head_tokens": len(head.ids),
            "unrolled_steps": recipe.steps,
            "seed": recipe.seed,
            "batch_tokens": recipe.batch_tokens,
            "peak_rate": recipe.peak_rate,
            "noise": recipe.noise,
        },
        corpus,
        found,
        found["metrics"],
    )
    state = {name: tensor.detach() for name, tensor in network.state_dict().items()}
    artifact = Eagle3Head(state, network.config, head.ids, recipe.layers, source.donor, made_of)
    return artifact, {**found, "corpus": written(corpus)}
