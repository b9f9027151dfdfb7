"""The papers' data sets from the files that their makers publish: the rows that are measured, in
the form that `--data` reads.

    python -m draftwell.components.papers.public data

Not all rows of a set are used: some are set aside, to judge on later, so a folder made otherwise
has other prompts.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftwell.components.prompts.files import rows_of
from draftwell.serving.errors import DraftwellError
from draftwell.serving.files import write_atomically


@dataclass(frozen=True)
class Public:
    """A published file.

    Args:
        file: as it is published, under a name that says what it is.
        address: where it is, at a commit.
        made: the file that is made of it, of `prompts.SETS`.
        rows: numbers of the rows that are taken, counted from 0: more than a full run takes.
        convert: (number, row) → row with `id` and `prompt`.
    """

    file: str
    address: str
    made: str
    rows: tuple[int, ...]
    convert: Callable[[int, dict[str, Any]], dict[str, Any]]


TRAINING_ROWS = (
    2,
    8,
    14,
    15,
    20,
    23,
    24,
    25,
    30,
    32,
    33,
    40,
    41,
    43,
    44,
    47,
    49,
    53,
    56,
    73,
    75,
    76,
    77,
    78,
    79,
    81,
    92,
    101,
    103,
    106,
    115,
    116,
    122,
    128,
    130,
    133,
    141,
    143,
    146,
    149,
    156,
    168,
    170,
    176,
    179,
    181,
    185,
    186,
    187,
    191,
    196,
    197,
    201,
    202,
    205,
    206,
    208,
    209,
    210,
    212,
    215,
    220,
    227,
    228,
    236,
    238,
    255,
    263,
    266,
    272,
    274,
    276,
)
"""Of GSM8K's training set: verifiers are trained on them, whose test prompts are other
questions."""


def gsm8k(part: str) -> Callable[[int, dict[str, Any]], dict[str, Any]]:
    """Converts a row of `test` or `train`."""
    return lambda number, row: {
        "id": f"gsm8k_{part}/{number:04d}",
        "task": "math_gsm8k",
        "prompt": row["question"],
        "reference": row["answer"],
        "answer": row["answer"].rpartition("####")[2].strip().replace(",", ""),
    }


GSM8K = "https://raw.githubusercontent.com/openai/grade-school-math/3101c7d5072418e28b9008a6636bde82a006892c/grade_school_math/data"
PUBLIC = (
    Public(
        "HumanEval.jsonl.gz",
        "https://github.com/openai/human-eval/raw/6d43fb980f9fee3c892a914eda09951f772ad10d/data/HumanEval.jsonl.gz",
        "humaneval.jsonl",
        (0, 2, 4, *range(6, 18), *range(19, 30), *range(31, 37), 38, 40, 42, *range(45, 50)),
        lambda number, row: {
            "id": f"humaneval/{number}",
            "task": "code_humaneval",
            "prompt": row["prompt"],
            "test": row["test"],
            "reference": row["canonical_solution"],
            "entry_point": row["entry_point"],
        },
    ),
    Public(
        "gsm8k_test_published.jsonl",
        f"{GSM8K}/test.jsonl",
        "gsm8k_test.jsonl.gz",
        (*range(9), *range(10, 14), 16, 17, *range(19, 30), *range(31, 36), *range(37, 46)),
        gsm8k("test"),
    ),
    Public(
        "gsm8k_train_published.jsonl",
        f"{GSM8K}/train.jsonl",
        "gsm8k_train_2000.jsonl.gz",
        TRAINING_ROWS,
        gsm8k("train"),
    ),
)
DOWNLOADS = "\n".join(f"curl -L -o data/{one.file} {one.address}" for one in PUBLIC)
DATA_WORDS = f"""## The prompts

`data` is a folder with the papers' data sets. HumanEval and GSM8K come from their makers:

```bash
mkdir -p data
{DOWNLOADS}
python -m draftwell.components.papers.public data
```

The last line takes the rows that are measured here: some of each set are set aside. A set that the folder lacks is replaced by shipped
prompts of the same kind, and each table names what it was measured on. Of MT-bench (`mt_bench.jsonl`), CommonsenseQA
(`commonsenseqa_dev.jsonl`), Spec-Bench, which has CNN/DailyMail (`spec_bench.jsonl.gz`), and WikiText-2
(`wikitext2_test_continuation.jsonl`, and `wikitext2_train_continuation.jsonl.gz` for a verifier's training) the page has copies that were
prepared by hand. Without `DATA=` all sets are replaced, and the page is `papers-shipped.md` in the folder of the run, never this one.

Prompts of more than 1,200 characters (CNN/DailyMail: 2,400) are left out, and so are those that an artifact is known to be made from. The
record of the shipped draft does not list the prompts that it was distilled on, so an overlap with these sets cannot be excluded; its
recipe (`components/distil/default_pair.py`) has GSM8K's training questions.
"""  # noqa: E501
STAND_IN = (
    "Some tables are not of the papers' data sets: they were measured on shipped prompts "
    "of the same kinds, because the run had no "
    "file of the set. Each table names its prompts."
)
"""On pages with such tables."""


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
        rows: list[Any] = [row for _, row in rows_of(source)]
        try:
            taken = [one.convert(number, rows[number]) for number in one.rows]
        except (IndexError, KeyError, TypeError, AttributeError) as error:
            raise DraftwellError(
                f"{source} is not the file of {one.address}: download it again", code="other_data"
            ) from error
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in taken).encode()
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
