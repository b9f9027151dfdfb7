"""The resume file: what a tuning has measured, so that one that was killed repeats at most the rung
that it was killed in."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from draftwell.components.prompts.prompt import Prompt, context_of
from draftwell.components.tune.evaluator import Evaluate, Measured, measure_all
from draftwell.serving.files import json_digest, write_atomically
from draftwell.serving.runtime.strategies import StrategyChoice


class ResumableEvaluator:
    """An `Evaluate` that keeps its results in a file.

    A call with the choices, prompts, length and `fresh` of one in the file is answered from there.
    What contenders learn online is not in the file: after a resumption they start without it.

    Args:
        evaluate: what measures.
        file: JSON, written atomically after every call; None remembers nothing beyond this object.
        subject: what else the results depend on, as plain JSON; a file of another subject is
            replaced.
    """

    def __init__(self, evaluate: Evaluate, file: Path | None, subject: Mapping[str, Any]):
        self.evaluate, self.file, self.subject = evaluate, file, json_digest(subject)
        self.calls: dict[str, list[Measured]] = self._read()

    def __call__(
        self,
        choices: Sequence[StrategyChoice],
        prompts: Sequence[Prompt],
        *,
        max_tokens: int | None = None,
        fresh: bool = False,
    ) -> list[Measured]:
        named = [[choice.name, dict(choice.parameters)] for choice in choices]
        call = json_digest(
            [named, [[prompt.id, *context_of(prompt)] for prompt in prompts], max_tokens, fresh]
        )
        if call not in self.calls:
            self.calls[call] = measure_all(
                self.evaluate, choices, prompts, max_tokens=max_tokens, fresh=fresh
            )
            self._write()
        return self.calls[call]

    def _read(self) -> dict[str, list[Measured]]:
        try:
            known = json.loads(self.file.read_text()) if self.file is not None else {}
            if known.get("subject") != self.subject:
                return {}
            return {
                call: [Measured(**result) for result in results]
                for call, results in known["calls"].items()
            }
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return {}  # no file, or not one of ours: it can be measured again

    def _write(self) -> None:
        if self.file is not None:
            calls = {
                call: [vars(result) for result in results] for call, results in self.calls.items()
            }
            write_atomically(
                self.file, json.dumps({"subject": self.subject, "calls": calls}).encode()
            )
