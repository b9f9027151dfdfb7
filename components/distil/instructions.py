"""Instructions to distil on: what the target is asked, so that its own answers become training text.

Three sources, mixed and shuffled:

1. rows of prompt files, each task with a share;
2. passages of plain text under templates (summarise, answer from a passage, continue, translate);
3. instructions that the target invents itself when it is given only the start of a user's turn (the idea of Magpie,
   arXiv 2406.08464), from many different first words, which widens the mix to whatever the target expects users to say.
"""

from __future__ import annotations

import random
import re
from typing import Any

from components.distil.writers import Writer

OPENINGS = (
    ["", "", "", "", "", "", "What", "What is the", "Who", "Who was the", "When did", "When was", "Where is", "Where did",
     "How many", "How do I", "How does", "Why", "Which", "Can you", "Write a", "Write a short story", "Write an email",
     "Write a Python function", "Write a blog post", "Create a", "Describe", "Explain", "Summarize:", "Summarize the following",
     "Give me", "List", "Imagine you are", "Pretend you are", "You are a", "Act as", "Solve", "Compare", "Suppose",
     "Implement", "Design", "Extract", "Given the following", "Identify", "A man", "If", "In a", "John has",
     "The following", "Please", "I need", "Is it", "Do", "Rewrite", "Classify", "Evaluate", "Find", "Calculate"]
    + [f"Translate German to English: {w}" for w in (
        "Die", "Der", "Das", "Ein", "Eine", "In der", "Nach", "Es ist", "Wir", "Am", "Mit", "Auch", "Für", "Bei",
        "Er", "Sie", "Ich", "Im", "Wenn", "Aber", "Seit", "Vor", "Zum", "Doch", "Als")]
    + [f"Translate this from {w} to English:" for w in ("German", "French", "Spanish")]
)

INVENTED_TOKENS = 56
"""Length of an invented instruction behind its opening, at most."""
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
    "Answer the question from these passages.\n\nPassage 1: {p}\n\nPassage 2: {p2}\n\nPassage 3: {p3}\n\nQuestion: What is {t}?",
    "Documents:\n{p}\n\n{p2}\n\n{p3}\n\nUsing the documents, explain who or what {t} is.",
)


def detokenise(text: str) -> str:
    """Undo WikiText's spacing around punctuation."""
    text = text.replace(" @-@ ", "-").replace(" @,@ ", ",").replace(" @.@ ", ".").replace("<unk>", "it")
    text = re.sub(r" ([.,;:!?)\]'%])", r"\1", text)
    text = re.sub(r"([(\[]) ", r"\1", text)
    return re.sub(r'" ([^"]*) "', r'"\1"', text)


def from_passages(texts: list[str], count: int, rng: random.Random) -> list[str]:
    """`count` instructions over random paragraphs of `texts` under random templates."""
    paragraphs = [q for t in texts for q in (detokenise(x.strip()) for x in t.split("\n")) if 200 < len(q) < 2500]
    made = []
    for _ in range(count):
        p = rng.choice(paragraphs)
        words = re.findall(r"\b[A-Z][a-z]+(?: [A-Z][a-z]+)*", p[20:])
        sentence = rng.choice([s for s in re.split(r"(?<=[.!?]) ", p) if len(s) > 20] or [p[:150]])
        topic = rng.choice(words) if words else "this"
        others = [rng.choice(paragraphs)[:700] for _ in range(2)]
        made.append(rng.choice(PASSAGE).format(p=p[: rng.choice([400, 700, 1000])], p2=others[0], p3=others[1], t=topic, s=sentence[:250]))
    return made


def from_rows(rows: dict[str, list[dict]], shares: dict[str, int], rng: random.Random) -> list[str]:
    """Prompts of files: `shares[name]` random rows of file `name`."""
    made = []
    for name, count in shares.items():
        for row in rng.sample(rows[name], min(count, len(rows[name]))):
            made.append(row.get("question") if name.startswith("commonsense") and rng.random() < 0.7 else row["prompt"])
    return [m for m in made if m]


def invent(writer: Writer, tokenizer: Any, count: int, *, chat: bool = True, seed: int = 3) -> list[str]:
    """Instructions that the target writes itself behind the start of a user's turn, sampled at temperature .9.

    A target without a chat template is given the bare start: it writes beginnings of texts.

    Args:
        count: how many are tried; those that come out shorter than nine characters, or twice, are left out.
    """
    starts = sorted((OPENINGS[i % len(OPENINGS)] for i in range(count)), key=len)
    head = user_turn(tokenizer, "")[0] if chat and tokenizer.chat_template else ""
    first = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    made = []
    for at in range(0, count, 256):
        batch = starts[at : at + 256]
        rows = [tokenizer(head + start, add_special_tokens=not head)["input_ids"] or [first] for start in batch]
        for start, out in zip(batch, writer.sampled(rows, INVENTED_TOKENS, 0.9, seed + at), strict=True):
            made.append((start + tokenizer.decode(out, skip_special_tokens=True)).strip())
    return [text for text in dict.fromkeys(made) if len(text) > 8]


def user_turn(tokenizer: Any, text: str) -> tuple[str, str]:
    """The chat template around a user's text: (everything up to and with it, everything behind it)."""
    mark = "\x00"
    turn = [{"role": "user", "content": mark}]
    before, after = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False).split(mark)
    return before + text, after
