"""Texts that an engine writes, with its likeliest tokens and its acceptance: a store of results
(`draftwell.components.results`) with a row for each prompt, by its place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from draftwell.components.engines.port import Acceptance, Engine, EngineSettings
from draftwell.components.prompts.prompt import Prompt
from draftwell.components.results import Results, object_of
from draftwell.serving.errors import DraftwellError
from draftwell.serving.runtime.requests import Sampling

Row = dict[str, Any]
"""`id`, `task`, `prompt_ids`, `text`, and the fields of an `Answer`."""


def open_texts(file: Path, subject: Any, *, fresh: bool = False) -> Results[Row]:
    """The texts of a file.

    Args:
        subject: everything that they depend on.
        fresh: replace a file of another subject.
    Raises:
        DraftwellError: the file holds texts of another subject (`other_texts`).
    """
    refusal = DraftwellError(
        f"{file} holds something else than texts of these prompts and settings: name another file, "
        "or replace it with --set fresh=true",
        code="other_texts",
    )
    return Results(file, subject, Row, fresh=fresh, refusal=refusal)


def write_texts(
    texts: Results[Row],
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
    seconds, tokens, there = 0.0, 0, texts.read
    if there < len(prompts):
        engine.start(settings)
    for start in range(there, len(prompts), settings.slots):
        group = range(start, min(start + settings.slots, len(prompts)))
        made = engine.decode([ids[i] for i in group], replace(sampling, seed=sampling.seed + start))
        seconds, tokens = seconds + made.seconds, tokens + made.tokens
        for i, answer in zip(group, made.answers, strict=True):
            row = {
                "id": prompts[i].id,
                "task": prompts[i].task,
                "prompt_ids": list(ids[i]),
                "text": decode(answer.tokens),
            }
            texts.put(str(i), row | answer.model_dump())
        if progress:
            progress(group.stop, len(prompts), "texts")
    rows = [row for _, row in texts.items()]
    acceptance = [Acceptance.model_validate(row["acceptance"]) for row in rows]
    return {
        "rows": len(rows),
        "tokens": sum(len(row["tokens"]) for row in rows),
        "tokens_per_second": tokens / seconds if seconds else None,
        "acceptance": Acceptance.total(acceptance),
    }


def rows_of(file: Path) -> list[Row]:
    """The rows of a file of texts, without lines that a kill cut short."""
    rows = map(object_of, file.read_bytes().split(b"\n")[1:])
    return [row["value"] for row in rows if "value" in row]
