"""The papers' data sets from the files that are published: the rows that are measured, in the form
that `--data` reads.

    python -m draftwell.components.papers.public data

Not all rows of a set are used: some are set aside, to judge on later, so a folder made otherwise
has other prompts.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from draftwell.components.prompts.files import rows_of
from draftwell.serving.errors import DraftwellError
from draftwell.serving.files import write_atomically

PROMPT_WORDS = 48
"""Of a paragraph of WikiText-2: what follows is the reference, and at least as long."""
DETOKENISED = (
    (r" @([-,.])@ ", r"\1"),
    (r"([(\[]) ", r"\1"),
    (r'(^| )" ([^"]*?) "', r'\1"\2"'),
    (r" ([,.;:!?%)\]])", r"\1"),
    (r' "(?=[)\].,;:!?])', '"'),
    (r" ('s|'re|'ve|'ll|'d|'m)(?=[\s,.;:!?)\]]|$)", r"\1"),
    (r"([$£€]) ", r"\1"),
)
"""Pattern → what it becomes, in this order: WikiText-2 has spaces around punctuation."""


class Public(NamedTuple):
    """A published file.

    Args:
        file: as it is published, under a name that says what it is.
        address: where it is, at a commit.
        made: the file that is made of it, of `prompts.SETS`.
        kind: how its rows are converted, and the beginning of their ids.
        rows: numbers of the rows that are taken, counted from 0: more than a full run takes.
    """

    file: str
    address: str
    made: str
    kind: str
    rows: tuple[int, ...]


def numbers(text: str) -> tuple[int, ...]:
    """What a list of numbers and spans holds.

    >>> numbers("0 2-4")
    (0, 2, 3, 4)
    """
    spans = [[*map(int, part.split("-"))] for part in text.split()]
    return tuple(number for ends in spans for number in range(ends[0], ends[-1] + 1))


PUBLIC = tuple(
    Public(**{**one, "rows": numbers(one["rows"])})
    for one in yaml.safe_load(
        (Path(__file__).parent / "claims" / "data_sets.yaml").read_text(encoding="utf-8")
    )
)
DOWNLOADS = "\n".join(f"curl -L -o data/{one.file} {one.address}" for one in PUBLIC)
STAND_IN = (
    "Some tables are not of the papers' data sets: they were measured on shipped prompts of the "
    "same kinds, because the run had no file of the set. Each table names its prompts."
)
"""On pages with such tables."""


def converted(one: Public, number: int, row: dict[str, Any]) -> dict[str, Any]:
    """A published row with `id` and `prompt`."""
    if one.kind == "humaneval":
        return {
            "id": f"humaneval/{number}",
            "task": "code_humaneval",
            "prompt": row["prompt"],
            "test": row["test"],
            "reference": row["canonical_solution"],
            "entry_point": row["entry_point"],
        }
    if one.kind == "mbpp":
        tests = "\n".join(row["test_list"])
        return {
            "id": f"mbpp/{row['task_id']}",
            "task": "code_mbpp",
            "prompt": f"{row['text']} Your code should pass these tests:\n\n{tests}\n",
            "reference": row["code"].replace("\r\n", "\n").replace("\r", "\n"),
        }
    return {
        "id": f"{one.kind}/{number:04d}",
        "task": "math_gsm8k",
        "prompt": row["question"],
        "reference": row["answer"],
        "answer": row["answer"].rpartition("####")[2].strip().replace(",", ""),
    }


def continuations(text: str, one: Public) -> Iterator[dict[str, Any]]:
    """Paragraphs of WikiText-2's articles that are long enough and have no apostrophe by itself,
    which cannot be put back to its word."""
    # a line that begins with "= 1" is the end of a formula, not a title
    articles = re.split(r"(?m)^(?= = (?!1 )[^=\n]+ = $)", text)[1:]
    for number, article in enumerate(articles):
        for i, line in enumerate(article.splitlines()):
            paragraph = line.strip()
            for pattern, becomes in DETOKENISED:
                paragraph = re.sub(pattern, becomes, paragraph)
            words = paragraph.split()
            if number in one.rows and len(words) >= 2 * PROMPT_WORDS and " ' " not in line:
                yield {
                    "id": f"{one.kind}/{number:03d}_{i:03d}",
                    "task": "lm_continuation",
                    "prompt": " ".join(words[:PROMPT_WORDS]),
                    "reference": " ".join(words[PROMPT_WORDS:]),
                }


def taken(one: Public, source: Path) -> list[dict[str, Any]]:
    """The rows of a published file that are measured.

    Raises:
        DraftwellError: the file is not what it was.
    """
    rows: list[dict[str, Any]] = []
    with suppress(IndexError, KeyError, TypeError, AttributeError):
        if one.file.endswith(".raw"):
            rows = [*continuations(source.read_text(encoding="utf-8"), one)]
        else:
            published: list[Any] = [row for _, row in rows_of(source)]
            rows = [converted(one, number, published[number]) for number in one.rows]
    if not rows:
        raise DraftwellError(
            f"{source} is not the file of {one.address}: download it again", code="other_data"
        )
    return rows


def make(folder: Path) -> list[Path]:
    """Write the sets whose published files are in a folder, next to these.

    Raises:
        DraftwellError: none of the published files is there, or one is not what it was.
    """
    made = []
    for one in PUBLIC:
        source = folder / one.file
        if not source.is_file():
            continue
        rows = taken(one, source)
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
        write_atomically(
            folder / one.made, gzip.compress(text, mtime=0) if one.made.endswith(".gz") else text
        )
        made.append(folder / one.made)
    if not made:
        names = " and ".join(f"{one.file} ({one.address})" for one in PUBLIC)
        raise DraftwellError(
            f"{folder} holds no published file: download {names} into it", code="no_data"
        )
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the sets of a folder."""
    parser = argparse.ArgumentParser(
        description="Take the rows of published data sets that `draftwell reproduce papers` is "
        "measured on."
    )
    parser.add_argument("folder", type=Path, help="with the published files")
    try:
        for path in make(parser.parse_args(arguments).folder):
            print(f"{path}: made")
    except DraftwellError as error:
        raise SystemExit(str(error)) from error


if __name__ == "__main__":
    main()
