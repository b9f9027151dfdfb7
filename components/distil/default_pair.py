"""The recipe of the default pair's draft, qualifier and EAGLE-3 head, from prompt files to the
artifacts (CONTRIBUTING.md).

    python -m draftwell.components.distil.default_pair --target FOLDER --data FOLDER --work FOLDER
    --out FOLDER --minutes 60

makes OUT/draft, OUT/qualifier (the draft, grown; on the same corpus) and OUT/head (on a corpus with
the states of three layers, in WORK/corpus); those that are there already are kept.

`--data` holds `calib/` (instructions) and `lm/` (plain text) as JSONL; prompts of an evaluation set
do not belong there. Every step keeps its finished work: instructions, shards of the target's own
outputs, training checkpoints.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from draftwell.components.distil.corpus import read_corpus, write_corpus
from draftwell.components.distil.distil import Source, distil_draft
from draftwell.components.distil.eagle3.distil import train_on
from draftwell.components.distil.eagle3.network import default_features
from draftwell.components.distil.eagle3.recipe import HeadRecipe
from draftwell.components.distil.family import grow, keep_layers
from draftwell.components.distil.instructions import (
    from_articles,
    from_passages,
    from_rows,
    invent,
    questions,
)
from draftwell.components.distil.training import Recipe
from draftwell.components.distil.writers import LeanWriter, Writer
from draftwell.components.prompts.overlap import hashes_of
from draftwell.components.prompts.prompt import Prompt, numbered_lines
from draftwell.serving.artifacts.base import MANIFEST
from draftwell.serving.artifacts.distilled_draft import DistilledDraft
from draftwell.serving.artifacts.pair_files import PairFiles, fingerprint, weights_digest
from draftwell.serving.files import write_atomically
from draftwell.serving.runtime.pair import LoadedPair, LoadSettings, load_pair

SHARES = {
    "aqua_dev": 254,
    "chat_dpo_demo": 300,
    "cnn_dm_calib": 195,
    "commonsenseqa_train_2000": 900,
    "gpteacher_codegen": 1500,
    "gsm8k_train_2000": 2000,
    "mbpp_calib": 474,
    "self_instruct_seed": 175,
    "svamp": 500,
    "toolcall_glaive_demo": 150,
}
PASSAGES, ARTICLES, QUESTIONS, INVENTED = 6000, 450, 2200, 2560
LONG, LONGEST, KEPT = 240, 1280, 4
"""Of prompts with more than `LONG` tokens every `KEPT`th is asked, of those with more than
`LONGEST` none: they cost most of the time."""
GENTLE = 3e-4
"""Peak learning rate for layers that are a draft already."""
MIDDLE, MIDDLE_AT = (6, 12, 18, 24), 2
LAYERS = {"draft": (0, 1, 28, 29), "qualifier": (0, 1, *MIDDLE, 28, 29)}
HEAD, NAME = "head", "smollm2-135m"
DATA = (
    "the target's own greedy outputs on calibration prompts, passage templates and "
    "instructions it invented"
)


def instructions(writer: Writer, tokenizer: Any, data: Path, work: Path) -> list[str]:
    """All instructions, shuffled; kept in `work/instructions.json`."""
    path = work / "instructions.json"
    if not path.is_file():
        rng = random.Random(7)
        rows = {
            p.name.split(".")[0]: [json.loads(line) for _, line in numbered_lines(p)]
            for p in sorted((data / "calib").iterdir())
        }
        texts = [
            json.loads(line)["prompt"]
            for p in sorted((data / "lm").iterdir())
            if "continuation" not in p.name
            for _, line in numbered_lines(p)
        ]
        made = [
            *from_rows(rows, SHARES, rng),
            *from_passages(texts, PASSAGES, rng),
            *from_articles(texts, ARTICLES, rng),
            *questions(texts, QUESTIONS, rng),
            *invent(writer, tokenizer, INVENTED),
        ]
        rng.shuffle(made)
        write_atomically(path, json.dumps(made).encode())
    return list(json.loads(path.read_text()))


def asked(pair: LoadedPair, texts: Iterable[str]) -> dict[str, list[int]]:
    """The prompts that the target is given, with their ids: each once, and few of the long ones."""
    found, long = dict[str, list[int]](), 0
    for text in dict.fromkeys(texts):
        ids = pair.encode_prompt(text)
        if LONG < len(ids) <= LONGEST:
            long += 1
        if len(ids) <= LONG or (len(ids) <= LONGEST and long % KEPT == 0):
            found[text] = ids
    return found


def main(
    target: Annotated[Path, typer.Option(help="Folder of the target, float32 safetensors.")],
    data: Annotated[Path, typer.Option(help="Folder with calib/ and lm/.")],
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
        source = source_of(target, data, work)
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


def source_of(target: Path, data: Path, work: Path) -> Source:
    """The target with its writer and the prompts that it is asked."""
    loaded = load_pair(
        PairFiles(NAME, target),
        LoadSettings(dtype="float32", max_context=2 * LONGEST, keep_modules=True),
    )
    writer = LeanWriter(loaded.modules["target"], loaded.stop_tokens, torch.bfloat16)
    prompts = asked(loaded, instructions(writer, loaded.tokenizer, data, work))
    return Source(
        loaded,
        weights_digest(target),
        writer,
        list(prompts.values()),
        [],
        name=NAME,
        data=DATA,
        hashes=hashes_of(Prompt("", None, [text]) for text in prompts),
    )


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
    artifact, _ = distil_draft(source, recipe, work, new=new, folder=role, say=typer.echo)
    artifact.provenance.parameters["started_from"] = (
        "the target's layers"
        if draft is None
        else f"a draft trained on {draft.provenance.parameters.get('output_tokens')} output tokens"
    )
    artifact.save(out / role)


def make_head(source: Source, work: Path, out: Path, minutes: float, target: Path) -> None:
    """The head, bound to the pair of target, draft and qualifier."""
    module = source.target.modules["target"]
    layers = default_features(module.config.num_hidden_layers)
    recipe = HeadRecipe(layers=layers, minutes=minutes)
    writer = LeanWriter(module, source.target.stop_tokens, torch.bfloat16, features=layers)
    shards = write_corpus(
        writer, source.prompts, work / "corpus", donor=source.donor, say=typer.echo
    )
    head, _ = train_on(source, read_corpus(shards), recipe, work / HEAD, say=typer.echo)
    bound = PairFiles(NAME, target, draft=out / "draft", qualifier=out / "qualifier")
    head = head.bound_to(NAME, fingerprint(bound, "bfloat16"))
    head.int8 = True
    head.save(out / HEAD)


if __name__ == "__main__":
    typer.run(main)
