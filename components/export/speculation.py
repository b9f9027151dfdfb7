"""The part of a strategy's settings that fits an engine which drafts with a model or n-grams and
accepts tokens by the exact rule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from draftwell.serving.errors import DraftwellError
from draftwell.serving.runtime.strategies import build_strategy, find_strategy
from draftwell.serving.runtime.strategies.speculation import Speculation


@dataclass(frozen=True)
class Weights:
    """Names of a pair's models as the engine reads them: hub ids or paths.

    Args:
        head: folder of an EAGLE-3 head (`checkpoint.save_head`).
        draft_revision, target_revision: branch, tag or commit of a model on the hub; None for its
            default.
    """

    target: str
    draft: str | None = None
    draft_revision: str | None = None
    target_revision: str | None = None
    head: str | None = None


def speculation_of(
    strategy: str,
    parameters: Mapping[str, Any],
    draft_tokens: int | None = None,
    *,
    head: bool = False,
) -> Speculation:
    """What other engines can do of a strategy.

    Args:
        draft_tokens: constant draft length that replaces a strategy's own rule, if it has one.
        head: whether the engine loads EAGLE-3 heads and there is one: a strategy that can draft
            from it then does.
    Raises:
        DraftwellError: an unknown strategy or setting; a strategy of which nothing sensible would
            remain (`not_exportable`).
    """
    cls = find_strategy(strategy)
    try:
        config = cls.Config.model_validate(dict(parameters))
    except ValidationError:
        build_strategy(strategy, dict(parameters))  # raises the one-line error
        raise
    chosen = cls.head_speculation(config) if head else None
    if chosen is not None and draft_tokens is not None:
        chosen = replace(chosen, length=draft_tokens)
    found = chosen or cls.speculation(config)
    if found is None:
        raise DraftwellError(
            f"{strategy} cannot be exported: no other engine has what it drafts from, so "
            "nothing that was tuned would "
            "remain: serve it with `draftwell deploy`, or tune with --lossless-only and "
            "export that",
            code="not_exportable",
        )
    notes = found.notes
    if not cls.lossless:
        notes = (
            f"{strategy} is lossy and other engines accept tokens by the exact rule: this "
            "is its lossless equivalent. Outputs are the "
            "target's own, fewer draft tokens are accepted, and the measured speedup and "
            "quality do not carry over.",
            *notes,
        )
    if (
        draft_tokens is not None
        and found.source == "draft"
        and (found.length is None or found.threshold is not None)
    ):
        notes = (
            *notes,
            (
                f"Every draft has the {draft_tokens} tokens of --draft-tokens; the tuned rule "
                "that ends drafts is left out."
            ),
        )
        return Speculation("draft", draft_tokens, notes=notes)
    return replace(found, notes=notes)
