"""SPRINTER's Eq. 5 and 6 against the tokens that models really read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from draftwell.serving.artifacts.base import Provenance
from draftwell.serving.artifacts.verifier import Verifier
from draftwell.serving.runtime.commands import Forward
from draftwell.serving.runtime.pair import LoadedPair
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.session.stats import Stats
from draftwell.serving.runtime.strategies import StrategyResources, build_strategy
from tests.support.models.tiny import llama_pair

TOKENS = 24
PROMPT = (5, 9, 4, 7)


def decoded(
    name: str, parameters: dict[str, Any], resources: StrategyResources | None = None
) -> tuple[Counter[str], Stats]:
    """Tokens that each model reads after the prompt and its passes, and the request's counters."""
    pair: LoadedPair = llama_pair(slots=1)
    read: Counter[str] = Counter()
    for role, model in pair.models.items():

        def counting(
            commands: Sequence[Forward],
            model: Any = model,
            role: str = role,
            forward: Any = model.forward,
        ) -> Any:
            later = [one for one in commands if not one.prefill]
            read[role] += sum(len(one.tokens) + one.steps - 1 for one in later)
            read[f"{role} passes"] += len(later)
            return forward(commands)

        model.forward = counting  # type: ignore[method-assign]
    job = pair.engine().generate(
        list(PROMPT),
        Sampling(max_tokens=TOKENS, temperature=0.0),
        build_strategy(name, parameters, resources),
    )
    return read, job.session.stats


def trusting() -> StrategyResources:
    """A verifier that lets everything pass."""
    made = Provenance(pair="tiny", fingerprint="f" * 64)
    weights = torch.zeros(4)
    return StrategyResources({"verifier": Verifier(weights, 9.0, ("scalars",), 0.5, 1.2, made)})


@pytest.mark.parametrize("gamma", [2, 4])
def test_sd_reads_what_equation_5_says_and_one_token_more_a_round(gamma: int) -> None:
    """γ drafts and the token before them; Eq. 5 leaves that one out."""
    read, stats = decoded("vanilla_sd", {"num_speculative_tokens": gamma})
    drafted = stats.drafted
    assert drafted > gamma
    assert read["target"] == drafted + read["target passes"]
    assert read["draft"] >= drafted - stats.rounds


def test_sprinters_target_reads_every_token_though_equation_6_charges_one_a_call() -> None:
    read, stats = decoded("sprinter", {"max_run": 8}, trusting())
    calls = stats.target_calls
    assert 0 < calls <= TOKENS / 4, "the verifier lets long runs pass"
    assert read["target"] > 3 * calls, "Eq. 6: one token a run"
    assert read["target"] >= stats.emitted - 8 - 1, "all but a last run that nobody judged"
