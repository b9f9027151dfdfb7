"""The cost of a score of a verifier or an acceptance head, compared with the draft forward pass
whose token it judges."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

from draftwell.components.calibrate.hardware_profile import filler, synchronise
from draftwell.components.train.reports import ScoreCost
from draftwell.serving.errors import DraftwellError
from draftwell.serving.runtime.commands import Forward
from draftwell.serving.runtime.pair import LoadedPair
from draftwell.serving.runtime.types import Rows


def time_score(
    pair: LoadedPair, score: Callable[[Rows, int], float], *, repeats: int = 100, context: int = 128
) -> ScoreCost:
    """Median times of a score and of a draft forward pass over one token, measured alternately, at
    temperature 0.

    Each score reads a row of which only the token has been read, as in SPRINTER's loop. The first
    runs are cold and left out.

    Args:
        score: `(row, token)` → score.
        context: tokens in the draft's slot, fewer where they do not fit.
    Raises:
        DraftwellError: the pair has no draft (`no_draft`).
    """
    if "draft" not in pair.models:
        raise DraftwellError(
            f"pair {pair.name} has no draft model, so no token is scored: choose a pair with one",
            code="no_draft",
        )
    model, sampling = pair.models["draft"], pair.sampling(max_tokens=1)
    context = min(context, model.max_context - 1)
    scored, drafted = list[float](), list[float]()
    slot = model.open()
    try:
        model.forward([Forward("draft", slot, filler(pair, context), prefill=True)])
        for _ in range(repeats + 3):
            model.rollback(slot, context)
            synchronise(pair.device)
            start = time.perf_counter()
            output = model.forward([Forward("draft", slot, (1,))])[0]
            synchronise(pair.device)
            drafted.append(time.perf_counter() - start)
            row = output.rows(sampling)
            token = row.top[0]
            start = time.perf_counter()
            score(row, token)
            scored.append(time.perf_counter() - start)
    finally:
        model.close(slot)
    score_us, draft_us = (1e6 * median(seconds[3:]) for seconds in (scored, drafted))
    return ScoreCost(score_us=score_us, draft_us=draft_us, share=score_us / draft_us)
