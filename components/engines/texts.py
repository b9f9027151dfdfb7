"""Texts that an engine writes, with its likeliest tokens and its acceptance: a JSON Lines file,
whole after every group of prompts."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from draftwell.components.engines.port import Acceptance, Engine, EngineSettings
from draftwell.components.prompts.prompt import Prompt
from draftwell.serving.errors import DraftwellError
from draftwell.serving.files import write_atomically
from draftwell.serving.runtime.requests import Sampling

SCHEMA = 1


class EngineTexts:
    """A file of texts: a first line about how they were made, then one line a prompt (`row_of`).

    Args:
        file: JSON Lines.
        about: how they are made; `subject` is a digest of everything that they depend on.
        fresh: replace a file of another subject.
    Raises:
        DraftwellError: the file holds texts of another subject (`other_texts`).
    """

    def __init__(self, file: Path, about: Mapping[str, Any], *, fresh: bool = False):
        self.file, self.about = file, {"schema": SCHEMA, **about}
        self.rows: list[dict[str, Any]] = [] if fresh else self._read()

    def write(
        self,
        engine: Engine,
        settings: EngineSettings,
        prompts: Sequence[Prompt],
        ids: Sequence[Sequence[int]],
        sampling: Sampling,
        *,
        decode: Callable[[Sequence[int]], str],
        progress: Callable[[int, int, str], None] | None = None,
    ) -> dict[str, Any]:
        """Write what is missing, in the order of the prompts.

        Args:
            engine: not yet started; the caller stops it.
            settings: what it is started with; a group has as many prompts as there are slots.
            ids: token ids of the prompts.
            decode: token ids → text.
        Returns:
            `rows`, `tokens`, `tokens_per_second` (of those decoded now; None where all were there)
            and `acceptance` (of all).
        """
        seconds, tokens = 0.0, 0
        if len(self.rows) < len(prompts):
            engine.start(settings)
        for start in range(len(self.rows), len(prompts), settings.slots):
            group = range(start, min(start + settings.slots, len(prompts)))
            made = engine.decode(
                [ids[i] for i in group], replace(sampling, seed=sampling.seed + start)
            )
            seconds, tokens = seconds + made.seconds, tokens + made.tokens
            self.rows += [
                row_of(prompts[i], ids[i], answer.model_dump(), decode)
                for i, answer in zip(group, made.answers, strict=True)
            ]
            self._write()
            if progress:
                progress(len(self.rows), len(prompts), "texts")
        total = Acceptance.total(Acceptance.model_validate(row["acceptance"]) for row in self.rows)
        return {
            "rows": len(self.rows),
            "tokens": sum(len(row["tokens"]) for row in self.rows),
            "tokens_per_second": tokens / seconds if seconds else None,
            "acceptance": total,
        }

    def _write(self) -> None:
        write_atomically(
            self.file, "".join(json.dumps(row) + "\n" for row in (self.about, *self.rows)).encode()
        )

    def _read(self) -> list[dict[str, Any]]:
        if not self.file.exists():
            return []
        try:
            about, *rows = [
                json.loads(line) for line in self.file.read_text(encoding="utf-8").splitlines()
            ]
            if about["subject"] == self.about["subject"] and about["schema"] == SCHEMA:
                return rows
        except (ValueError, KeyError, TypeError):
            pass
        raise DraftwellError(
            f"{self.file} holds something else than texts of these prompts and settings: "
            "name another file, or replace it "
            "with --fresh",
            code="other_texts",
        )


def rows_of(file: Path) -> list[dict[str, Any]]:
    """The rows of a file of texts."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()][1:]


def row_of(
    prompt: Prompt,
    ids: Sequence[int],
    answer: Mapping[str, Any],
    decode: Callable[[Sequence[int]], str],
) -> dict[str, Any]:
    """One line: `id`, `task`, `prompt_ids`, `text`, and the fields of an `Answer`."""
    return {
        "id": prompt.id,
        "task": prompt.task,
        "prompt_ids": list(ids),
        "text": decode(answer["tokens"]),
        **answer,
    }
