"""How well a verifier ranks the draft's tokens: SPRINTER's Figure 3."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from draftwell.components.papers.cells import Scale
from draftwell.components.papers.verifiers import Aucs, measured_aucs
from draftwell.components.prompts.prompt import Prompt
from draftwell.serving.artifacts.base import Provenance
from draftwell.serving.artifacts.verifier import Verifier
from tests.support.models.tiny import llama_pair
from tests.support.papers import tiny_cell

PROMPTS = [
    Prompt(name, "writing", [text])
    for name, text in (("a", "the man in the inn"), ("b", "ten men"), ("c", "an onion"))
]

CELL = tiny_cell(
    Scale("tiny", prompts=3, max_tokens=8, repeats=1),
    "tiny",
    pair="tiny",
    data="code",
    temperature=1.0,
    contenders={"SPRINTER": ("sprinter",)},
)


def scalar_verifier(q: float = 0.0, confidence: float = 0.0) -> Verifier:
    """One that reads q̄(x) and C alone."""
    return Verifier(
        torch.tensor([q, confidence, 0.0, 0.0]),
        0.0,
        ("scalars",),
        0.5,
        1.2,
        Provenance(pair="tiny", fingerprint="f" * 64),
    )


@pytest.fixture(scope="module")
def by_confidence(tmp_path_factory: pytest.TempPathFactory) -> Aucs:
    return measured_aucs(
        CELL,
        llama_pair(),
        scalar_verifier(confidence=2.0),
        PROMPTS,
        tmp_path_factory.mktemp("run"),
    )


def test_a_verifier_that_reads_the_confidence_alone_ranks_as_it_does(by_confidence: Aucs) -> None:
    assert list(by_confidence["verifier"]) == ["1", "1.2", "1.5"]
    for ratio, auc in by_confidence["verifier"].items():
        assert auc == pytest.approx(by_confidence["confidence"][ratio])
        assert auc[1] <= auc[0] <= auc[2]


def test_its_scores_are_the_verifiers(by_confidence: Aucs, tmp_path: Path) -> None:
    """Turned round, the verifier ranks the other way round; the confidence as before."""
    turned = measured_aucs(CELL, llama_pair(), scalar_verifier(confidence=-2.0), PROMPTS, tmp_path)
    for ratio, auc in turned["verifier"].items():
        assert auc[0] == pytest.approx(1 - by_confidence["verifier"][ratio][0])
    assert turned["confidence"] == by_confidence["confidence"]
