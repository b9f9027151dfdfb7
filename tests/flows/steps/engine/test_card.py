"""The card of another engine: what its rows and its gate say of themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from draftwell.components.bench.engines.figures import Figure
from draftwell.components.card.words import LOSSLESS, ROUNDED, facts
from draftwell.components.engines.vllm_methods import Method
from draftwell.components.gate.engine_checks import Difference, judge_engine
from draftwell.components.tune.engines.choice import EngineChoice
from draftwell.flows.steps.engine.card import EngineOutcome, engine_card, lost
from draftwell.flows.steps.outcome_card import Asked
from draftwell.flows.workspace import Workspace
from draftwell.registry.gates import load_gates
from draftwell.serving.bundle.verdict import PASSED

SHORT, LONG, HEAD = Method("ngram", 2, 3), Method("ngram", 5, 3), Method("eagle3", 2)


def figure(method: Method, ratio: float, low: float = 0.5) -> Figure:
    return Figure(
        label=method.label,
        at_once=1,
        groups=16,
        prompts=16,
        ratio=ratio,
        low=low,
        high=ratio + 0.2,
        tokens_per_second=10 * ratio,
        plain_tokens_per_second=10.0,
    )


MEASURED: dict[str, Any] = {
    "explored": (figure(SHORT, 0.7), figure(LONG, 1.2), figure(HEAD, 1.1)),
    "confirmed": (figure(LONG, 1.1, 0.9),),
}
REASON = f"plain decoding, because nothing is surely faster: the best, {LONG.label}, measured 1.10"
CHOSEN = EngineChoice(method="ngram", k=5, n=3, reason="it is faster", **MEASURED)
PLAIN = EngineChoice(method="off", k=0, n=0, reason=REASON, **MEASURED)


def test_a_row_of_what_lost_says_what_its_own_figures_say() -> None:
    timeless = PLAIN.model_copy(update={"left_out": {HEAD.label: "there was no time"}})
    assert {one.speed.name: one.why_not for one in lost(timeless)} == {
        LONG.label: REASON,
        HEAD.label: "there was no time",
        SHORT.label: "slower than plain decoding",
    }
    assert {one.speed.name: one.why_not for one in lost(CHOSEN)} == {
        HEAD.label: f"not faster beyond doubt than {LONG.label}, 1.10 in tuning",
        SHORT.label: f"slower than {LONG.label}, 1.10 in tuning",
    }


@pytest.mark.parametrize(
    ("choice", "near_tie", "said"),
    [
        (CHOSEN, None, ROUNDED),
        (CHOSEN, True, ROUNDED),
        (CHOSEN, False, "no, outputs differ for 1 of 16 prompts"),
        (None, False, "no, outputs differ for 1 of 16 prompts"),
        (PLAIN, None, LOSSLESS),
    ],
)
def test_exact_is_what_the_gate_found_of_answers(
    pair_file: Path, choice: EngineChoice | None, near_tie: bool | None, said: str
) -> None:
    figures = [] if choice is PLAIN else [figure(LONG, 1.5, 1.4)]
    unlike = [] if near_tie is None else [Difference(prompt=2, at=5, gap=0.1, near_tie=near_tie)]
    verdict = judge_engine(figures, unlike, load_gates())
    found = EngineOutcome(
        engine="vllm",
        choice=choice,
        figures=figures,
        verdict=PASSED,
        checks=[vars(check) for check in verdict.checks],
        next_command="",
    )
    made = engine_card(Workspace(str(pair_file), device="cpu"), found, Asked("", 1.0, 1.0))
    assert facts(made)["exact"].startswith(said)
    assert made.exact == (said == LOSSLESS)
