"""Verifiers that are trained for a cell, one on each of several sets of prompts: SPRINTER's Table 4
and its Figures 12 and 13."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from draftwell.components.bench.runner import StrategyContender
from draftwell.components.collect.collect import collect_traces
from draftwell.components.collect.settings import CollectionSettings
from draftwell.components.collect.work import work_of
from draftwell.components.papers.aucs import TOKENS, Aucs, aucs_of
from draftwell.components.papers.cells import Cell
from draftwell.components.prompts.prompt import Prompt
from draftwell.components.report.provenance import provenance
from draftwell.components.train.settings import VerifierSettings
from draftwell.components.train.verifier import train_verifier
from draftwell.serving.artifacts.verifier import Verifier
from draftwell.serving.runtime.pair import LoadedPair
from draftwell.serving.runtime.strategies import StrategyChoice, StrategyResources

TRAINING_KINDS = ("draft", "mixed", "target")
"""Of the texts that a verifier learns from, of each as many (section 3.2). The paper's fourth kind,
a prompt alone, is nothing that a chat pair drafts in."""
TAU = 0.5
"""The paper's threshold (Table 5)."""
SETTINGS = VerifierSettings(eta_fp=None)
"""λ 1.2, as the paper's (Table 5); the threshold that the artifact holds is not read here."""
HOW_TRAINED = [TRAINING_KINDS, TOKENS, TAU, SETTINGS.model_dump(mode="json")]
"""All that is the same for every cell that trains verifiers; part of its key."""


class Trained(NamedTuple):
    """A verifier for λ 1.2.

    Args:
        aucs: of verifiers that were trained for each λ on the same texts, and of the draft's
            confidence, on untouched prompts.
    """

    verifier: Verifier
    aucs: Aucs


def training_settings(cell: Cell) -> CollectionSettings:
    """How the traces that a cell's verifiers are trained on are collected."""
    return CollectionSettings(
        max_tokens=cell.training_tokens,
        temperature=cell.temperature,
        seed=cell.seed,
        rollout=1,
        prefix_kinds=TRAINING_KINDS,
    )


def trained_verifiers(
    cell: Cell,
    pair: LoadedPair,
    training: Mapping[str, Sequence[Prompt]],
    prompts: Sequence[Prompt],
    folder: Path,
) -> dict[str, Trained]:
    """Role → verifier of each set of training prompts.

    Args:
        training: role → prompts that its verifier is trained on.
        prompts: that all are tested on.
        folder: for the traces that are learnt from, which other cells may need as well.
    Raises:
        DraftwellError: as `collect_traces` and `train_verifier`.
    """
    if not training:
        return {}
    settings = training_settings(cell)
    of_test = settings.model_copy(update={"max_tokens": TOKENS, "prefix_kinds": ("target",)})
    with TemporaryDirectory() as place:
        tested = collect_traces(pair, prompts, Path(place) / "trace", of_test)
        found = {}
        for role, own in training.items():
            trace = collect_traces(
                pair,
                own,
                folder / f"verifier-{work_of(pair, own, settings).plan.inputs[:12]}",
                settings,
            )
            verifier, report = train_verifier(trace, provenance(pair), SETTINGS, test=tested)
            found[role] = Trained(verifier, aucs_of(role, report.lambda_grid))
    return found


def contender(
    pair: LoadedPair, resources: StrategyResources, role: str, verifier: Verifier
) -> StrategyContender:
    """SPRINTER with this verifier, under its role's name."""
    used = replace(resources, artifacts={**resources.artifacts, "verifier": verifier})
    return StrategyContender(pair, used, StrategyChoice("sprinter", {"tau": TAU}), role)
