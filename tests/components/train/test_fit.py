"""The one training loop: when it ends, its learning rate, what it logs, and where it goes on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from draftwell.components.train.checkpoint import Checkpoint
from draftwell.components.train.fit import Budget, fit, shuffled_rows
from tests.support.errors import raises_code

X = torch.randn(50, 4, generator=torch.Generator().manual_seed(0))
Y = X @ torch.tensor([1.0, -2.0, 0.5, 0.0])
BUDGET = Budget(updates=31, warmup_steps=3, peak_rate=0.1, measure_steps=5, save_seconds=0.0)


def line() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 1)


def trained(
    model: nn.Linear,
    budget: Budget = BUDGET,
    folder: Path | None = None,
    of: str = "this",
    **options: Any,
) -> dict[str, Any]:
    def loss(rows: Tensor, step: int) -> tuple[Tensor, dict[str, float]]:
        noise = torch.rand(1, generator=torch.Generator().manual_seed(step))
        found = (model(X[rows])[:, 0] - Y[rows] + 0.01 * noise).square().mean()
        return found, {"loss": float(found.detach())}

    checkpoint = Checkpoint(folder, {"of": of}) if folder else None
    return fit(model, loss, budget, shuffled_rows(50, 8, 0), checkpoint=checkpoint, **options)


def test_the_rate_warms_up_and_falls_to_the_last_one() -> None:
    budget = Budget(updates=100, peak_rate=1.0, final_rate=0.1, warmup_steps=4)
    rates = [budget.rate({"steps": step}) for step in range(101)]
    assert rates[:3] == pytest.approx([0.25, 0.5, 0.75], rel=1e-2)
    assert rates[3:] == sorted(rates[3:], reverse=True)
    assert rates[-1] == pytest.approx(0.1)


def test_a_budget_is_of_updates_else_of_tokens_else_of_minutes() -> None:
    progress = {"steps": 5, "tokens": 30, "minutes": 1.5}
    assert Budget(minutes=3).spent(progress) == 0.5
    assert Budget(minutes=3, tokens=40).spent(progress) == 0.75
    assert Budget(minutes=3, tokens=40, updates=50).spent(progress) == 0.1


def test_it_learns_and_keeps_the_means_of_the_parts_with_what_is_measured() -> None:
    model = line()
    found = trained(
        model,
        measure=lambda: {"bias": float(model.bias.detach())},
    )
    assert (found["steps"], found["passes"], found["position"]) == (31, 4, 3)
    assert found["tokens"] == 4 * 50 + 24
    assert [step for step, _ in found["curves"]["loss"]] == [5, 10, 15, 20, 25, 30]
    assert found["curves"]["loss"][-1][1] < 0.25 * found["curves"]["loss"][0][1]
    assert [step for step, _ in found["curves"]["bias"]] == [5, 10, 15, 20, 25, 30]


@pytest.mark.parametrize("stops", [(1,), (9, 8), (4, 3, 2)])
def test_a_stopped_run_ends_as_an_unbroken_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stops: Sequence[int]
) -> None:
    """Bit for bit: weights, moments, rate, order and place in the pass, and all curves."""
    whole = line()
    expected = trained(whole)
    real = Checkpoint.save
    for count in stops:
        seen = []

        def stopping(*arguments: Any, limit: int = count, seen: list[int] = seen) -> None:
            real(*arguments)
            seen.append(1)
            if len(seen) == limit:
                raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(Checkpoint, "save", stopping)
            with pytest.raises(KeyboardInterrupt):
                trained(line(), folder=tmp_path)
    model = line()
    found = trained(model, folder=tmp_path)
    assert torch.equal(model.weight, whole.weight)
    assert torch.equal(model.bias, whole.bias)
    assert {**found, "minutes": 0} == {**expected, "minutes": 0}
    other = trained(line(), folder=tmp_path, of="that")
    assert other["steps"] == 31, "another training begins, beside it"
    assert len(list(tmp_path.iterdir())) == 2


def test_a_loss_that_is_not_finite_ends_training() -> None:
    model = line()
    with raises_code("training_diverged", "step 0"):
        fit(
            model,
            lambda rows, step: (model.weight.sum() * torch.inf, {}),
            BUDGET,
            shuffled_rows(50, 8, 0),
        )
