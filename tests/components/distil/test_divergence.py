"""The loss that makes its logits a few rows at a time, against the same loss written out."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from draftwell.components.distil.divergence import ROWS, Divergence
from draftwell.components.distil.family import Head


def written_out(loss: Divergence, states: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """`[n]` loss and divergence, by autograd through all logits at once."""
    guess, target = loss.head(states).log_softmax(-1), loss.head(wanted).log_softmax(-1)
    if loss.kind == "tv":
        distance = (guess.exp() - target.exp()).abs().sum(-1) / 2
        return distance, distance
    distance = F.kl_div(guess, target, log_target=True, reduction="none").sum(-1)
    hard = F.nll_loss(guess, target.argmax(-1), reduction="none")
    return distance + loss.hard_weight * hard, distance


@pytest.mark.parametrize("rows", [2, ROWS["cpu"], 2 * ROWS["cpu"] + 5])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize(("kind", "hard"), [("kl", 0.0), ("kl", 0.3), ("tv", 0.0)])
def test_loss_and_gradient_are_those_of_all_logits(kind, hard, softcap, rows):
    torch.manual_seed(rows)
    head = Head(torch.arange(40), torch.randn(40, 16), torch.randn(40), None, softcap)
    loss = Divergence(head, kind, hard)
    wanted, weight = torch.randn(rows, 16), torch.rand(rows)
    states = torch.randn(rows, 16, requires_grad=True)
    states.data[0] = wanted[0]
    again = states.detach().clone().requires_grad_()

    found, each, same = loss(states, wanted, weight)
    (3 * found).backward()
    expected, distance = written_out(loss, again, wanted)
    (3 * (expected * weight).sum()).backward()

    assert torch.allclose(found, (expected * weight).sum(), rtol=1e-5)
    assert torch.allclose(each, distance, atol=1e-5)
    assert not each.requires_grad
    assert torch.equal(same, head(again).argmax(-1) == head(wanted).argmax(-1))
    assert same[0]
    assert torch.allclose(states.grad, again.grad, atol=1e-5)
    assert again.grad.abs().sum() > 0


def test_no_gradient_is_made_where_none_is_wanted(monkeypatch):
    monkeypatch.setattr(torch.autograd, "grad", lambda *_: pytest.fail("nobody asked for it"))
    head = Head(torch.arange(9), torch.randn(9, 4))
    with torch.no_grad():
        total, *_ = Divergence(head)(torch.randn(3, 4), torch.randn(3, 4), torch.ones(3))
    assert total > 0
    assert not total.requires_grad


def test_in_half_precision_as_it_is_trained_with_a_tie_that_is_no_agreement():
    """The first of two equal logits is the draft's choice."""
    torch.manual_seed(0)
    head = Head(torch.arange(40), torch.randn(40, 16).bfloat16())
    head.weight[7] = head.weight[3]
    head.weight[[3, 7]] *= 9
    loss = Divergence(head, "kl", 0.3)
    states, wanted, weight = torch.randn(5, 16), torch.randn(5, 16), torch.rand(5)
    states[0] = wanted[0] = head.weight[3].float()
    wanted[0, 0] += 1  # the same choice
    states.requires_grad_()
    again = states.detach().clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, each, same = loss(states, wanted, weight)
        expected, distance = written_out(loss, again, wanted)
        assert torch.equal(same, head(again).argmax(-1) == head(wanted).argmax(-1))
        assert head(again).argmax(-1)[0] == 3
    found.backward()
    (expected * weight).sum().backward()
    assert torch.allclose(each, distance, atol=1e-4)
    assert torch.allclose(states.grad, again.grad, rtol=0.02, atol=0.02 * again.grad.abs().max())
