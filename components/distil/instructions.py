"""Instructions to distil on: what the target is asked, so that its own answers become training
text.

Sources, mixed and shuffled:

1. rows of prompt files, each task with a share;
2. passages of plain text under templates (summarise, answer from a passage, continue, translate),
   whole articles to summarise or to answer from, and short questions about names in them;
3. instructions that the target invents itself when it is given only the start of a user's turn (the
   idea of Magpie, arXiv 2406.08464), from many different first words, which widens the mix to
   whatever the target expects users to write.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from draftwell.components.distil.writers import Writer
from draftwell.components.prompts.prompt import Prompt, context_of
from draftwell.serving.errors import DraftwellError
from draftwell.serving.files import json_digest, write_atomically
from draftwell.serving.runtime.pair import LoadedPair

OPENINGS = (
    [
        "",
        "",
        "",
        "",
        "",
        "",
        "What",
        "What is the",
        "Who",
        "Who was the",
        "When did",
        "When was",
        "Where is",
        "Where did",
        "How many",
        "How do I",
        "How does",
        "Why",
        "Which",
        "Can you",
        "Write a",
        "Write a short story",
        "Write an email",
        "Write a Python function",
        "Write a blog post",
        "Create a",
        "Describe",
        "Explain",
        "Summarize:",
        "Summarize the following",
        "Give me",
        "List",
        "Imagine you are",
        "Pretend you are",
        "You are a",
        "Act as",
        "Solve",
        "Compare",
        "Suppose",
        "Implement",
        "Design",
        "Extract",
        "Given the following",
        "Identify",
        "A man",
        "If",
        "In a",
        "John has",
        "The following",
        "Please",
        "I need",
        "Is it",
        "Do",
        "Rewrite",
        "Classify",
        "Evaluate",
        "Find",
        "Calculate",
    ]
    + [
        f"Translate German to English: {w}"
        for w in (
            "Die",
            "Der",
            "Das",
            "Ein",
            "Eine",
            "In der",
            "Nach",
            "Es ist",
            "Wir",
            "Am",
            "Mit",
            "Auch",
            "Für",
            "Bei",
            "Er",
            "Sie",
            "Ich",
            "Im",
            "Wenn",
            "Aber",
            "Seit",
            "Vor",
            "Zum",
            "Doch",
            "Als",
        )
    ]
    + [f"Translate this from {w} to English:" for w in ("German", "French", "Spanish")]
)

INVENTED_TOKENS = 56
"""Tokens of an invented instruction after its opening, at most."""
UNTOUCHED = 24
"""Prompts that agreement is measured on, at most."""
PASSAGE = (
    "Summarize: {p}",
    "Summarize the following passage in two sentences.\n\n{p}",
    "TL;DR of this text:\n\n{p}",
    "{p}\n\nWrite a short summary of the article above.",
    "Answer the question using the context.\n\nContext: {p}\n\nQuestion: What is {t}?\nAnswer:",
    "Given the passage below, answer: when and where did this happen?\n\n{p}",
    "Passage: {p}\n\nBased on the passage, what are the main facts about {t}?",
    "Use the following documents to answer.\n\nDocument 1: {p}\n\nWho or what is {t}?",
    "What is {t}?",
    "Who is {t}?",
    "Tell me about {t}.",
    "Translate to German: {s}",
    "Translate German to English: {s}",
    "Translate this sentence to French: {s}",
    "Continue this text: {p}",
    "Extract all names and dates from this text:\n{p}",
    "Summarize the article:\n\n{p}\n\n{p2}",
    "Write a summary of this text.\n\n{p} {p2}",
    (
        "Answer the question from these passages.\n\nPassage 1: {p}\n\nPassage 2: "
        "{p2}\n\nPassage 3: {p3}\n\nQuestion: What is {t}?"
    ),
    "Documents:\n{p}\n\n{p2}\n\n{p3}\n\nUsing the documents, explain who or what {t} is.",
)

NAME = re.compile(r"\b[A-Z][a-z]+(?: [A-Z][a-z]+)*")
ARTICLE = (
    "Summarize: {d}",
    "Summarize the following article.\n\n{d}",
    "{d}\n\nSummarize the article above in three sentences.",
    "Write highlights for this article:\n\n{d}",
    "Answer the question using the documents.\n\n{d}\n\nQuestion: who is {t}?\nAnswer:",
    "{d}\n\nUsing the text above, answer: what is said about {t}?",
    "Here are some passages:\n\n{d}\n\nQuestion: when did {t} happen?",
    "Read the text and answer.\n\n{d}\n\nQuestion: where is {t}?\nAnswer:",
)
ARTICLE_CHARACTERS = (1800, 3600)
"""An article is cut somewhere between these lengths."""
QUESTION = (
    "who is {t}",
    "what is {t}",
    "where is {t} located",
    "when was {t} born",
    "who wrote {t}",
    "when did {t} end",
    "what does {t} mean",
    "who played {t}",
    "when did {t} start",
    "who was {t} named after",
    "what is the history of {t}",
    "how many people live in {t}",
    "what is {t} known for",
    "where does the name {t} come from",
    "who founded {t}",
    "what year was {t} released",
    "why is {t} famous",
    "how did {t} die",
    "where was {t} filmed",
    "who discovered {t}",
    "what happened to {t}",
    "how old is {t}",
    "who owns {t}",
    "when was {t} built",
    "is {t} a real place",
    "what language is spoken in {t}",
    "who won the {t}",
    "what team does {t} play for",
    "name three facts about {t}",
    "which country does {t} belong to",
)


def detokenise(text: str) -> str:
    """Undo WikiText's spacing around punctuation."""
    text = (
        text.replace(" @-@ ", "-")
        .replace(" @,@ ", ",")
        .replace(" @.@ ", ".")
        .replace("<unk>", "it")
    )
    text = re.sub(r" ([.,;:!?)\]'%])", r"\1", text)
    text = re.sub(r"([(\[]) ", r"\1", text)
    return re.sub(r'" ([^"]*) "', r'"\1"', text)


def from_passages(texts: list[str], count: int, rng: random.Random) -> list[str]:
    """`count` instructions over random paragraphs of `texts` under random templates."""
    paragraphs = [
        q
        for t in texts
        for q in (detokenise(x.strip()) for x in t.split("\n"))
        if 200 < len(q) < 2500
    ]
    made = []
    for _ in range(count):
        p = rng.choice(paragraphs)
        names = NAME.findall(p[20:])
        sentence = rng.choice([s for s in re.split(r"(?<=[.!?]) ", p) if len(s) > 20] or [p[:150]])
        topic = rng.choice(names) if names else "this"
        others = [rng.choice(paragraphs)[:700] for _ in range(2)]
        made.append(
            rng.choice(PASSAGE).format(
                p=p[: rng.choice([400, 700, 1000])],
                p2=others[0],
                p3=others[1],
                t=topic,
                s=sentence[:250],
            )
        )
    return made


def from_articles(texts: Sequence[str], count: int, rng: random.Random) -> list[str]:
    """`count` tasks over long stretches of `texts`, as long as news articles are."""
    made = []
    long = [text for text in map(detokenise, texts) if len(text) > 2 * ARTICLE_CHARACTERS[1]]
    for _ in range(count):
        text, length = rng.choice(long), rng.randint(*ARTICLE_CHARACTERS)
        start = text.find(". ", rng.randrange(len(text) - length)) + 2  # the start of a sentence
        part = text[start : start + length].strip()
        made.append(
            rng.choice(ARTICLE).format(d=part, t=rng.choice(NAME.findall(part) or ["this"]))
        )
    return made


def questions(texts: Sequence[str], count: int, rng: random.Random) -> list[str]:
    """`count` short questions about names in `texts`, half of them with a capital letter and a
    question mark."""
    names = sorted(
        {name for text in texts for name in NAME.findall(detokenise(text)) if len(name) > 3}
    )
    made = [rng.choice(QUESTION).format(t=rng.choice(names)) for _ in range(count)]
    return [text if rng.random() < 0.5 else text[0].upper() + text[1:] + "?" for text in made]


def from_rows(rows: dict[str, list[dict]], shares: dict[str, int], rng: random.Random) -> list[str]:
    """Prompts of files: `shares[name]` random rows of file `name`."""
    made = []
    for name, count in shares.items():
        for row in rng.sample(rows[name], min(count, len(rows[name]))):
            made.append(
                row.get("question")
                if name.startswith("commonsense") and rng.random() < 0.7
                else row["prompt"]
            )
    return [m for m in made if m]


def invent(
    writer: Writer, tokenizer: Any, count: int, *, chat: bool = True, seed: int = 3
) -> list[str]:
    """Instructions that the target writes itself after the start of a user's turn, sampled at
    temperature 0.9.

    A target without a chat template is given the bare start: it writes beginnings of texts.

    Args:
        count: how many are tried; those that come out shorter than nine characters, or twice, are
            left out.
    """
    starts = sorted((OPENINGS[i % len(OPENINGS)] for i in range(count)), key=len)
    head = user_turn(tokenizer, "")[0] if chat and tokenizer.chat_template else ""
    first = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    made = []
    for at in range(0, count, 256):
        batch = starts[at : at + 256]
        rows = [
            tokenizer(head + start, add_special_tokens=not head)["input_ids"] or [first]
            for start in batch
        ]
        for start, out in zip(
            batch, writer.sampled(rows, INVENTED_TOKENS, 0.9, seed + at), strict=True
        ):
            made.append((start + tokenizer.decode(out, skip_special_tokens=True)).strip())
    return [text for text in dict.fromkeys(made) if len(text) > 8]


def user_turn(tokenizer: Any, text: str) -> tuple[str, str]:
    """The chat template around a user's text: (everything up to and with it, everything after
    it)."""
    mark = "\x00"
    turn = [{"role": "user", "content": mark}]
    before, after = tokenizer.apply_chat_template(
        turn, add_generation_prompt=True, tokenize=False
    ).split(mark)
    return before + text, after


def kept_instructions(
    writer: Writer,
    pair: LoadedPair,
    count: int,
    donor: str,
    folder: Path,
    say: Callable[[str], None],
) -> list[Prompt]:
    """Instructions by the target itself, shuffled; a second call with the same inputs reads them
    from `folder`.

    Args:
        donor: sha256 of the target's weights.
    """
    path = (
        folder / f"instructions-{json_digest([donor, writer.identity, count, pair.chat])[:24]}.json"
    )
    if not path.is_file():
        say(f"the target invents {count} instructions")
        made = invent(writer, pair.tokenizer, count, chat=pair.chat)
        random.Random(7).shuffle(made)
        write_atomically(path, json.dumps(made).encode())
    return [
        Prompt(f"invented/{i}", None, [text]) for i, text in enumerate(json.loads(path.read_text()))
    ]


def split(prompts: Sequence[Prompt]) -> tuple[list[Prompt], list[Prompt]]:
    """Prompts to learn on, and about a tenth of them, evenly spread, that no training sees. Only
    first turns are asked.

    Raises:
        DraftwellError: fewer than three prompts.
    """
    if len(prompts) < 3:
        raise DraftwellError(
            f"{len(prompts)} prompts are too few to learn on two and measure on one: give more",
            code="too_few_prompts",
        )
    count = min(UNTOUCHED, max(1, len(prompts) // 10))
    chosen = {round(i * (len(prompts) - 1) / max(1, count - 1)) for i in range(count)}
    untouched = [prompts[i] for i in sorted(chosen)]
    # a prompt that is in a file twice is not learnt either
    asked = [context_of(p) for p in untouched]
    return [p for p in prompts if context_of(p) not in asked], untouched
