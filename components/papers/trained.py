"""Verifiers that are trained for a cell, one on each of several sets of prompts: SPRINTER's Table 4 and its Figures 12 and 13."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from components.bench.runner import StrategyContender
from components.collect.collect import collect_traces
from components.collect.settings import CollectionSettings
from components.papers.cells import Cell
from components.papers.roc import TOKENS, Roc, auc_words, roc_of
from components.prompts.prompt import Prompt, prompts_digest
from components.report.provenance import provenance
from components.report.tables import markdown
from components.train.examples import VerifierLabel, read_examples
from components.train.metrics import roc_points
from components.train.settings import VerifierSettings
from components.train.verifier import train_verifier
from serving.artifacts.verifier import Verifier
from serving.files import json_digest
from serving.runtime.pair import LoadedPair
from serving.runtime.strategies import StrategyChoice, StrategyResources

KINDS = ("draft", "mixed", "target")
"""Of the texts that a verifier learns from, of each as many (section 3.2). The paper's fourth kind, a prompt alone, is nothing that a chat
pair drafts in."""
TAU = 0.5
"""The paper's threshold (Table 5)."""


class Trained(NamedTuple):
    """A verifier for λ 1.2.

    Args:
        rocs: λ → how well one that was trained for it, on the same texts, ranks the draft's tokens on untouched prompts.
    """

    verifier: Verifier
    rocs: dict[str, Roc]


def trained_verifiers(cell: Cell, pair: LoadedPair, learnt: Mapping[str, Sequence[Prompt]], prompts: Sequence[Prompt],
                      folder: Path) -> dict[str, Trained]:
    """Role → verifier of each set of training prompts.

    Args:
        learnt: role → prompts that its verifier is trained on.
        prompts: that all are tested on.
        folder: for the traces that are learnt from, which other cells may need as well.
    Raises:
        DraftwellError: as `train_verifier`.
    """
    if not learnt:
        return {}
    settings = CollectionSettings(max_tokens=TOKENS, temperature=cell.temperature, seed=cell.seed, rollout=1, prefix_kinds=KINDS)
    with TemporaryDirectory() as place:
        tested = collect_traces(pair, prompts, Path(place) / "trace", settings.model_copy(update={"prefix_kinds": ("target",)}))
        test = read_examples(tested)
        found = {}
        for role, own in learnt.items():
            name = json_digest([pair.fingerprint, prompts_digest(own), settings.model_dump(mode="json")])[:12]
            trace = collect_traces(pair, own, folder / f"verifier-{name}", settings)
            verifier, report = train_verifier(trace, provenance(pair), VerifierSettings(eta_fp=None), test=tested)
            rocs = {ratio: roc_of(ranked, ranked.roc, roc_points(VerifierLabel(ratio=float(ratio)).targets(test), test.confidence))
                    for ratio, ranked in report.lambda_grid.items() if ranked is not None and ranked.intervals is not None}
            found[role] = Trained(verifier, rocs)
    return found


def contender(pair: LoadedPair, resources: StrategyResources, role: str, verifier: Verifier) -> StrategyContender:
    """SPRINTER with this verifier, under its role's name."""
    used = StrategyResources({**resources.artifacts, "verifier": verifier}, resources.special_tokens)
    return StrategyContender(pair, used, StrategyChoice("sprinter", {"tau": TAU}), role)


def trained_table(aucs: Mapping[str, Mapping[str, tuple[float, float, float]]], roc: Mapping[str, Roc]) -> str:
    """A row for each set of training prompts, a column for each λ, as Markdown."""
    columns = ("AUC", *(f"λ {ratio}" for ratio in roc))
    rows = [[role, *(auc_words(own[ratio]) for ratio in roc)] for role, own in aucs.items()]
    rows.append(["the draft's confidence", *(auc_words(one.confidence_auc) for one in roc.values())])
    rows.append(["acceptable tokens", *(f"{one.acceptable:.0%} of {one.tokens}" for one in roc.values())])
    return markdown(columns, rows)
