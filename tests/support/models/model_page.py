"""Writes docs/models.md: every row of `matrix.yaml` is decoded and compared with transformers, and
timed beside it.

    python -m tests.support.models.model_page
"""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable, Iterable
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

Every architecture here was tried as a tiny random model in float32. *Exact* means that plain
decoding and vanilla speculative decoding, of several requests at once, write the tokens of
transformers' greedy `generate`, on texts longer than windows and original lengths. All others are
refused when they are loaded, by the line that is given here, and so is every model type that this
page does not name. `…` stands for the model type.

The number is the speed of plain decoding over transformers' `generate`, of models that are so
small that what surrounds the products counts most: the median of processor time in {turns} turns
of {tokens} tokens on {machine}, one thread, torch {torch}, transformers {transformers}.
Some may be slower than `generate` there, by a tenth at most: {slower}.
"""
COMPUTES = {
    "native": "Compiled layers on CPUs, CUDA graphs on GPUs; torch's without a compiler.",
    "transformers, packed": "Transformers' modules; all requests of a step in one pass.",
    "transformers, row by row": "Transformers' modules and caches; one pass for each request.",
}
"""The path of an exact model, and what computes there."""
ENTRY = re.compile(r"(.+) (`[^`]+`)(?: ([0-9.]+))?")


def cells(row: Row, outcome: Outcome) -> tuple[str, ...]:
    """All of a row's cells but its speed."""
    result = f"refused: {outcome.refusal}" if outcome.refusal else "exact"
    return row.name, f"`{row.kind}`", result, outcome.way


def chapter(row: tuple[str, ...]) -> str:
    """The heading under which a row stands: its path, or why it is refused."""
    _, kind, result, way, _ = row
    name = kind.strip("`")
    return f"Exact: {way}" if way else "R" + result[1:].replace(f"{name} models", "… models")


def render_page(rows: Iterable[tuple[str, ...]]) -> str:
    """The page behind its introduction: a chapter for each path and each refusal."""
    chapters: dict[str, list[str]] = {f"Exact: {way}": [] for way in COMPUTES}
    for row in rows:
        name, kind, _, _, ratio = row
        chapters.setdefault(chapter(row), []).append(f"{name} {kind} {ratio}".rstrip())
    parts = []
    for heading, entries in chapters.items():
        computes = COMPUTES.get(heading.removeprefix("Exact: "))
        parts += [f"## {heading}", *([computes] if computes else []), " · ".join(entries)]
    return "\n" + "\n\n".join(parts) + "\n"


def read_page() -> dict[str, tuple[str, ...]]:
    """Name of each architecture in the committed page → all its cells."""
    found = {}
    for part in PAGE.read_text(encoding="utf-8").split("\n## ")[1:]:
        heading, *_, entries = part.strip().splitlines()
        for entry in entries.split(" · "):
            match = ENTRY.fullmatch(entry)
            assert match is not None, entry
            name, kind, ratio = match.groups(default="")
            refusal = ("r" + heading[1:]).replace("…", kind.strip("`"))
            path = heading.removeprefix("Exact: ")
            result, path = ("exact", path) if path != heading else (refusal, "")
            found[name] = (name, kind, result, path, ratio)
    return found


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
    rows = []
    for row in ROWS:
        with TemporaryDirectory() as folder:
            outcome = check(row, Path(folder))
            ratio = "" if outcome.pair is None else f"{speed(row, outcome.pair):.1f}"
        rows.append((*cells(row, outcome), ratio))
        print(*rows[-1], flush=True)
    words = {
        "slower": ", ".join(SLOWER),
        "turns": TURNS,
        "tokens": TIMED_TOKENS,
        "machine": cpu_model(),
        "torch": torch.__version__.partition("+")[0],
        "transformers": transformers.__version__,
    }
    PAGE.write_text(INTRODUCTION.format(**words) + render_page(rows), encoding="utf-8")


if __name__ == "__main__":
    write_page()
