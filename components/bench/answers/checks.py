"""Whether an answer is right, where a prompt carries a way to check it: a number, a letter, or
tests that the code must pass.

The fields are those of the data sets: `answer` (GSM8K, SVAMP), `answer_key` and `choices`
(CommonsenseQA), `entry_point` and `test` (HumanEval), `test_list` and `test_setup_code` (MBPP).
Models wrap answers in text, so each checker looks for the answer first.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from string import ascii_uppercase
from typing import Any

from draftwell.components.bench.answers.sandbox import run_python
from draftwell.components.prompts.answer_fields import KEYS
from draftwell.components.prompts.prompt import Prompt

Checker = Callable[[Prompt, str], bool]
"""Whether an answer to a prompt is right. Those that run code raise SandboxUnavailable where it
cannot be held."""

SECONDS = 20.0
"""A program may take this long: the slowest of the references takes four seconds, on an idle
core."""

NUMBER = re.compile(
    r"(?<![\w.])[-−]?(?:[$€£]\s?)?[-−]?(?P<value>(?:\d{1,3}(?:,\d{3})+(?!\d)|\d{1,40})(?:\.\d{1,40})?|\.\d{1,40})"
    r"(?:\s?/\s?(?P<below>[1-9]\d{0,20})(?!\d|[./]\d))?"
)
SOLUTION = re.compile(r"####\s*(?=[-−$€£\s]*\.?\d)")  # GSM8K's mark; "#### Step 2" is a heading
ANSWER = re.compile(r"answer(?:\s+(?:is|was)\b\s*:?|\s*[:=])", re.IGNORECASE)
MARKS = re.compile(r"""[*`"“”]|\$|\\boxed\{|(?<!\w)_+|_+(?!\w)""")  # "new_york" keeps its own
FENCED = re.compile(r"^```[^\n]*\n(.*?)(?:^```|\Z)", re.DOTALL | re.MULTILINE)
CODE = re.compile(
    r"""(?:def|class|import|from|if|for|while|try|except|finally|else|elif|with|return|raise|assert|del|print|async)\b"""
    # a decorator, a comment, what closes brackets, a string; a call
    r"""|[@#)\]}'"]|[A-Za-z_][\w.]*\("""
    r"""|[A-Za-z_][\w.]*(?:\[[^\]]*\])?(?:\s*,\s*[A-Za-z_]\w*)*\s*(?::[^=]*)?(?://|\*\*|[-+*/%|&^])?="""
)
"""How a line of Python begins that is not indented."""


def checker_for(prompt: Prompt) -> Checker | None:
    """The checker that a prompt's fields call for; None where they name none."""
    fields = prompt.fields
    if fields.get("test") and fields.get("entry_point"):
        return passes_unit_test
    if fields.get("test_list"):
        return passes_assertions
    if choices_of(prompt) and key_of(prompt):
        return picks_the_choice
    if expected_number(prompt) is not None:
        return says_the_number
    return None


# Numbers: GSM8K, SVAMP, MGSM


def says_the_number(prompt: Prompt, answer: str) -> bool:
    """Whether the answer's number equals the expected one, as numbers: 1,200 is 1200.00, and 1/2 is
    .5."""
    wanted = expected_number(prompt)
    return wanted is not None and stated_number(answer) == wanted


def expected_number(prompt: Prompt) -> Fraction | None:
    """`answer`, bare or after a worked solution's "####"; of prompts about maths the reference
    where it is a bare number."""
    answer = prompt.fields.get("answer")
    if answer is None and "math" in (prompt.task or ""):
        answer = prompt.reference
    text = str(answer).strip()
    if "####" not in text and not NUMBER.fullmatch(text):
        return None
    return stated_number(text)


def stated_number(text: str) -> Fraction | None:
    """The number that a text ends up with, None if there is none.

    It follows the last "####" before a number, else the last "answer is" (there after the "=" of
    its line, if it has one), else it is the last number of all.

    >>> (
    ...     stated_number("16 - 3 = 13, then 13 * 2 = 26.\\n#### 26"),
    ...     stated_number("The answer is $1,234.50 for 3 days."),
    ... )
    (Fraction(26, 1), Fraction(2469, 2))
    """
    marks = [*SOLUTION.finditer(text)] or [*ANSWER.finditer(text)]
    if marks:
        line = text[marks[-1].end() :].lstrip().partition("\n")[0]
        for place in (line.rpartition("=")[2], line):
            if found := NUMBER.search(place):
                return value_of(found)
    last = list(NUMBER.finditer(text))[-1:]
    return value_of(last[0]) if last else None


def value_of(found: re.Match[str]) -> Fraction:
    """A match of `NUMBER` as an exact number; currencies fall away."""
    size = Fraction(found["value"].replace(",", "")) / int(found["below"] or 1)
    return -size if re.search("[-−]", found[0][: found.start("value") - found.start()]) else size


# Letters: CommonsenseQA, AQuA


def picks_the_choice(prompt: Prompt, answer: str) -> bool:
    """Whether the answer names the right choice, by its letter or by its text."""
    return stated_choice(answer, choices_of(prompt)) == key_of(prompt)


def key_of(prompt: Prompt) -> str | None:
    """The right choice's letter: `answer_key` (`answerKey` on the hub), or AQuA's `answer`."""
    key = next((prompt.fields[name] for name in KEYS if prompt.fields.get(name)), None)
    return str(key).strip().upper() if re.fullmatch(r"\s*[A-Za-z]\s*", str(key)) else None


def choices_of(prompt: Prompt) -> list[str]:
    """The choices' texts in the order of their letters: `choices` (a list, or the hub's `{"text":
    [...]}`), or AQuA's `options`."""
    choices: Any = prompt.fields.get("choices") or prompt.fields.get("options") or []
    if isinstance(choices, dict):
        choices = choices.get("text") or []
    if not isinstance(choices, list):  # of a table in which the name means something else
        return []
    return [
        re.sub(r"^\s*\(?[A-Z]\)\s*", "", str(choice)) for choice in choices[: len(ascii_uppercase)]
    ]


def stated_choice(text: str, choices: Sequence[str]) -> str | None:
    """The letter of the choice that a text picks; None if it picks none, or several, or text that
    two choices share.

    Looked for in turn: a letter after "answer is", a letter that begins the text (not the article
    "A"), the only letter in brackets, the only choice whose text occurs. Marks of Markdown and
    quotes around a letter do not count.

    >>> [
    ...     stated_choice(text, ["bank", "river bank"])
    ...     for text in ("A bank.", "B) river bank", "I say river bank", "Is it (A) or (B)?")
    ... ]
    ['A', 'B', 'B', None]
    """
    letters = ascii_uppercase[: len(choices)]
    plain = MARKS.sub("", text)
    letter = rf"(?:(?:[Oo]ption|[Cc]hoice)\s+)?[(\[]?([{letters}])(?:[])}}.:,;!]|\s+is\b|\s*$)"
    for place in [
        plain[mark.end() :].strip() for mark in reversed(list(ANSWER.finditer(plain)))
    ] + [plain.strip()]:
        if found := re.match(letter, place, re.MULTILINE):
            return found[1]
    bracketed = set(re.findall(rf"\(([{letters}])\)", plain))
    if bracketed:
        return min(bracketed) if len(bracketed) == 1 else None
    left, named = text.lower(), []
    # river bank before bank
    for words, name in sorted(
        zip(choices, letters, strict=True), key=lambda choice: -len(choice[0])
    ):
        within = rf"(?<!\w){re.escape(words.lower())}(?!\w)"
        if choices.count(words) == 1 and re.search(within, left):
            named.append(name)
            left = re.sub(within, " ", left)
    return named[0] if len(named) == 1 else None


# Code: HumanEval, MBPP


def passes_unit_test(prompt: Prompt, answer: str) -> bool:
    """HumanEval (Chen et al. 2021): the completed function passes `check` of its `test`."""
    return run_python(unit_test_program(prompt, answer), seconds=SECONDS).passed


def unit_test_program(prompt: Prompt, answer: str) -> str:
    """Prompt, answer and test. An answer is a function in full, which then replaces the prompt's
    empty one, or only its body."""
    name = prompt.fields["entry_point"]
    defines = rf"^(?:async )?def {re.escape(name)}\b"
    block = fenced(answer, defines)
    code = answer if block is None else block
    if not re.search(defines, code, re.MULTILINE):
        code = body(code)
    elif block is None:
        code = without_prose(answer)
    return f"{prompt.prompt}\n{code}\n{prompt.fields['test']}\ncheck({name})\n"


def passes_assertions(prompt: Prompt, answer: str) -> bool:
    """MBPP (Austin et al. 2021): every assertion of its `test_list` holds after the answer and the
    `test_setup_code`."""
    return run_python(assertions_program(prompt, answer), seconds=SECONDS).passed


def assertions_program(prompt: Prompt, answer: str) -> str:
    """Answer, setup and assertions, in this order: setup code uses classes that the answer
    defines."""
    block = fenced(answer, r"^(?:def|class) ")
    code = block if block is not None else without_prose(answer)
    return "\n".join(
        [code, prompt.fields.get("test_setup_code") or "", *prompt.fields["test_list"], ""]
    )


def fenced(text: str, wanted: str) -> str | None:
    """The first block between ``` marks that holds a line like `wanted`, else the first; None
    without any. A last mark may lack."""
    blocks: list[str] = FENCED.findall(text)
    return next(
        (block for block in blocks if re.search(wanted, block, re.MULTILINE)),
        blocks[0] if blocks else None,
    )


def without_prose(text: str) -> str:
    """From the first line of code to the last before prose follows.

    >>> without_prose("Here it is:\\n\\ndef f(x):\\n    return x\\n\\nThis returns x.")
    'def f(x):\\n    return x\\n'
    """
    lines = text.split("\n")
    start = next((i for i, line in enumerate(lines) if CODE.match(line)), 0)
    end = next(
        (i for i, line in enumerate(lines) if i > start and begins(line) and not CODE.match(line)),
        len(lines),
    )
    return "\n".join(lines[start:end])


def body(text: str) -> str:
    """A function's body: all before the next line that is not indented; a first line that lost its
    indentation gets it back."""
    lines = text.strip("\n").split("\n")
    if begins(lines[0]):
        lines[0] = "    " + lines[0]
    end = next(
        (i for i, line in enumerate(lines) if begins(line) and line[0] not in ")]}"), len(lines)
    )
    return "\n".join(lines[:end])


def begins(line: str) -> bool:
    """Whether a line is neither blank nor indented."""
    return bool(line[:1].strip())
