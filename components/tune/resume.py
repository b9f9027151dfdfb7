"""A file of what a tuning has measured, so that one that was killed measures nothing twice but the rung it died in."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from components.prompts.prompt import Prompt, context_of
from components.tune.evaluator import Config, Evaluate, Measured, measure_all
from components.tune.search.studies import digest_of_json
from serving.files import write_atomically


class Ledger:
    """An `Evaluate` that remembers.

    A call with the configs, prompts, length and `fresh` of one in the file is answered from there. What contenders learn online
    is not in the file: behind a resumption they begin anew.

    Args:
        evaluate: what measures.
        file: JSON, written atomically after every call; None remembers nothing beyond this object.
        subject: what else the figures depend on, as plain JSON; a file of another subject is begun again.
    """

    def __init__(self, evaluate: Evaluate, file: Path | None, subject: Mapping[str, Any]):
        self.evaluate, self.file, self.subject = evaluate, file, digest_of_json(subject)
        self.calls: dict[str, list[Measured]] = self._read()

    def __call__(self, configs: Sequence[Config], prompts: Sequence[Prompt], *, max_tokens: int | None = None,
                 fresh: bool = False) -> list[Measured]:
        call = digest_of_json([configs, [[prompt.id, *context_of(prompt)] for prompt in prompts], max_tokens, fresh])
        if call not in self.calls:
            self.calls[call] = measure_all(self.evaluate, configs, prompts, max_tokens=max_tokens, fresh=fresh)
            self._write()
        return self.calls[call]

    def _read(self) -> dict[str, list[Measured]]:
        try:
            known = json.loads(self.file.read_text()) if self.file is not None else {}
            if known.get("subject") != self.subject:
                return {}
            return {call: [Measured(**result) for result in results] for call, results in known["calls"].items()}
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return {}  # no file, or none of ours: only figures that can be measured again are lost

    def _write(self) -> None:
        if self.file is not None:
            calls = {call: [vars(result) for result in results] for call, results in self.calls.items()}
            write_atomically(self.file, json.dumps({"subject": self.subject, "calls": calls}).encode())
