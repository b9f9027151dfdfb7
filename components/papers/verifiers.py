"""SPRINTER's verifiers: those that are trained for a cell, one on each of several sets of prompts
(its Table 4, its Figures 12 and 13), and how well they, and a pair's own, tell the draft's tokens
apart (its Figure 3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from scipy.special import expit as sigmoid

from draftwell.components.collect.collect import collect_traces
from draftwell.components.collect.settings import CollectionSettings
from draftwell.components.collect.work import work_of
from draftwell.components.papers.cells import CONFIDENCE, Cell
from draftwell.components.prompts.prompt import Prompt
from draftwell.components.report.provenance import provenance
from draftwell.components.train.examples import VerifierLabel, read_examples
from draftwell.components.train.metrics import ranking
from draftwell.components.train.reports import Ranking
from draftwell.components.train.settings import VerifierSettings
from draftwell.components.train.verifier import RATIOS, train_verifier
from draftwell.serving.artifacts.verifier import Verifier
from draftwell.serving.recording.trace import TraceSet
from draftwell.serving.runtime.pair import LoadedPair

TRAINING_KINDS = ("draft", "mixed", "target")
"""Of the texts that a verifier learns from, of each as many (section 3.2). The paper's fourth kind,
a prompt alone, is nothing that a chat pair drafts in."""
TOKENS = 64
"""Of each text that verifiers are tested on: the more positions, the narrower the intervals."""
TAU = 0.5
"""The paper's threshold (Table 5)."""
SETTINGS = VerifierSettings(eta_fp=None)
"""λ 1.2, as the paper's (Table 5); the threshold that the artifact holds is not read here."""
HOW_TRAINED = [TRAINING_KINDS, TOKENS, TAU, SETTINGS.model_dump(mode="json")]
"""All that is the same for every cell that trains verifiers; part of its key."""
Aucs = dict[str, dict[str, tuple[float, float, float]]]
"""Role of a verifier, or `confidence`, which is the draft's → λ → area under the ROC curve of the
label q̄/p̄ ≤ λ, with the ends of its 95 % interval (a bootstrap over prompts)."""


def traced(
    cell: Cell,
    pair: LoadedPair,
    prompts: Sequence[Prompt],
    folder: Path,
    kinds: tuple[str, ...] = TRAINING_KINDS,
    max_tokens: int | None = None,
) -> TraceSet:
    """Texts that verifiers learn from, or are tested on, in a folder of their own: a collection
    that was cut short resumes there, and other cells take it.

    Args:
        folder: of the run.
        max_tokens: of a text; None: as a cell's verifiers learn from.
    """
    settings = CollectionSettings(
        max_tokens=max_tokens or cell.training_tokens,
        temperature=cell.temperature,
        seed=cell.seed,
        rollout=1,
        prefix_kinds=kinds,
    )
    name = f"verifier-{work_of(pair, prompts, settings).plan.inputs[:12]}"
    return collect_traces(pair, prompts, folder / "traces" / name, settings)


def trained_verifiers(
    cell: Cell,
    pair: LoadedPair,
    training: Mapping[str, Sequence[Prompt]],
    prompts: Sequence[Prompt],
    folder: Path,
) -> tuple[dict[str, Verifier], Aucs]:
    """Role → verifier for λ 1.2 of each set of training prompts; and the AUCs, of verifiers that
    were trained for each λ on the same texts, on the prompts that all are tested on."""
    found, aucs = dict[str, Verifier](), Aucs()
    tested = traced(cell, pair, prompts, folder, ("target",), TOKENS)
    for role, own in training.items():
        trace = traced(cell, pair, own, folder)
        found[role], report = train_verifier(trace, provenance(pair), SETTINGS, test=tested)
        aucs |= aucs_of(role, report.lambda_grid)
    return found, aucs


def measured_aucs(
    cell: Cell, pair: LoadedPair, verifier: Verifier, prompts: Sequence[Prompt], folder: Path
) -> Aucs:
    """Of one verifier on the draft's tokens along texts that the target writes."""
    examples = read_examples(traced(cell, pair, prompts, folder, ("target",), TOKENS))
    scores = sigmoid(examples.features(verifier.features) @ verifier.weight.numpy() + verifier.bias)
    rankings = {f"{one:g}": ranking(examples, scores, VerifierLabel(ratio=one)) for one in RATIOS}
    return aucs_of("verifier", rankings)


def aucs_of(role: str, rankings: Mapping[str, Ranking | None]) -> Aucs:
    """Those of a verifier and of the draft's confidence; a λ by which all tokens are alike is left
    out."""
    found: Aucs = {role: {}, CONFIDENCE: {}}
    for ratio, one in rankings.items():
        ends = one.intervals if one else None
        if one and ends and one.auc is not None and one.baseline_auc is not None:
            found[role][ratio] = (one.auc, *ends["auc"])
            found[CONFIDENCE][ratio] = (one.baseline_auc, *ends["baseline_auc"])
    return found
