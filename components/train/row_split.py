r"""How much a verifier's AUC gains by the split of SPRINTER's published code, which is no split:
beside it, ours.

    python -m draftwell.components.train.row_split --traces FOLDER --test FOLDER

The published code divides rows at random, so that neighbouring positions of one sentence are on
both sides, and takes the epoch that does best on its own test rows. (It also reads features at
padding, which a trace does not have.) The same linear model is fitted here with both splits, and
tested on rows of prompts that neither has seen.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from draftwell.components.train.examples import (
    Examples,
    VerifierLabel,
    read_examples,
    split_by_prompt,
)
from draftwell.components.train.logistic import Line, fit, moments
from draftwell.components.train.metrics import auc_of, require_sklearn
from draftwell.components.train.settings import LabelKind
from draftwell.serving.errors import DraftwellError
from draftwell.serving.recording.trace import TraceSet

TEST_SHARE, EPOCHS, BATCH, RATE = 0.2, 20, 256, 1e-3
"""Of the published protocol: share of the rows to test on, and Adam's epochs, batch and step."""
STRENGTH = 1e-3
"""Penalty of our fit, the same for both splits, so that these alone differ."""


def compare_splits(
    trace: Examples, test: Examples, label: VerifierLabel, seed: int = 0
) -> dict[str, dict[str, float]]:
    """Split → the AUC that it reports, and the AUC on `test`.

    Args:
        test: of prompts that `trace` lacks.
    """
    names = tuple(name for name in ("before", "after", "scalars") if name in trace.parts)
    rows = np.random.default_rng(seed).permutation(len(trace))
    held = np.zeros(len(trace), bool)
    held[rows[: round(TEST_SHARE * len(trace))]] = True
    by_row = trace.take(~held), trace.take(held)
    found = {}
    for split, (train, tested) in (("by prompt", split_by_prompt(trace, seed)), ("by row", by_row)):
        line = fit(train, names, label, STRENGTH)
        found[split] = {"reported": auc(line, tested, label), "untouched": auc(line, test, label)}
    line = best_epoch(*by_row, names, label, seed)
    found["by row, Adam's best epoch on its test rows"] = {
        "reported": auc(line, by_row[1], label),
        "untouched": auc(line, test, label),
    }
    found["score = C"] = {
        "reported": auc_of(label.targets(by_row[1]), by_row[1].confidence),
        "untouched": auc_of(label.targets(test), test.confidence),
    }
    return found


def best_epoch(
    train: Examples, tested: Examples, names: tuple[str, ...], label: VerifierLabel, seed: int
) -> Line:
    """The linear model of the epoch that ranks the test rows best: the mistake, on purpose."""
    mean, scale = moments(train, names)
    x = torch.from_numpy(
        (train.features(names) - mean.astype(np.float32)) / scale.astype(np.float32)
    )
    y = torch.from_numpy(label.targets(train))
    generator = torch.Generator().manual_seed(seed)
    weight, bias = torch.zeros(x.shape[1], requires_grad=True), torch.zeros(1, requires_grad=True)
    optimiser = torch.optim.Adam([weight, bias], lr=RATE)
    best: tuple[float, Line] | None = None
    for _ in range(EPOCHS):
        for picked in torch.randperm(len(x), generator=generator).split(BATCH):
            optimiser.zero_grad()
            loss = torch.nn.functional.binary_cross_entropy_with_logits(
                x[picked] @ weight + bias, y[picked]
            )
            loss.backward()
            optimiser.step()
        raw = (weight.detach().numpy() / scale).astype(np.float32)
        line = Line(names, raw, float(bias.detach()[0] - mean @ raw))
        value = auc(line, tested, label)
        if best is None or value > best[0]:
            best = value, line
    assert best is not None  # there are epochs
    return best[1]


def auc(line: Line, examples: Examples, label: VerifierLabel) -> float:
    """AUC of a linear model's scores."""
    return auc_of(label.targets(examples), line.logits(examples))


def main(
    traces: Annotated[Path, typer.Option(help="Trace folder to train on.")],
    test: Annotated[Path, typer.Option(help="Trace folder of other prompts.")],
    label: Annotated[LabelKind, typer.Option(help="What is predicted.")] = LabelKind.RATIO,
    ratio: Annotated[float, typer.Option(help="lambda of the label ratio.")] = 1.2,
    seed: Annotated[int, typer.Option(min=0, help="Seed of both splits.")] = 0,
) -> None:
    """Compare the splits on collected traces."""
    require_sklearn()
    read = [read_examples(TraceSet(folder), without_kinds=("bare",)) for folder in (traces, test)]
    found: Mapping[str, Any] = compare_splits(read[0], read[1], VerifierLabel(label, ratio), seed)
    typer.echo(json.dumps(found, indent=2))


if __name__ == "__main__":
    try:
        typer.run(main)
    except DraftwellError as mistake:
        sys.exit(f"Error: {mistake}")
