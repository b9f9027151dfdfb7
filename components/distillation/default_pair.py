"""The recipe of the default pair's draft and qualifier, from prompt files to the artifact.

    python -m components.distillation.default_pair --target FOLDER --data FOLDER --work FOLDER --out FOLDER --minutes 60
    python -m components.distillation.default_pair --role qualifier --start DRAFT ... (the same corpus; the draft, grown)

`--data` holds `calib/` (instructions) and `lm/` (plain text) as JSONL; prompts of an evaluation set have no place there.
Every step keeps what is finished: instructions, shards of the target's own outputs, training checkpoints.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from components.distillation.corpus import corpus_digest, generate_corpus, read_corpus
from components.distillation.export import load_checkpoint, to_artifact
from components.distillation.instructions import OPENINGS, from_passages, from_rows
from components.distillation.lean import LeanLlama, generate_batch
from components.distillation.training import Recipe, grow, head_of, new_draft, train
from components.provenance import git_commit, library_versions
from serving.runtime.artifacts.base import Provenance, write_atomically
from serving.runtime.artifacts.distilled_draft import DistilledDraft
from serving.runtime.pair_files import weights_digest

SHARES = {"aqua_dev": 254, "chat_dpo_demo": 300, "cnn_dm_calib": 195, "commonsenseqa_train_2000": 900, "gpteacher_codegen": 1500,
          "gsm8k_train_2000": 2000, "mbpp_calib": 474, "self_instruct_seed": 175, "svamp": 500, "toolcall_glaive_demo": 150}
PASSAGES, INVENTED, LONGEST_PROMPT, NEW_TOKENS = 6000, 5120, 640, 128
GENTLE = 3e-4
"""Peak learning rate for layers that are a draft already."""
MIDDLE, MIDDLE_AT = (6, 12, 18, 24), 2
LAYERS = {"draft": (0, 1, 28, 29), "qualifier": (0, 1, *MIDDLE, 28, 29)}


def invented(model: LeanLlama, tokenizer: Any, count: int, eos: int, seed: int = 3) -> list[str]:
    """Instructions that the target writes itself behind the start of a user's turn, sampled at temperature .9."""
    generator = torch.Generator().manual_seed(seed)
    starts = sorted((OPENINGS[i % len(OPENINGS)] for i in range(count)), key=len)
    head = user_turn(tokenizer, "")[0]
    made = []
    for at in range(0, count, 256):
        rows = starts[at : at + 256]
        ids = [tokenizer(head + s, add_special_tokens=False)["input_ids"] for s in rows]
        for start, (out, _) in zip(rows, generate_batch(model, ids, 56, eos, 0.9, generator), strict=True):
            made.append((start + tokenizer.decode(out, skip_special_tokens=True)).strip())
    return [text for text in made if len(text) > 8]


def user_turn(tokenizer: Any, text: str) -> tuple[str, str]:
    """The chat template around a user's text: (everything up to and with it, everything behind it)."""
    mark = "\x00"
    turn = [{"role": "user", "content": mark}]
    before, after = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False).split(mark)
    return before + text, after


def instructions(model: LeanLlama, tokenizer: Any, data: Path, work: Path, eos: int) -> list[str]:
    """All instructions, shuffled; kept in `work/instructions.json`."""
    path = work / "instructions.json"
    if not path.is_file():
        from components.prompts import numbered_lines

        rng = random.Random(7)
        rows = {p.name.split(".")[0]: [json.loads(line) for _, line in numbered_lines(p)] for p in sorted((data / "calib").iterdir())}
        texts = [json.loads(line)["prompt"] for p in sorted((data / "lm").iterdir()) if "continuation" not in p.name
                 for _, line in numbered_lines(p)]
        made = from_rows(rows, SHARES, rng) + from_passages(texts, PASSAGES, rng) + invented(model, tokenizer, INVENTED, eos)
        rng.shuffle(made)
        write_atomically(path, json.dumps(made).encode())
    return list(json.loads(path.read_text()))


def main(target: Annotated[Path, typer.Option(help="Folder of the target, float32 safetensors.")],
         data: Annotated[Path, typer.Option(help="Folder with calib/ and lm/.")],
         work: Annotated[Path, typer.Option(help="Folder for shards and checkpoints.")],
         out: Annotated[Path, typer.Option(help="Folder of the artifact.")],
         role: Annotated[str, typer.Option(help="draft or qualifier: how many layers are kept.")] = "draft",
         start: Annotated[Path | None, typer.Option(help="A draft to go on from; a qualifier needs one to grow out of.")] = None,
         minutes: Annotated[float, typer.Option(help="Training time.")] = 60.0,
         limit: Annotated[int | None, typer.Option(help="Generate for this many prompts at most.")] = None) -> None:
    """Make a draft or a qualifier for a Llama-shaped target."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if role not in LAYERS:
        raise typer.BadParameter(f"--role is {' or '.join(LAYERS)}, not {role}")
    if role == "qualifier" and start is None:
        raise typer.BadParameter("a qualifier grows out of a trained draft: name it with --start")
    say: Callable[[str], None] = typer.echo
    work.mkdir(parents=True, exist_ok=True)
    tokenizer: Any = AutoTokenizer.from_pretrained(target)
    module: Any = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    eos = tokenizer.eos_token_id
    lean = LeanLlama(module.state_dict(), module.config)
    asked = ["".join(user_turn(tokenizer, text)) for text in instructions(lean, tokenizer, data, work, eos)][:limit]
    ids = [row for row in (tokenizer(text, add_special_tokens=False)["input_ids"] for text in asked) if len(row) <= LONGEST_PROMPT]
    generate_corpus(lean, ids, work, new_tokens=NEW_TOKENS, eos=eos, log=say)
    recipe = Recipe(layers=LAYERS[role], minutes=minutes) if start is None else Recipe(LAYERS[role], minutes=minutes, peak_rate=GENTLE)
    draft = new_draft(module, LAYERS["draft"])
    if start is not None:
        draft.load_state_dict(DistilledDraft.load(start).state, strict=False)  # embeddings stay the target's
    if role == "qualifier":
        draft = grow(draft, module, MIDDLE, MIDDLE_AT)
    embeddings = module.get_input_embeddings().weight.detach()
    train(draft, lambda: read_corpus(work), embeddings, recipe, work / role, log=say)
    export(draft, module, target, work, role, recipe, out, start)


def export(draft: Any, module: Any, target: Path, work: Path, role: str, recipe: Recipe, out: Path, start: Path | None) -> None:
    """Write the checkpoint of `work/<role>` as an artifact with its provenance."""
    progress = load_checkpoint(draft, work / role)
    corpus, donor = read_corpus(work), weights_digest(target)
    head, _ = head_of(corpus, module.get_input_embeddings().weight.detach(), recipe.head_tokens)
    made_of = Provenance(
        pair="smollm2-135m", fingerprint=donor, trace_digest=corpus_digest(corpus), git_commit=git_commit(),
        library_versions=library_versions(),
        parameters={
            "layers": ",".join(map(str, recipe.layers)), "head_tokens": len(head), "steps": int(progress["steps"]),
            "tokens_processed": int(progress["tokens"]), "minutes": round(progress["minutes"], 1), "conversations": len(corpus),
            "output_tokens": sum(len(c.ids) - c.prompt for c in corpus),
            "started_from": "the target's layers" if start is None else f"a draft trained on {trained_on(start)} output tokens",
            "data": "the target's own greedy outputs on calibration prompts, passage templates and instructions it invented"})
    to_artifact(draft, head, donor, made_of).save(out)


def trained_on(artifact: Path) -> Any:
    """Output tokens that an earlier draft was trained on."""
    return DistilledDraft.load(artifact).provenance.parameters.get("output_tokens")


if __name__ == "__main__":
    typer.run(main)
