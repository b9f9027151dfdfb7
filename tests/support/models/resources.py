"""Small pairs with known probabilities, and artifacts to go with them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from draftwell.serving.artifacts.acceptance_head import AcceptanceHead
from draftwell.serving.artifacts.acceptance_table import AcceptanceTable
from draftwell.serving.artifacts.base import Provenance
from draftwell.serving.artifacts.correction_memory import CorrectionMemory
from draftwell.serving.artifacts.datastore import Datastore
from draftwell.serving.artifacts.hardware_profile import HardwareProfile
from draftwell.serving.artifacts.medusa_heads import MedusaHeads
from draftwell.serving.artifacts.verifier import Verifier
from draftwell.serving.runtime.engine.engine import Engine, Job
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.strategies import StrategyResources, build_strategy
from tests.support.models.table_model import TableModel

ORIGIN = Provenance(pair="table", fingerprint="0" * 64)
NEEDED = {"adaedl": {"threshold": 0.5, "max_draft": 6}}
"""Strategy → settings that have no default."""


def whole_scalars(raw: torch.Tensor, token: int) -> torch.Tensor:
    """A verifier's features `scalars` `[4]` float32 of a token from all raw probabilities
    `[vocab]`: what traces and rows must both give."""
    q = raw[token]
    rank = (raw > q).sum().float()
    return torch.stack([q, raw.max(), torch.special.entr(raw).sum(), torch.log1p(rank)]).float()


def table_pair(vocab: int = 3, seed: int = 0, noise: float = 1.0, sharpness: float = 1.5) -> dict:
    """A target, a draft that is the target with noise on its logits, and a qualifier and a head
    with half of another noise."""
    target = TableModel.random(vocab, seed, sharpness=sharpness)
    generator = torch.Generator().manual_seed(seed + 1)
    draft = TableModel(target.table + noise * torch.randn(target.table.shape, generator=generator))
    qualifier = TableModel(
        target.table + noise / 2 * torch.randn(target.table.shape, generator=generator)
    )
    return {
        "target": target,
        "draft": draft,
        "qualifier": qualifier,
        "head": TableModel(qualifier.table),
    }


def decode(
    models: dict,
    prompt: Sequence[int],
    name: str,
    parameters: dict | None = None,
    resources: StrategyResources | None = None,
    **sampling: Any,
) -> Job:
    """One request, decoded by a strategy over these models alone."""
    strategy = build_strategy(name, parameters, resources)
    return Engine(models).generate(prompt, Sampling(**sampling), strategy)


def table_resources(vocab: int = 3, ratio: float = 3.0, **changes) -> StrategyResources:
    """All artifacts that strategies may ask for; `ratio` is t_verify / t_draft."""
    artifacts = {
        "acceptance_table": AcceptanceTable.empty(ORIGIN),
        "correction_memory": CorrectionMemory.empty(ORIGIN),
        "hardware_profile": HardwareProfile(1.0, {1: ratio, 32: ratio}, 0.1, ORIGIN),
    }
    return StrategyResources(never_changed(vocab) | artifacts | changes, deterministic=True)


@functools.cache
def never_changed(vocab: int) -> dict[str, Any]:
    """Artifacts that nothing writes to: enumerations ask for them thousands of times."""
    direction = torch.randn(vocab, generator=torch.Generator().manual_seed(3))
    return {
        "acceptance_head": random_head(vocab),
        "datastore": random_datastore(vocab),
        "medusa_heads": random_medusa_heads(vocab),
        "verifier": Verifier(direction, 0.0, ("before",), 0.5, 1.2, ORIGIN),
    }


def random_head(width: int, seed: int = 4) -> AcceptanceHead:
    """One random block; its predictions spread over (0, 1)."""
    generator = torch.Generator().manual_seed(seed)
    block = (
        torch.randn(width, width, generator=generator),
        torch.randn(width, generator=generator),
    )
    return AcceptanceHead(
        torch.zeros(width),
        torch.ones(width),
        [block],
        torch.randn(width, generator=generator),
        0.5,
        ORIGIN,
    )


def random_datastore(vocab: int, seed: int = 5) -> Datastore:
    """Six texts of ten random tokens."""
    generator = torch.Generator().manual_seed(seed)
    return Datastore.from_texts(torch.randint(vocab, (6, 10), generator=generator).tolist(), ORIGIN)


def random_medusa_heads(width: int, seed: int = 6, tokens: int | None = None) -> MedusaHeads:
    """Three random heads over states of `width` numbers, and over the first `tokens`, by default a
    dozen at most."""
    generator = torch.Generator().manual_seed(seed)
    weight, bias = (
        torch.randn(3, width, width, generator=generator),
        torch.randn(3, width, generator=generator),
    )
    return MedusaHeads(weight / width**0.5, bias, torch.arange(tokens or min(width, 12)), ORIGIN)


def counting_pair(vocab: int = 10, wrong_behind: int | None = None) -> dict:
    """A target that counts 0, 1, 2 … and a draft that does too, but errs behind one token."""
    table = torch.full((vocab, vocab), -20.0)
    for i in range(vocab):
        table[i, (i + 1) % vocab] = 20.0
    draft = table.clone()
    if wrong_behind is not None:
        draft[wrong_behind] = -20.0
        draft[wrong_behind, 0] = 20.0
    return {"target": TableModel(table), "draft": TableModel(draft)}
