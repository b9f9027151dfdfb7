"""The part of a strategy's settings that fits an engine which drafts with a model or n-grams and accepts tokens by the exact rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import ValidationError

from serving.errors import DraftwellError
from serving.runtime.strategies import build_strategy, find_strategy


@dataclass(frozen=True)
class Weights:
    """Names of a pair's models as the engine reads them: hub ids or paths.

    Args:
        draft_revision, target_revision: branch, tag or commit of a model on the hub; None for its default.
    """

    target: str
    draft: str | None = None
    draft_revision: str | None = None
    target_revision: str | None = None


@dataclass(frozen=True)
class Speculation:
    """A strategy as other engines know it.

    Args:
        source: where drafts come from.
        length: tokens of a draft, at most where there is a `threshold`; None: a rule that no engine has decides.
        threshold: a draft ends at a token whose draft probability is lower.
        heuristic: `length` grows by two after a draft that was accepted completely, else shrinks by one.
        ngram: longest n-gram looked up.
        notes: what was left out.
    """

    source: Literal["none", "draft", "ngram"]
    length: int | None = None
    threshold: float | None = None
    heuristic: bool = False
    ngram: int | None = None
    notes: tuple[str, ...] = ()

    def constant(self, engine: str) -> int:
        """The length of every draft, for an engine that supports constant lengths only.

        Raises:
            DraftwellError: drafts have no constant length, and none was given.
        """
        if self.length is None or self.threshold is not None:
            raise DraftwellError(f"{engine} cannot express how this config ends a draft: name a constant length with --draft-tokens, such "
                                 "as the num_speculative_tokens of the fastest vanilla_sd in the tuning's report",
                                 code="no_constant_length")
        return self.length


def speculation_of(strategy: str, parameters: Mapping[str, Any], draft_tokens: int | None = None) -> Speculation:
    """A strategy as other engines can express it.

    Args:
        draft_tokens: constant draft length that replaces a strategy's own rule, if it has one.
    Raises:
        DraftwellError: an unknown strategy or setting; a strategy that other engines cannot express at all.
    """
    cls = find_strategy(strategy)
    try:
        config = cls.Config.model_validate(dict(parameters))
    except ValidationError:
        build_strategy(strategy, dict(parameters))  # raises the one-line error
        raise
    if strategy not in READERS:
        raise DraftwellError(f"{strategy} cannot be exported, as other engines have no third model: serve it with `draftwell deploy`, or "
                             "tune with --lossless-only and export that", code="three_models")
    found = READERS[strategy](config)
    notes = found.notes
    if not cls.lossless:
        notes = (f"{strategy} is lossy and other engines accept tokens by the exact rule: this is its lossless equivalent. Outputs are the "
                 "target's own, fewer draft tokens are accepted, and the measured speedup and quality do not carry over.", *notes)
    if draft_tokens is not None and found.source == "draft" and (found.length is None or found.threshold is not None):
        notes = (*notes, f"Every draft has the {draft_tokens} tokens of --draft-tokens; the tuned rule that ends drafts is left out.")
        return Speculation("draft", draft_tokens, notes=notes)
    return Speculation(found.source, found.length, found.threshold, found.heuristic, found.ngram, notes)


def _constant(left_out: str = "") -> Callable[[Any], Speculation]:
    return lambda c: Speculation("draft", c.num_speculative_tokens, notes=(left_out,) if left_out else ())


def _ruled(left_out: str) -> Callable[[Any], Speculation]:
    return lambda c: Speculation("draft", None, notes=(left_out,))


def _hf_dynamic(c: Any) -> Speculation:
    return Speculation("draft", c.max_draft, c.threshold, c.heuristic)


def _draft_verify(c: Any) -> Speculation:
    threshold = 0.8 if c.threshold is None else c.threshold  # the strategy's own for greedy requests
    return Speculation("draft", c.max_draft, threshold, notes=(f"The threshold stays at {threshold}: Draft & Verify adapts it.",))


def _spide(c: Any) -> Speculation:
    overlap = "Draft and target do not run at once: SPIDE's parallel part is left out."
    table = "SPIDE's acceptance table, which ends drafts, is left out."
    notes = tuple(note for note, applies in ((overlap, c.parallel), (table, c.dynamic)) if applies)
    return Speculation("draft", None if c.dynamic else c.num_speculative_tokens, notes=notes)


READERS: dict[str, Callable[[Any], Speculation]] = {
    "autoregressive": lambda c: Speculation("none", notes=("The config is plain decoding: nothing is speculated.",)),
    "vanilla_sd": _constant(),
    "csd": _constant("CSD's rescue of rejected tokens, by memory and gate, is left out."),
    "fuzzy_sd": _constant("The divergence that fuzzy_sd tolerates is left out."),
    "mentored": _constant("The divergence budget of mentored decoding is left out."),
    "lossy_sd": _constant("lossy_sd's threshold on p(x)/p(t*) is left out."),
    "hf_dynamic": _hf_dynamic,
    "draft_verify": _draft_verify,
    "svip": _ruled("SVIP's entropy threshold, which ends drafts, is left out."),
    "adaedl": _ruled("AdaEDL's bound, which ends drafts, is left out."),
    "specdec_pp": _ruled("The acceptance head, which ends drafts, is left out."),
    "sprinter": _ruled("SPRINTER's verifier, which judges tokens instead of the target, is left out."),
    "spide": _spide,
    "pearl": _constant("Draft and target do not run at once: PEARL's overlap is left out."),
    "duo_decoding": _constant("Draft and target do not run at once, and one sequence is drafted: DuoDecoding's overlap and sequences are "
                              "left out."),
    "prompt_lookup": lambda c: Speculation("ngram", c.prompt_lookup_num_tokens, ngram=c.max_matching_ngram_size),
}
"""Strategy → how other engines can express it; strategies with three models are missing."""
