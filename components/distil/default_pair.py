"""The recipe of the default pair's draft, qualifier and EAGLE-3 head (CONTRIBUTING.md).

    python -m draftwell.components.distil.default_pair --target FOLDER --prompts FILE --work FOLDER
    --out FOLDER --minutes 60

makes OUT/draft, OUT/qualifier (the draft, grown) and OUT/head, all on one corpus with the states of
three layers, in WORK/corpus; those that are there already are kept. Every step keeps its finished
work: instructions, shards of the target's own outputs, training checkpoints.

The target is asked the prompts, and instructions that it invents. No prompt of an evaluation set
belongs there. Those of the shipped artifacts were GSM8K's training questions, rows of nine further
calibration sets, and templates over paragraphs of WikiText.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from draftwell.components.distil.distil import (
    Source,
    distil_draft,
    ids_that_fit,
    longest_prompt,
    target_alone,
)
from draftwell.components.distil.eagle3.distil import CORPUS, distil_head
from draftwell.components.distil.eagle3.network import default_features
from draftwell.components.distil.eagle3.training import HeadRecipe
from draftwell.components.distil.family import grow, keep_layers
from draftwell.components.distil.instructions import kept_instructions
from draftwell.components.distil.training import Recipe
from draftwell.components.distil.writers import Writer
from draftwell.components.prompts.overlap import different, hashes_of
from draftwell.components.prompts.sources import load_prompts
from draftwell.serving.artifacts.base import MANIFEST
from draftwell.serving.artifacts.distilled_draft import DistilledDraft
from draftwell.serving.artifacts.pair_files import PairFiles, fingerprint, weights_digest

INVENTED, NEW_TOKENS, AT_ONCE = 12288, 160, 64
GENTLE = 3e-4
"""Peak learning rate for layers that are a draft already."""
MIDDLE, MIDDLE_AT = (6, 12, 18, 24), 2
LAYERS = {"draft": (0, 1, 28, 29), "qualifier": (0, 1, *MIDDLE, 28, 29)}
HEAD, NAME = "head", "smollm2-135m"
DATA = "the target's own greedy outputs on calibration prompts and instructions it invented"


def main(
    target: Annotated[Path, typer.Option(help="Folder of the target, float32 safetensors.")],
    prompts: Annotated[str, typer.Option(help="What the target is asked, as `collect` takes it.")],
    work: Annotated[Path, typer.Option(help="Folder for shards and checkpoints.")],
    out: Annotated[Path, typer.Option(help="Folder of the three artifacts.")],
    minutes: Annotated[float, typer.Option(help="Training time of each artifact.")] = 60.0,
) -> None:
    """Make draft, qualifier and head of a Llama-shaped target."""
    work.mkdir(parents=True, exist_ok=True)
    missing = []
    for stage in (*LAYERS, HEAD):
        if (out / stage / MANIFEST).is_file():
            typer.echo(f"{stage}: in {out / stage} already")
        else:
            missing.append(stage)
    if missing:
        source = source_of(target, prompts, work)
    for stage in missing:
        typer.echo(
            f"{stage}: {minutes:g} minutes of training, after the target has written what "
            "is missing of the text"
        )
        if stage == HEAD:
            make_head(source, work, out, minutes, target)
        else:
            make_draft(stage, source, work, out, minutes)
    typer.echo(
        f"{out} holds {', '.join(LAYERS)} and {HEAD}; what follows is in CONTRIBUTING.md, "
        f"and {work} is not needed any more"
    )


def source_of(target: Path, prompts: str, work: Path) -> Source:
    """The target with its writer and the prompts that it is asked."""
    pair = target_alone(NAME, target, NEW_TOKENS, dtype="float32")
    layers = default_features(pair.modules["target"].config.num_hidden_layers)
    writing = target_alone(NAME, target, NEW_TOKENS, dtype="bfloat16", slots=AT_ONCE)
    donor, writer = weights_digest(target), Writer(writing, AT_ONCE, features=layers)
    invented = kept_instructions(writer, pair, INVENTED, donor, work, typer.echo)
    asked = different([*load_prompts(prompts), *invented])
    rows = ids_that_fit(pair, asked, longest_prompt(pair, NEW_TOKENS), typer.echo)
    return Source(pair, donor, writer, rows, [], NEW_TOKENS, data=DATA, hashes=hashes_of(asked))


def make_draft(role: str, source: Source, work: Path, out: Path, minutes: float) -> None:
    """The draft, of a few of the target's layers, or the qualifier, grown out of the draft."""
    draft = DistilledDraft.load(out / "draft") if role == "qualifier" else None

    def new(module: Any) -> Any:
        shallow = keep_layers(module, LAYERS["draft"])
        if draft is None:
            return shallow
        shallow.load_state_dict(draft.state, strict=False)  # embeddings stay the target's
        return grow(shallow, module, MIDDLE, MIDDLE_AT)

    recipe = Recipe(layers=LAYERS[role], minutes=minutes)
    if draft is not None:
        recipe = replace(recipe, peak_rate=GENTLE)
    artifact, _ = distil_draft(source, recipe, work / CORPUS, new=new, say=typer.echo)
    artifact.provenance.parameters["started_from"] = (
        "the target's layers"
        if draft is None
        else f"a draft trained on {draft.provenance.parameters.get('output_tokens')} output tokens"
    )
    artifact.save(out / role)


def make_head(source: Source, work: Path, out: Path, minutes: float, target: Path) -> None:
    """The head, bound to the pair of target, draft and qualifier."""
    recipe = HeadRecipe(layers=source.writer.features, minutes=minutes)
    head, _ = distil_head(source, recipe, work, say=typer.echo)
    bound = PairFiles(NAME, target, draft=out / "draft", qualifier=out / "qualifier")
    head = head.bound_to(NAME, fingerprint(bound, "bfloat16"))
    head.int8 = True
    head.save(out / HEAD)


if __name__ == "__main__":
    typer.run(main)
