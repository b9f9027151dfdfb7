"""The part of a strategy's settings that fits an engine which drafts with a model or n-grams and
accepts tokens by the exact rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from draftwell.serving.errors import DraftwellError
from draftwell.serving.runtime.strategies import build_strategy, find_strategy
from draftwell.serving.runtime.strategies.lossless.draft_lengths import GREEDY_THRESHOLD


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


class SuffixSettings(NamedTuple):
    """SuffixDecoding's own: longest draft for each token of the match, and smallest probability of
    what is drafted."""

    factor: float
    least: float


@dataclass(frozen=True)
class Speculation:
    """What remains of a strategy in another engine.

    Args:
        source: where drafts come from.
        length: tokens that a draft has, or with `threshold` has at most; None: a rule decides that
            no engine has.
        threshold: a draft ends at a token whose draft probability is lower.
        heuristic: `length` grows by two after a draft that was accepted completely, else shrinks by
            one.
        ngram: longest n-gram looked up.
        suffix: for an engine that has SuffixDecoding, which the n-grams then stand for elsewhere.
        by_batch: requests at once → longest draft, 0: none; empty: the same for all.
        notes: what was left out, for people to read.
    """

    source: Literal["none", "draft", "ngram", "eagle3"]
    length: int | None = None
    threshold: float | None = None
    heuristic: bool = False
    ngram: int | None = None
    notes: tuple[str, ...] = ()
    suffix: SuffixSettings | None = None
    by_batch: Mapping[int, int] = field(default_factory=dict)

    def constant(self, engine: str) -> int:
        """The length of every draft, for an engine that knows nothing else.

        Raises:
            DraftwellError: drafts have no constant length, and nobody named one
                (`no_constant_length`).
        """
        if self.length is None or self.threshold is not None:
            raise DraftwellError(
                f"{engine} cannot express how this config ends a draft: name a constant "
                "length with --set draft_tokens=…, such "
                "as the num_speculative_tokens of the fastest vanilla_sd in the tuning's report",
                code="no_constant_length",
            )
        return self.length


HEAD_LENGTH = 3
"""Tokens of a head's draft for an engine that knows one length only: the default of `eagle3`."""


def fixed_length(config: Any, *notes: str) -> Speculation:
    """Drafts of the pair's draft model, all of the config's length."""
    return Speculation("draft", config.num_speculative_tokens, notes=notes)


def with_drafter(config: Any, *notes: str) -> Speculation | None:
    """As `fixed_length`, but an engine gets the pair's draft model, never its qualifier."""
    return None if config.drafter == "qualifier" else fixed_length(config, *notes)


def rule_left_out(note: str) -> Callable[[Any], Speculation]:
    """Drafts that end by a rule that no engine has, so that they have no length."""
    return lambda config: Speculation("draft", notes=(note,))


def draft_verify(config: Any) -> Speculation:
    threshold = GREEDY_THRESHOLD if config.threshold is None else config.threshold
    note = f"The threshold stays at {threshold}: Draft & Verify adapts it."
    return Speculation("draft", config.max_draft, threshold, notes=(note,))


def spide(config: Any) -> Speculation:
    overlap = "Draft and target do not run at once: SPIDE's parallel part is left out."
    table = "SPIDE's acceptance table, which ends drafts, is left out."
    notes = tuple(
        note for note, there in ((overlap, config.parallel), (table, config.dynamic)) if there
    )
    return Speculation(
        "draft", None if config.dynamic else config.num_speculative_tokens, notes=notes
    )


def lookahead(config: Any) -> Speculation:
    note = (
        "N-grams come from the text alone: the lookahead window, which guesses others, is left out."
    )
    return Speculation("ngram", config.ngram - 1, ngram=1, notes=(note,))


EXPORTED: dict[str, Callable[[Any], Speculation | None]] = {
    "autoregressive": lambda config: Speculation(
        "none", notes=("The config is plain decoding: nothing is speculated.",)
    ),
    "vanilla_sd": lambda config: with_drafter(
        config,
        *(["The prompt is read before anything is drafted."] if config.draft_first else []),
    ),
    "svip": rule_left_out("SVIP's entropy threshold, which ends drafts, is left out."),
    "draft_verify": draft_verify,
    "adaedl": rule_left_out("AdaEDL's bound, which ends drafts, is left out."),
    "hf_dynamic": lambda config: Speculation(
        "draft", config.max_draft, config.threshold, config.heuristic
    ),
    "spide": spide,
    "pearl": lambda config: fixed_length(
        config, "Draft and target do not run at once: PEARL's overlap is left out."
    ),
    "specdec_pp": rule_left_out("The acceptance head, which ends drafts, is left out."),
    "prompt_lookup": lambda config: Speculation(
        "ngram",
        config.prompt_lookup_num_tokens,
        ngram=config.max_matching_ngram_size,
        notes=("The datastore is left out.",) if config.use_datastore else (),
    ),
    "suffix": lambda config: Speculation(
        "ngram",
        config.max_draft,
        ngram=3,
        suffix=SuffixSettings(config.alpha, config.min_probability),
        notes=(
            "vLLM alone has suffix decoding; it caches answers instead of reading the datastore. "
            "The others look up n-grams of the context, and the rule for a draft's length is "
            "left out.",
        ),
    ),
    "eagle3": lambda config: Speculation(
        "eagle3",
        config.num_speculative_tokens,
        notes=("The tree becomes a chain of as many tokens as it has levels.",)
        if config.top_k > 1
        else (),
    ),
    "hybrid": lambda config: Speculation(
        "ngram",
        config.max_draft,
        ngram=3,
        notes=(
            "Only n-grams of the text are left: no other engine chooses the drafter by round. "
            "With a head, save_head= exports that to vLLM and SGLang instead.",
        ),
    ),
    "lookahead": lookahead,
    "sprinter": rule_left_out(
        "SPRINTER's verifier, which judges tokens in the target's place, is left out."
    ),
    "double": rule_left_out(
        "Draft and target do not run at once, and neither looks anything up: Double's overlap and "
        "guesses are left out."
    ),
    "duo_decoding": lambda config: fixed_length(
        config,
        "Draft and target do not run at once, and one sequence is drafted: DuoDecoding's "
        "overlap and sequences are left out.",
    ),
    "csd": lambda config: fixed_length(
        config, "CSD's rescue of rejected tokens, by memory and gate, is left out."
    ),
    "fuzzy_sd": lambda config: with_drafter(
        config, "The divergence that fuzzy_sd tolerates is left out."
    ),
    "mentored": lambda config: fixed_length(
        config, "The divergence budget of mentored decoding is left out."
    ),
    "lossy_sd": lambda config: fixed_length(
        config, "lossy_sd's threshold on p(x)/p(t*) is left out."
    ),
    "fly": lambda config: fixed_length(config, "FLy's deferral of rejections is left out."),
    "asd": lambda config: fixed_length(config, "ASD's budget of regret is left out."),
}
"""Strategy → what other engines can do of it, by its config; None, or no entry: nothing sensible
would remain."""


def head_of_hybrid(config: Any) -> Speculation | None:
    """What remains of `hybrid` where an EAGLE-3 head is at hand and the engine loads one."""
    if config.drafter not in ("auto", "head"):
        return None
    note = (
        "Only the head is left, with drafts of one length: no other engine chooses drafter and "
        "length by round."
    )
    return Speculation("eagle3", min(config.max_draft, HEAD_LENGTH), notes=(note,))


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
    cls, config = find_strategy(strategy), build_strategy(strategy, dict(parameters)).config
    chosen = head_of_hybrid(config) if head and strategy == "hybrid" else None
    if chosen is not None and draft_tokens is not None:
        chosen = replace(chosen, length=draft_tokens)
    exported = EXPORTED.get(strategy)
    found = chosen or (exported(config) if exported else None)
    if found is None:
        raise DraftwellError(
            f"{strategy} cannot be exported: no other engine has what it drafts from, so "
            "nothing that was tuned would "
            "remain: serve it with `draftwell deploy`, or tune with --set lossless_only=true and "
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
                f"Every draft has the {draft_tokens} tokens of draft_tokens; the tuned rule "
                "that ends drafts is left out."
            ),
        )
        return Speculation("draft", draft_tokens, notes=notes)
    return replace(found, notes=notes)
