"""Checkers: what counts as the answer among words, and that known solutions pass while broken ones
do not."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from draftwell.components.bench.answers.checks import (
    assertions_program,
    body,
    checker_for,
    passes_assertions,
    passes_unit_test,
    picks_the_choice,
    says_the_number,
    stated_choice,
    stated_number,
    unit_test_program,
    without_prose,
)
from draftwell.components.prompts.prompt import Prompt, read_prompts

runs_code = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")
DATA = Path(os.environ["DRAFTWELL_TEST_DATA"]) if "DRAFTWELL_TEST_DATA" in os.environ else None
needs_data = pytest.mark.skipif(
    DATA is None,
    reason="public data sets are not shipped: name their folder in DRAFTWELL_TEST_DATA",
)


def asked(
    prompt: str = "?", task: str | None = None, reference: str | None = None, **fields: Any
) -> Prompt:
    return Prompt("p", task, [prompt], reference, fields=fields)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("16 - 3 = 13 eggs.\n#### 18", "18"),
        ("#### 1,234", "1234"),
        ("####-10", "-10"),
        ("#### $ 7.50\n", "7.5"),
        ("#### 5\nOr was it 6? I checked 7 times.", "5"),
        ("#### Step 1\nShe has 4.\n#### Step 2\nSo 4 + 5 = 9.", "9"),
        ("The answer is 18.", "18"),
        ("The answer is 18 because 16 + 2 is 18, in 3 steps.", "18"),
        ("the answer is 16 - 3 - 4 = 9 eggs", "9"),
        ("**Answer:** $1,200.50 a day for 2 days", "1200.5"),
        ("Answer = -3", "-3"),
        ("The final answer is:\n\n42", "42"),
        ("To answer this, take 5 ducks. That makes 10.", "10"),
        ("Is the answer 4? The answer is 5.", "5"),
        ("She has 3 left, so 50% of 12 is 6.", "6"),
        ("It costs $5/hour.", "5"),
        ("It is 1/2.", "1/2"),
        ("about 3 / 4 of it", "3/4"),
        ("16 - 4", "4"),
        ("= -4", "-4"),
        ("−4", "-4"),
        ("-$20", "-20"),
        ("$-20", "-20"),
        ("10-20", "20"),
        (".5", "1/2"),
        ("1,2345", "2345"),
        ("in 2024, 3 of them", "3"),
        ("v2 has 7 parts, see H2", "7"),
        ("1,000,000 people", "1000000"),
        ("উত্তর ১৮", "18"),
    ],
)
def test_the_number_of_an_answer(text: str, number: str) -> None:
    assert stated_number(text) == Fraction(number)


def test_no_number_is_none_and_many_digits_do_no_harm() -> None:
    assert stated_number("none at all") is None
    assert stated_number("") is None
    assert stated_number("7" * 10_000) is not None  # int() refuses so many


@pytest.mark.parametrize(
    ("prompt", "answer", "right"),
    [
        (asked(answer="2,125"), "#### 2125", True),
        (asked(answer="2,125"), "#### 2,125.00", True),
        (asked(answer="18"), "#### 181", False),
        (asked(answer="She sells 9.\n#### 18"), "The answer is 18", True),
        (asked(answer="She sells 9.\n#### 18"), "The answer is 9", False),
        (asked(answer="0.5"), "1/2", True),
        (asked(answer="18"), "none", False),
        (asked(task="math_svamp", reference="51"), "It costs 51 dollars.", True),
        (asked(task="math_svamp", reference="51"), "15", False),
    ],
)
def test_numbers_are_compared_as_numbers(prompt: Prompt, answer: str, right: bool) -> None:
    assert checker_for(prompt) is says_the_number
    assert says_the_number(prompt, answer) is right


CHOICES = ["bank", "library", "department store", "store", "new york", "twice", "twice"]


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("A", "A"),
        ("(B) library", "B"),
        ("B) library", "B"),
        ("C.", "C"),
        ("D: store", "D"),
        ("**E**", "E"),
        ("E is right", "E"),
        ("The answer is (B).", "B"),
        ("The answer is B", "B"),
        ("Not (A). The answer is: (C) department store", "C"),
        ("Answer: D", "D"),
        ("First I thought the answer is A. But the answer is B.", "B"),
        ("I would say (E), new york.", "E"),
        ("It is a library.", "B"),
        ("**B**.", "B"),
        ("**(B)**", "B"),
        ("(**B**)", "B"),
        ("**B)** library", "B"),
        ("`B`", "B"),
        ("__B__.", "B"),
        ("[B] library", "B"),
        ("Answer: **B**.", "B"),
        ("**Answer: B**.", "B"),
        ("**Answer:** (B)", "B"),
        ("The answer is **B**, a library.", "B"),
        ('"B"', "B"),
        ("The answer is option B.", "B"),
        ("Option (B)", "B"),
        ("The answer is $\\boxed{B}$.", "B"),
        ("**A** bank", "A"),
        ("*A* library would be best.", "B"),
        ("**A** or **B**", None),
        ("A library would be best.", "B"),
        ("At a Department Store!", "C"),
        ("in a store", "D"),
        ("The answer is the bank.", "A"),
        ("maybe (A), maybe (B)", None),
        ("twice", None),
        ("a bank or a library", None),
        ("bankers", None),
        ("A building", None),
        ("", None),
        ("H", None),
    ],
)
def test_the_letter_of_an_answer(text: str, letter: str | None) -> None:
    assert stated_choice(text, CHOICES) == letter


@pytest.mark.parametrize(
    "fields",
    [
        {"answer_key": "B", "choices": ["bank", "library"]},
        {"answerKey": "B", "choices": {"label": ["A", "B"], "text": ["bank", "library"]}},
        {"answer": "B", "options": ["A)bank", "B)library"]},
    ],
)
def test_letters_by_the_fields_of_several_sets(fields: dict[str, Any]) -> None:
    prompt = asked(**fields)
    assert checker_for(prompt) is picks_the_choice
    assert [
        picks_the_choice(prompt, text)
        for text in ("(B)", "The library.", "(A)", "A) bank", "no idea")
    ] == [True, True, *[False] * 3]


@pytest.mark.parametrize(
    "prompt",
    [
        asked(),
        asked(answer="yes"),
        asked(answer="B"),
        asked(answer_key="B"),
        asked(reference="51"),
        asked(reference="51", task="qa"),
        asked(task="maths", reference="51 dollars"),
        asked(test_list=[]),
        asked(test="def check(f): pass"),
        asked(answer=None),
        asked(answer=["1", "2"]),
        asked(answer_key="B", choices=[]),
    ],
)
def test_what_tells_nothing_is_not_checked(prompt: Prompt) -> None:
    assert checker_for(prompt) is None


DOUBLE = asked(
    "from typing import List\n\n\ndef helper(x: int) -> int:\n    return x + x\n\n\ndef "
    "double(x: int) -> int:\n"
    '    """ Twice x.\n    >>> double(2)\n    4\n    """\n',
    entry_point="double",
    test="def check(candidate):\n    assert candidate(2) == 4\n    assert candidate(0) == 0\n",
)
RIGHT = {
    "a body": "    return 2 * x\n",
    "a body of lines": "    y = x\n\n    return y + x\n",
    "a body whose indentation was lost": "return 2 * x",
    "a body and more": (
        "    return helper(x)\n\n\ndef other():\n    return undefined\n\nprint(undefined)"
    ),
    "a body and words": "    return x * 2\nThis returns twice x.",
    "a block": (
        "Sure! Here it is:\n\n```python\ndef double(x: int) -> int:\n    return 2 * x\n```\nIt "
        "doubles."
    ),
    "a block with the body": "```\n    return 2 * x\n```",
    "a block without an end": "```python\ndef double(x):\n    return x + x",
    "the second block": (
        "Call it:\n```python\ndouble(2)\n```\nas in\n```python\ndef double(x):\n    return x + "
        "x\n```"
    ),
    "a block that needs the prompt's helper": (
        "```python\ndef double(x):\n    return helper(x)\n```"
    ),
    "no block, in words": (
        "Here it is:\n\ndef double(x: int) -> List:\n    return 2 * x\n\nThis function doubles."
    ),
    "helpers of its own": "```python\nimport math\n\ndef twice(x):\n    return math.floor(2 * "
    "x)\n\n"
    "def double(x):\n    return twice(x)\n```",
}
WRONG = {
    "another result": "    return x",
    "nothing": "",
    "words": "I cannot help with that.",
    "half": "    return 2 *",
    "a pass": "    pass",
    "another name": "```python\ndef doubled(x):\n    return 2 * x\n```",
    "an early end": "    raise SystemExit(0)",
}


@runs_code
@pytest.mark.parametrize("answer", RIGHT.values(), ids=RIGHT)
def test_a_function_is_found_in_what_a_model_says(answer: str) -> None:
    assert checker_for(DOUBLE) is passes_unit_test
    assert passes_unit_test(DOUBLE, answer), unit_test_program(DOUBLE, answer)


@runs_code
@pytest.mark.parametrize("answer", WRONG.values(), ids=WRONG)
def test_a_function_that_is_wrong_does_not_pass(answer: str) -> None:
    assert not passes_unit_test(DOUBLE, answer), unit_test_program(DOUBLE, answer)


SQUARES = asked(
    "Write a function to square a list.",
    test_list=["assert squares([1, 2]) == [1, 4]", "assert squares(Own([3]).x) == [9]"],
    test_setup_code="class Own(Base):\n    pass",
)
SQUARING = (
    "N = 2\nclass Base:\n    def __init__(self, x):\n        self.x = x\n\ndef squares(x):\n   "
    " return [v ** N for v in x]"
)


@runs_code
@pytest.mark.parametrize(
    ("answer", "right"),
    [
        (SQUARING, True),
        (f"Here:\n```python\n{SQUARING}\n```\nDone.", True),
        (f"Here you are:\n\n{SQUARING}\n\nIt squares each.", True),
        (SQUARING.replace("N = 2", "N = 3"), False),
        (SQUARING.replace("squares", "cubes"), False),
        ("", False),
        (SQUARING + "\nraise SystemExit(0)", False),
    ],
)
def test_every_assertion_must_hold_behind_the_setup(answer: str, right: bool) -> None:
    assert checker_for(SQUARES) is passes_assertions
    assert passes_assertions(SQUARES, answer) is right, assertions_program(SQUARES, answer)


def test_code_is_cut_out_of_words() -> None:
    code = (
        "@cache\ndef f(x):\n\n    return x\nx, y = 1, 2\nd['a'] += 1\nprint(f(1))\nraise "
        "ValueError\n"
    )
    assert without_prose(f"Sure:\n{code}\nThis is it.\nx = 2") == code
    assert without_prose("no code here") == "no code here"
    assert body("return [\n        1,\n]\nprint(1)") == "    return [\n        1,\n]"
    assert body("\n\n    a = 1\n\n    return a\ndef g(): pass") == "    a = 1\n\n    return a"
    assert body("") == ""


# The public sets. Solutions are the sets' own; a broken one differs by the least that must be seen.


def passing(prompts: list[Prompt], answers: list[str]) -> list[str]:
    """Ids of the prompts whose answers pass, several checked at once."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        right = pool.map(
            lambda prompt, answer: checker_for(prompt)(prompt, answer), prompts, answers
        )  # type: ignore[misc]
        return [prompt.id for prompt, passed in zip(prompts, right, strict=True) if passed]


def prompts_of(name: str) -> list[Prompt]:
    assert DATA is not None
    return read_prompts(DATA / name)


@needs_data
@pytest.mark.parametrize(
    "name",
    [
        "eval/gsm8k_test.jsonl.gz",
        "calib/gsm8k_train_2000.jsonl.gz",
        "calib/svamp.jsonl",
        "eval/mgsm.jsonl.gz",
    ],
)
def test_reference_numbers_pass_and_others_do_not(name: str) -> None:
    prompts = prompts_of(name)
    assert {checker_for(prompt) for prompt in prompts} == {says_the_number}
    for prompt in prompts:
        assert prompt.reference is not None
        number = stated_number(prompt.reference)
        assert number is not None
        assert says_the_number(prompt, prompt.reference), prompt.id
        assert not says_the_number(
            prompt, f"{prompt.reference.partition('####')[0]}\n#### {float(number) + 1}"
        ), prompt.id


@needs_data
@pytest.mark.parametrize(
    "name",
    [
        "eval/commonsenseqa_dev.jsonl",
        "calib/commonsenseqa_train_2000.jsonl.gz",
        "eval/aqua_test.jsonl",
    ],
)
def test_reference_letters_pass_and_others_do_not(name: str) -> None:
    prompts = prompts_of(name)
    assert {checker_for(prompt) for prompt in prompts} == {picks_the_choice}
    unseen = []
    for prompt in prompts:
        key = prompt.fields.get("answer_key") or prompt.fields["answer"]
        choices = prompt.fields.get("choices") or prompt.fields["options"]
        words = choices["ABCDE".index(key)]
        assert [picks_the_choice(prompt, f"({letter})") for letter in "ABCDE"] == [
            letter == key for letter in "ABCDE"
        ], prompt.id
        # a few prompts offer the same words twice
        if choices.count(words) == 1 and not picks_the_choice(prompt, words):
            unseen.append((prompt.id, words))
    assert unseen == []


@runs_code
@needs_data
@pytest.mark.slow
def test_every_solution_of_humaneval_passes_and_an_empty_one_does_not() -> None:
    prompts = prompts_of("eval/humaneval.jsonl")
    assert len(prompts) > 100
    solutions = [prompt.fields["canonical_solution"] for prompt in prompts]
    whole = [
        f"```python\n{prompt.prompt}{solution}```"
        for prompt, solution in zip(prompts, solutions, strict=True)
    ]
    assert passing(prompts, solutions) == [prompt.id for prompt in prompts]
    assert passing(prompts, whole) == [prompt.id for prompt in prompts]
    assert passing(prompts, ["    return None\n"] * len(prompts)) == []


@runs_code
@needs_data
@pytest.mark.slow
def test_every_solution_of_mbpp_passes_and_a_function_of_nothing_does_not() -> None:
    prompts = [p for p in prompts_of("eval/mbpp_test.jsonl") if p.reference]
    assert len(prompts) == 500
    assert passing(prompts, [str(prompt.reference) for prompt in prompts]) == [
        prompt.id for prompt in prompts
    ]
    empty = (
        "\n\nclass Nothing:\n    def __eq__(self, other): return False\n    def "
        "__bool__(self): return False\n"
    )
    names = [prompt.fields["test_list"][0].replace("(", " ").split()[1] for prompt in prompts]
    broken = [
        f"```python\n{prompt.reference}{empty}\ndef {name}(*_): return Nothing()\n```"
        for prompt, name in zip(prompts, names, strict=True)
    ]
    assert passing(prompts, broken) == []
