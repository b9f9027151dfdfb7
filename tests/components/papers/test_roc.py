"""How well a verifier ranks the draft's tokens: SPRINTER's Figure 3."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from draftwell.components.papers.roc import Roc, measured_roc
from draftwell.components.prompts.prompt import Prompt
from draftwell.serving.artifacts.base import Provenance
from draftwell.serving.artifacts.verifier import Verifier
from tests.support.models.tiny import llama_pair

PROMPTS = [
    Prompt(name, "writing", [text])
    for name, text in (("a", "the man in the inn"), ("b", "ten men"), ("c", "an onion"))
]


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
def by_confidence(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Roc]:
    return measured_roc(
        llama_pair(),
        scalar_verifier(confidence=2.0),
        PROMPTS,
        tmp_path_factory.mktemp("trace"),
        temperature=1.0,
    )


def test_a_verifier_that_reads_the_confidence_alone_ranks_as_it_does(
    by_confidence: dict[str, Roc],
) -> None:
    assert list(by_confidence) == ["1", "1.2", "1.5"]
    for roc in by_confidence.values():
        assert roc.auc == pytest.approx(roc.confidence_auc)
        assert roc.auc[1] <= roc.auc[0] <= roc.auc[2]
        assert (roc.fpr[0], roc.tpr[0], roc.fpr[-1], roc.tpr[-1]) == (0, 0, 1, 1)
        assert roc.auc[0] == pytest.approx(
            float(torch.trapezoid(torch.tensor(roc.tpr), torch.tensor(roc.fpr))), abs=0.02
        )
    shares = [roc.acceptable for roc in by_confidence.values()]
    assert shares == sorted(shares), "the wider the label, the more tokens are acceptable"


def test_its_scores_are_the_verifiers(by_confidence: dict[str, Roc], tmp_path: Path) -> None:
    """Turned round, the verifier ranks the other way round; the confidence as before."""
    turned = measured_roc(
        llama_pair(), scalar_verifier(confidence=-2.0), PROMPTS, tmp_path / "trace", temperature=1.0
    )
    for ratio, roc in turned.items():
        assert roc.auc[0] == pytest.approx(1 - by_confidence[ratio].auc[0])
        assert roc.confidence_auc == by_confidence[ratio].confidence_auc
