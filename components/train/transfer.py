"""How well a verifier that was trained on one task does on others (SPRINTER, Table 4).

The paper trains on one data set, decodes another, and compares latency and win rates. Here a
verifier is fitted to the training prompts of each task and ranks the test prompts of every task;
the metric is the AUC, which needs no decoding.
"""

from __future__ import annotations

import numpy as np

from draftwell.components.train.examples import Examples, VerifierLabel
from draftwell.components.train.logistic import Line, fit
from draftwell.components.train.metrics import auc_of, of_one_class
from draftwell.components.train.reports import TaskTransfer, Transfer

LEARN_FROM, TEST_ON = 3, 2
"""Prompts that a task needs to be trained on, and to be tested on."""


def transfer_table(
    train: Examples, test: Examples, line: Line, label: VerifierLabel, strength: float
) -> Transfer | None:
    """AUC of a verifier for each task on each task.

    Args:
        train, test: of different prompts.
        line: the verifier that was trained on all of `train`; the others read the same features
            under the same penalty.
        label: what the verifiers predict.
    Returns:
        None where no task can be tested on another one.
    """
    if train.task is None or test.task is None:
        return None
    left_out: dict[str, str] = {}
    tested = {
        task: part
        for task, part in by_task(test).items()
        if fitting(task, part, label, TEST_ON, "to be tested on", left_out)
    }
    learnt = {
        task: part
        for task, part in by_task(train).items()
        if fitting(task, part, label, LEARN_FROM, "to learn from", left_out)
    }
    if not any(own != other for own in learnt for other in tested):
        return None
    labels = {task: label.targets(part) for task, part in tested.items()}
    trained: dict[str, TaskTransfer] = {}
    for task, part in learnt.items():
        own = fit(part, line.names, label, strength)
        aucs = {other: auc_of(labels[other], own.logits(tested[other])) for other in tested}
        trained[task] = TaskTransfer(prompts=prompts_of(part), auc=aucs)
    everything = {task: auc_of(labels[task], line.logits(part)) for task, part in tested.items()}
    baseline = {task: auc_of(labels[task], part.confidence) for task, part in tested.items()}
    cells = [(task, other, auc) for task, row in trained.items() for other, auc in row.auc.items()]
    means = {
        "own": mean([auc for task, other, auc in cells if task == other]),
        "other": mean([auc for task, other, auc in cells if task != other]),
        "all": mean(list(everything.values())),
        "baseline": mean(list(baseline.values())),
    }
    return Transfer(
        tasks=list(tested),
        test_prompts={task: prompts_of(part) for task, part in tested.items()},
        trained=trained,
        all=everything,
        baseline=baseline,
        left_out=left_out,
        means=means,
    )


def by_task(examples: Examples) -> dict[str, Examples]:
    """task → its examples, in the order of the names; examples without a task are in none."""
    assert examples.task is not None
    return {
        task: examples.take(examples.task == task)
        for task in np.unique(examples.task).tolist()
        if task
    }


def fitting(
    task: str,
    part: Examples,
    label: VerifierLabel,
    least: int,
    purpose: str,
    left_out: dict[str, str],
) -> bool:
    """Whether a task has enough prompts and both classes; otherwise the reason is added to
    `left_out`."""
    if prompts_of(part) < least:
        left_out[task] = f"too few prompts {purpose}"
    elif of_one_class(label.targets(part)):
        left_out[task] = f"tokens of one class {purpose}"
    else:
        return True
    return False


def prompts_of(examples: Examples) -> int:
    """Number of prompts of the examples."""
    return len(np.unique(examples.prompt))


def mean(values: list[float]) -> float | None:
    """The mean; None of nothing."""
    return float(np.mean(values)) if values else None
