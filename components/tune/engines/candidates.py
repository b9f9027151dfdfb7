"""The ways to speculate that are tried: all that the files and the engine's environment allow."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from draftwell.components.engines.vllm_methods import CASCADE, NEEDS, OFF, Method, VllmFiles
from draftwell.components.tune.engines.ngram_replay import Text, best_n
from draftwell.components.tune.engines.settings import EngineTuneSettings, Lengths

NEEDS_PACKAGE = {"suffix": "arctic-inference"}
"""Method → distribution that the engine's environment must have for it."""

LENGTHS: Mapping[str, Lengths] = {
    "ngram": (3, 5, 8),
    "suffix": (8,),
    CASCADE: (8,),
    "draft_model": (1, 2, 3, 5),
    "eagle3": (1, 2, 3, 5),
}
"""Method → draft lengths that are tried. A draft of n-grams costs next to nothing, so it may be
long; one of a model costs a pass for each token. Suffixes decide their own lengths, up to this."""
NGRAMS = (2, 3, 4)
"""Longest n-grams; texts decide which one is measured."""


def left_out(
    settings: EngineTuneSettings, files: VllmFiles, lacks: Callable[[str], bool]
) -> dict[str, str]:
    """Method → why it cannot be tried here."""
    found = {}
    for name in settings.methods:
        needed, package = NEEDS.get(name), NEEDS_PACKAGE.get(name)
        if needed is not None and getattr(files, needed) is None:
            found[name] = f"the pair has no {needed} that the engine can read"
        elif package is not None and lacks(package):
            found[name] = f"the engine's environment has no {package}: install it there"
    return found


def first_ngram(lengths: Mapping[str, Lengths]) -> Method:
    """The n-gram way that is measured first, whose plain texts tell which n-grams to look up."""
    return Method("ngram", middle_first(lengths["ngram"])[0], middle_first(NGRAMS)[0])


def candidates(
    names: Sequence[str], lengths: Mapping[str, Lengths], texts: Sequence[Text] | None
) -> list[Method]:
    """All ways of these methods, a method's middle length first; of n-grams one for each draft
    length, with the n that `texts` decide.

    Args:
        lengths: method → draft lengths.
        texts: greedy texts of the target; None (sampled ones predict nothing) takes the middle one
            of the n.
    """
    found = []
    for name in names:
        for k in middle_first(lengths[name]) if name != OFF else ():
            n = 0
            if name == "ngram":
                n = best_n(texts, k, NGRAMS) if texts else middle_first(NGRAMS)[0]
            found.append(Method(name, k, n))
    return found


def middle_first(lengths: Sequence[int]) -> list[int]:
    """The same lengths, those in the middle before those at the ends: where time is short, the ends
    are left out.

    >>> middle_first((1, 2, 3, 5)), middle_first((8,))
    ([3, 2, 5, 1], [8])
    """
    middle = len(lengths) // 2
    return [lengths[i] for i in sorted(range(len(lengths)), key=lambda i: abs(i - middle))]
