"""The recipe of the default pair's draft, qualifier and EAGLE-3 head, from prompt files to the
artifacts (CONTRIBUTING.md).

    python -m draftwell.components.distil.default_pair --role all --target FOLDER --data FOLDER
    --work FOLDER --out FOLDER --minutes 60

makes OUT/draft, OUT/qualifier (the draft, grown; on the same corpus) and OUT/head (on a corpus with
the states of three layers, in WORK/corpus); those that are there already are kept. One alone, with
further options:

    python -m draftwell.components.distil.default_pair --role draft --target FOLDER --data FOLDER
    --work FOLDER --out ARTIFACT python -m draftwell.components.distil.default_pair --role qualifier
    --start DRAFT
    ... python -m draftwell.components.distil.default_pair --role head ...

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

from draftwell.components.collect.continuations import message_of, template_around
from draftwell.components.distil.corpus import Conversation, write_corpus
from draftwell.components.distil.distil import Source, distil_draft
from draftwell.components.distil.eagle3.distil import pinned_shards, train_on
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
from draftwell.components.distil.stored_corpus import read_stored
from draftwell.components.distil.training import Recipe
from draftwell.components.distil.writers import LeanWriter, Writer
from draftwell.components.prompts.overlap import hashes_of
from draftwell.components.prompts.prompt import Prompt
from draftwell.serving.artifacts.base import MANIFEST
from draftwell.serving.artifacts.distilled_draft import DistilledDraft
from draftwell.serving.artifacts.eagle3_head import Eagle3Head
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
HEAD, ALL = "head", "all"
UNREAD = "conversations of an earlier corpus"
DATA = (
    "the target's own greedy outputs on calibration prompts, passage templates and "
    "instructions it invented"
)


def instructions(writer: Writer, tokenizer: Any, data: Path, work: Path) -> list[str]:
    """All instructions, shuffled; kept in `work/instructions.json`."""
    path = work / "instructions.json"
    if not path.is_file():
        from draftwell.components.prompts.prompt import numbered_lines

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
    out: Annotated[Path, typer.Option(help="Folder of the artifact; of three with --role all.")],
    role: Annotated[
        str,
        typer.Option(
            help="draft or qualifier, which differ in the layers that are kept, head, or all."
        ),
    ] = "draft",
    start: Annotated[
        Path | None,
        typer.Option(help="A draft to continue from; a qualifier needs one to grow out of."),
    ] = None,
    minutes: Annotated[float, typer.Option(help="Training time of each artifact.")] = 60.0,
    pair: Annotated[
        Path | None,
        typer.Option(help="Folder with draft and qualifier of the pair that a head is for."),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(help="Generate for this many prompts at most.")
    ] = None,
    extra: Annotated[Path | None, typer.Option(help="JSONL file with further prompts.")] = None,
    shards: Annotated[
        Path | None,
        typer.Option(
            help="Folder of a head's corpus that was written earlier: what it holds at the "
            "first start is learned too, and its prompts are not asked again."
        ),
    ] = None,
) -> None:
    """Make a draft, a qualifier or a head for a Llama-shaped target."""
    if role not in {*LAYERS, HEAD, ALL}:
        raise typer.BadParameter(f"--role is {', '.join(LAYERS)}, {HEAD} or {ALL}, not {role}")
    if role == ALL and (start is not None or pair is not None):
        raise typer.BadParameter(
            f"--start and --pair go with one role: with --role {ALL} they are what it makes"
        )
    if role != HEAD and shards is not None:
        raise typer.BadParameter(f"--shards goes with --role {HEAD}")
    if role == "qualifier" and start is None:
        raise typer.BadParameter("a qualifier grows out of a trained draft: name it with --start")
    if role != ALL:
        make(
            role,
            target,
            data,
            work,
            out,
            start=start,
            minutes=minutes,
            pair=pair,
            limit=limit,
            extra=extra,
            shards=shards,
        )
        return
    for stage in (*LAYERS, HEAD):
        if (out / stage / MANIFEST).is_file():
            typer.echo(f"{stage}: in {out / stage} already")
            continue
        typer.echo(
            f"{stage}: {minutes:g} minutes of training, after the target has written what "
            "is missing of the text"
        )
        make(
            stage,
            target,
            data,
            work,
            out / stage,
            start=out / "draft" if stage == "qualifier" else None,
            minutes=minutes,
            pair=out if stage == HEAD else None,
            limit=limit,
            extra=extra,
        )
    typer.echo(
        f"{out} holds {', '.join(LAYERS)} and {HEAD}; what follows is in CONTRIBUTING.md, "
        f"and {work} is not needed any more"
    )


def make(
    role: str,
    target: Path,
    data: Path,
    work: Path,
    out: Path,
    *,
    start: Path | None = None,
    minutes: float = 60.0,
    pair: Path | None = None,
    limit: int | None = None,
    extra: Path | None = None,
    shards: Path | None = None,
) -> None:
    """Make one artifact; arguments as for `main`."""
    work.mkdir(parents=True, exist_ok=True)
    files = PairFiles("smollm2-135m", target)
    loaded = load_pair(
        files, LoadSettings(dtype="float32", max_context=2 * LONGEST, keep_modules=True)
    )
    writer = LeanWriter(loaded.modules["target"], loaded.stop_tokens, torch.bfloat16)
    texts = [*prompts_of(extra), *instructions(writer, loaded.tokenizer, data, work)]
    prompts = asked(loaded, texts)
    source = Source(
        loaded,
        weights_digest(target),
        writer,
        list(prompts.values())[:limit],
        [],
        name=files.name,
        data=DATA,
        hashes=hashes_of(Prompt("", None, [text]) for text in list(prompts)[:limit]),
    )
    if role == HEAD:
        head = make_head(source, texts, work, minutes, shards)
        if pair is not None:
            bound = replace(files, draft=pair / "draft", qualifier=pair / "qualifier")
            head = head.bound_to(files.name, fingerprint(bound, "bfloat16"))
        head.int8 = True
        head.save(out)
        return

    def new(module: Any) -> Any:
        draft = keep_layers(module, LAYERS["draft"])
        if start is not None:
            # embeddings stay the target's
            draft.load_state_dict(DistilledDraft.load(start).state, strict=False)
        return draft if role == "draft" else grow(draft, module, MIDDLE, MIDDLE_AT)

    recipe = (
        Recipe(LAYERS[role], minutes=minutes)
        if start is None
        else Recipe(LAYERS[role], minutes=minutes, peak_rate=GENTLE)
    )
    artifact, _ = distil_draft(source, recipe, work, new=new, folder=role, say=typer.echo)
    artifact.provenance.parameters["started_from"] = (
        "the target's layers"
        if start is None
        else f"a draft trained on {trained_on(start)} output tokens"
    )
    artifact.save(out)


def make_head(
    source: Source, texts: Iterable[str], work: Path, minutes: float, earlier: Path | None
) -> Eagle3Head:
    """A head, on what the target wrote `earlier` and writes now; `texts` are all prompts that it
    may have been given."""
    module = source.target.modules["target"]
    recipe = HeadRecipe(default_features(module.config.num_hidden_layers), minutes=minutes)
    known = read_stored(pinned_shards(earlier, work)) if earlier else []
    answered = {tuple(conversation.ids[: conversation.prompt].tolist()) for conversation in known}
    writer = LeanWriter(module, source.target.stop_tokens, torch.bfloat16, features=recipe.layers)
    shards = write_corpus(
        writer,
        [ids for ids in source.prompts if tuple(ids) not in answered],
        work / "corpus",
        donor=source.donor,
        say=typer.echo,
    )
    corpus = known + read_stored(shards)
    hashes, unknown = prompts_behind(source.target, corpus, texts)
    return train_on(
        replace(source, hashes=hashes, unknown=unknown), corpus, recipe, work / HEAD, say=typer.echo
    )[0]


def prompts_behind(
    pair: LoadedPair, corpus: Iterable[Conversation], texts: Iterable[str]
) -> tuple[list[str], tuple[str, ...]]:
    """Hashes of the prompts of a corpus, and what of it has others: those of shards that were
    written earlier need not be among `texts`.

    The tokens of a prompt that is not are hashed, and the text that they decode to where it is one
    message.
    """
    learned = dict.fromkeys(
        tuple(conversation.ids[: conversation.prompt].tolist()) for conversation in corpus
    )
    asked = {text: ids for text in texts if (ids := tuple(pair.encode_prompt(text))) in learned}
    others, around = list(learned.keys() - set(asked.values())), template_around(pair)
    read = [text for ids in others if (text := message_of(pair, ids, around)) is not None]
    prompts = [
        *(Prompt("", None, [text]) for text in (*asked, *read)),
        *(Prompt("", None, [""], tokens=(ids,)) for ids in others),
    ]
    return hashes_of(prompts), () if len(read) == len(others) else (UNREAD,)


def prompts_of(extra: Path | None) -> list[str]:
    """The field `prompt` of each line of a JSONL file."""
    from draftwell.components.prompts.prompt import numbered_lines

    return (
        [] if extra is None else [json.loads(line)["prompt"] for _, line in numbered_lines(extra)]
    )


def trained_on(artifact: Path) -> Any:
    """Output tokens that an earlier draft was trained on."""
    return DistilledDraft.load(artifact).provenance.parameters.get("output_tokens")


if __name__ == "__main__":
    typer.run(main)
