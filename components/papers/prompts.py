"""The prompts of a cell: a paper's own data set where the user has it, else prompts of the same
kind that the project ships."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from draftwell.components.prompts.overlap import TrainingPrompts, hash_of
from draftwell.components.prompts.prompt import Prompt, demo_prompts, prompts_digest, read_prompts
from draftwell.serving.errors import DraftwellError

LONGEST = 1200
"""Characters of a prompt at most, unless its set says otherwise: the first so many that fit are
taken, whatever the pair's tokenizer."""
SHIPPED = "shipped prompts"
"""How the source of prompts begins that stand in for a data set."""


@dataclass(frozen=True)
class PromptSet:
    """Where prompts come from.

    Args:
        title: the data set, as the page names it.
        file: its file in the user's folder of data sets.
        task: of the shipped prompts that stand in where there is no such file.
        kind: task of the file's rows that are taken; empty takes all.
        longest: characters of a prompt at most.
        last: take only so many of the shipped prompts, from the end: the set trains verifiers, and
            others of their kind are left to be decoded. 0 takes all.
    """

    title: str
    file: str
    task: str
    kind: str = ""
    longest: int = LONGEST
    last: int = 0


SETS = {
    "code": PromptSet("HumanEval", "humaneval.jsonl", "code"),
    "maths": PromptSet("GSM8K (test)", "gsm8k_test.jsonl.gz", "maths"),
    "chat": PromptSet("MT-bench", "mt_bench.jsonl", "chat"),
    "continuation": PromptSet(
        "WikiText-2 continuations", "wikitext2_test_continuation.jsonl", "writing"
    ),
    "choice": PromptSet("CommonsenseQA (dev)", "commonsenseqa_dev.jsonl", "question_answering"),
    "summaries": PromptSet(
        "CNN/DailyMail (of Spec-Bench)",
        "spec_bench.jsonl.gz",
        "summarisation",
        "summarization",
        2400,
    ),
    "continuation-train": PromptSet(
        "WikiText-2 (training texts)", "wikitext2_train_continuation.jsonl.gz", "writing", last=6
    ),
    "code-train": PromptSet("MBPP", "mbpp_calib.jsonl", "code", last=6),
    "maths-train": PromptSet("GSM8K (train)", "gsm8k_train_2000.jsonl.gz", "maths", last=6),
}


@dataclass(frozen=True)
class Chosen:
    """Prompts with their source in words."""

    prompts: list[Prompt]
    source: str

    @property
    def digest(self) -> str:
        """Of the prompts."""
        return prompts_digest(self.prompts)


NO_TRAINING = TrainingPrompts()


def choose(
    name: str,
    count: int,
    data: Path | None,
    used: TrainingPrompts = NO_TRAINING,
    without: Collection[str] = (),
) -> Chosen:
    """The first `count` prompts of a set that are short enough, and that no artifact was made from.

    Args:
        used: what the artifacts that are measured with were made from.
        data: folder in which the sets' files are looked for, at any depth; None takes the shipped
            prompts.
        without: hashes of prompts that are left out: those that a verifier is trained on for the
            cell.
    Raises:
        DraftwellError: none is short enough, or none is left.
    """
    wanted = SETS[name]
    found = None if data is None else next(iter(sorted(data.rglob(wanted.file))), None)
    if found is None:
        rows = [prompt for prompt in demo_prompts() if prompt.task == wanted.task][-wanted.last :]
        source = f"{SHIPPED} of the kind `{wanted.task}`"
    else:
        rows, source = (
            [row for row in read_prompts(found) if wanted.kind in ("", row.task)],
            wanted.title,
        )
    short = [
        prompt
        for prompt in rows
        if len(prompt.prompt) <= wanted.longest and hash_of(prompt) not in without
    ]
    if not short:
        raise DraftwellError(
            f"{found or source}: there is no prompt of at most {wanted.longest} characters that no "
            "verifier is trained on for the cell: leave --data out to take the shipped ones",
            code="no_short_prompts",
        )
    if not used.split(short)[0]:
        raise DraftwellError(
            f"all {len(short)} prompts of {wanted.title} were used to make "
            f"{used.users_of(short)}: name a folder with the papers' data sets with --data",
            code="no_untouched_prompts",
        )
    left, lines = used.untouched(short, count)
    return Chosen(left, "; ".join([f"{source}, {len(left)} prompts", *lines]))
