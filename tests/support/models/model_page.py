"""Writes docs/models.md: every row of `matrix.yaml` is decoded and compared with transformers, and
timed beside it.

    python -m tests.support.models.model_page
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from draftwell.components.report.machine import cpu_model
from draftwell.serving.runtime.engine.engine import Engine
from draftwell.serving.runtime.pair import LoadedPair
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.strategies import build_strategy
from tests.support.models.matrix import PROMPTS, ROWS, Outcome, Row, check, generated
from tests.support.paths import REPO

PAGE = REPO / "docs" / "models.md"
TURNS = 9
TIMED_TOKENS = 50
SLOWER = ("OPT", "MiniMax-M2")
"""Rows whose plain decoding may be slower than `generate`."""
INTRODUCTION = """# Models

<!-- Written by `python -m tests.support.models.model_page`: change matrix.yaml beside it, not this
page. -->

Every architecture below was tried as a tiny random model in float32: `exact` means that plain
decoding and vanilla speculative decoding, of several requests at once, write the tokens of
transformers' greedy `generate`, on texts longer than windows and original lengths. All others are
refused when they are loaded, by the line that is given here; so is every model type that the table
does not name.

| path | what computes |
| --- | --- |
| native | compiled layers on CPUs, CUDA graphs on GPUs; torch's without a compiler |
| transformers, packed | transformers' modules; all requests of a step in one pass |
| transformers, row by row | transformers' modules and caches; one pass for each request |

Speed is that of plain decoding over transformers' `generate`, of models that are so small that
what surrounds the products counts most: the median of processor time in {turns} turns of {tokens}
tokens on {machine}, one thread, torch {torch}, transformers {transformers}.
Some may be slower than `generate` there, by a tenth at most: {slower}.

| architecture | model type | result | path | speed |
| --- | --- | --- | --- | --- |
"""


def cells(row: Row, outcome: Outcome) -> tuple[str, ...]:
    """All of a row's cells but its speed."""
    result = f"refused: {outcome.refusal}" if outcome.refusal else "exact"
    return row.name, f"`{row.kind}`", result, outcome.way


def read_page() -> dict[str, tuple[str, ...]]:
    """Name of each architecture in the committed page → all its cells."""
    lines = PAGE.read_text(encoding="utf-8").partition("| architecture |")[2].splitlines()[2:]
    rows = [tuple(cell.strip() for cell in line.split("|")[1:-1]) for line in lines]
    return {row[0]: row for row in rows}


def speed(row: Row, pair: LoadedPair) -> float:
    """Plain decoding over `generate`, in turns, of a pair that has decoded before."""
    module, engine = row.module(), pair.engine()
    ratios = []
    for _ in range(TURNS):
        theirs = seconds(partial(generated, module, PROMPTS[0], TIMED_TOKENS))
        ratios.append(theirs / seconds(partial(decode, engine)))
    return statistics.median(ratios)


def decode(engine: Engine) -> None:
    sampling = Sampling(max_tokens=TIMED_TOKENS)
    engine.generate(PROMPTS[0], sampling, build_strategy("autoregressive"))


def seconds(run: Callable[[], Any]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def write_page() -> None:
    """Try and time every row, and write the page."""
    import transformers

    torch.set_num_threads(1)
    lines = []
    for row in ROWS:
        with TemporaryDirectory() as folder:
            outcome = check(row, Path(folder))
            ratio = "" if outcome.pair is None else f"{speed(row, outcome.pair):.1f}"
        lines.append("| " + " | ".join((*cells(row, outcome), ratio)) + " |")
        print(lines[-1], flush=True)
    words = {
        "slower": ", ".join(SLOWER),
        "turns": TURNS,
        "tokens": TIMED_TOKENS,
        "machine": cpu_model(),
        "torch": torch.__version__.partition("+")[0],
        "transformers": transformers.__version__,
    }
    PAGE.write_text(INTRODUCTION.format(**words) + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write_page()
