"""How well a verifier that learnt one task does on others (SPRINTER, Table 4).

The paper trains on one data set and decodes another, and compares latency and win rates. Here a verifier is fitted to the training
prompts of each task and ranks the test prompts of every task; the figure is the AUC, which needs no decoding.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from components.train.examples import Examples
from components.train.logistic import Line, fit
from components.train.metrics import auc_of

LEARN_FROM, TEST_ON = 3, 2
"""Prompts that a task needs to be learnt from, and to be tested on."""


def transfer_table(train: Examples, test: Examples, line: Line, ratio: float, strength: float) -> dict[str, Any] | None:
    """AUC of a verifier for each task on each task.

    Args:
        train, test: of different prompts.
        line: the verifier that learnt all of `train`; the others read the same features under the same penalty.
        ratio: lambda of the label.
    Returns:
        plain JSON: `tasks` that are tested on, `test_prompts` of each; `trained`: task → `prompts` and `auc` by tested task; the same
        AUCs of the verifier of all tasks (`all`) and of the score C (`baseline`); `means` over cells (`own`: a task on itself,
        `other`: on others, `all`, `baseline`; None over none); `left_out`: task → why. None where nothing crosses from one task to
        another.
    """
    if train.task is None or test.task is None:
        return None
    left_out: dict[str, str] = {}
    tested = {task: part for task, part in by_task(test).items() if fitting(task, part, ratio, TEST_ON, "to be tested on", left_out)}
    learnt = {task: part for task, part in by_task(train).items() if fitting(task, part, ratio, LEARN_FROM, "to learn from", left_out)}
    if not any(own != other for own in learnt for other in tested):
        return None
    labels = {task: part.ratio <= ratio for task, part in tested.items()}
    trained: dict[str, dict[str, Any]] = {}
    for task, part in learnt.items():
        own = fit(part, line.names, ratio, strength)
        trained[task] = {"prompts": prompts_of(part), "auc": {other: auc_of(labels[other], own.logits(tested[other])) for other in tested}}
    everything = {task: auc_of(labels[task], line.logits(part)) for task, part in tested.items()}
    baseline = {task: auc_of(labels[task], part.confidence) for task, part in tested.items()}
    cells = [(task, other, auc) for task, row in trained.items() for other, auc in row["auc"].items()]
    return {"tasks": list(tested), "test_prompts": {task: prompts_of(part) for task, part in tested.items()}, "trained": trained,
            "all": everything, "baseline": baseline, "left_out": left_out,
            "means": {"own": mean([auc for task, other, auc in cells if task == other]),
                      "other": mean([auc for task, other, auc in cells if task != other]),
                      "all": mean(list(everything.values())), "baseline": mean(list(baseline.values()))}}


def by_task(examples: Examples) -> dict[str, Examples]:
    """task → its examples, in the order of the names; examples without a task are in none."""
    assert examples.task is not None
    return {task: examples.take(examples.task == task) for task in np.unique(examples.task).tolist() if task}


def fitting(task: str, part: Examples, ratio: float, least: int, purpose: str, left_out: dict[str, str]) -> bool:
    """Whether a task has prompts enough and both classes; where it has not, `left_out` is told."""
    label = part.ratio <= ratio
    if prompts_of(part) < least:
        left_out[task] = f"too few prompts {purpose}"
    elif label.all() or not label.any():
        left_out[task] = f"tokens of one class {purpose}"
    else:
        return True
    return False


def prompts_of(examples: Examples) -> int:
    """How many prompts the examples are of."""
    return len(np.unique(examples.prompt))


def mean(values: list[float]) -> float | None:
    """The mean; None of nothing."""
    return float(np.mean(values)) if values else None
