"""Measurements that are kept, so that a tuning that was killed repeats at most the rung that it was
killed in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from draftwell.components.prompts.prompt import Prompt, context_of
from draftwell.components.results import Results
from draftwell.components.tune.evaluator import Evaluate, Measured
from draftwell.serving.files import json_digest
from draftwell.serving.runtime.strategies import StrategyChoice


class ResumableEvaluator:
    """An `Evaluate` that answers a call with the choices, prompts, length and `fresh` of an earlier
    one from a file.

    What contenders learn online is not in the file: after a resumption they start without it.

    Args:
        evaluate: what measures.
        file: of results; None remembers nothing beyond this object.
        subject: what else the results depend on, as plain JSON.
    """

    def __init__(self, evaluate: Evaluate, file: Path | None, subject: Mapping[str, Any]):
        self.evaluate = evaluate
        self.calls: Results[list[Measured]] = Results(file, subject, list[Measured])

    def __call__(
        self,
        choices: Sequence[StrategyChoice],
        prompts: Sequence[Prompt],
        *,
        max_tokens: int | None = None,
        fresh: bool = False,
    ) -> list[Measured]:
        named = [[choice.name, dict(choice.parameters)] for choice in choices]
        texts = [[prompt.id, *context_of(prompt)] for prompt in prompts]
        return self.calls.get(
            json_digest([named, texts, max_tokens, fresh]),
            lambda: list(self.evaluate(choices, prompts, max_tokens=max_tokens, fresh=fresh)),
        )
