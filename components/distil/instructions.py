"""Instructions that the target invents itself when it is given only the start of a user's turn (the
idea of Magpie, arXiv 2406.08464), from many different first words, which widens the mix to whatever
the target expects users to write. Its own answers to them become training text."""

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

FIRST_WORDS = """\
What; What is the; Who; Who was the; When did; When was; Where is; Where did; How many;
How do I; How does; Why; Which; Can you; Write a; Write a short story; Write an email;
Write a Python function; Write a blog post; Create a; Describe; Explain; Summarize:;
Summarize the following; Give me; List; Imagine you are; Pretend you are; You are a; Act as;
Solve; Compare; Suppose; Implement; Design; Extract; Given the following; Identify; A man; If;
In a; John has; The following; Please; I need; Is it; Do; Rewrite; Classify; Evaluate; Find;
Calculate"""
GERMAN = """\
Die; Der; Das; Ein; Eine; In der; Nach; Es ist; Wir; Am; Mit; Auch; Für; Bei; Er; Sie; Ich; Im;
Wenn; Aber; Seit; Vor; Zum; Doch; Als"""
OPENINGS = [
    *[""] * 6,
    *re.split(r";\s", FIRST_WORDS),
    *(f"Translate German to English: {words}" for words in re.split(r";\s", GERMAN)),
    *(f"Translate this from {name} to English:" for name in ("German", "French", "Spanish")),
]

INVENTED_TOKENS = 56
"""Tokens of an invented instruction after its opening, at most."""
UNTOUCHED = 24
"""Prompts that agreement is measured on, at most."""


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
    head = before_a_user(tokenizer) if chat and tokenizer.chat_template else ""
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


def before_a_user(tokenizer: Any) -> str:
    """What the chat template puts in front of a user's text."""
    mark = "\x00"
    turn = [{"role": "user", "content": mark}]
    whole: str = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
    return whole.partition(mark)[0]


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
