"""SPRINTER's schedule: a learned verifier keeps tokens on its own; the target is called only at a
flag.

SPRINTER, Algorithm 2: draft x and score it; keep it without a target call while score >= tau. A
flag, a stop token (ours), or the last token of a run at its cap: the target runs once over all it
has not seen and judges only that token, exactly; kept: bonus from the next row.
"""

from __future__ import annotations

from collections.abc import Callable

from draftwell.serving.runtime.commands import Step
from draftwell.serving.runtime.logits import Span
from draftwell.serving.runtime.protocols import AcceptanceRule
from draftwell.serving.runtime.session.session import Session
from draftwell.serving.runtime.types import Draft, Verdict


def sequential(
    session: Session,
    trusts: Callable[[Span, Span | None, int], bool],
    rule: AcceptanceRule,
    cap: int,
    reads_after: bool,
) -> Step[None]:
    """Run a request to its end.

    Args:
        trusts: (row that produced x, row having read x or None, x) → keep x without asking the
            target.
        rule: judges the one token that the target is asked about.
        cap: longest run; its last token is always judged.
        reads_after: `trusts` wants the row having read x (its forward pass is the next draft step,
            so nothing is wasted).
    """
    yield from session.prefill()
    text, draft = session.text, session.draft
    row: Span | None = None  # the draft's row after the text, where a forward pass already gave it
    while not text.finished:
        if (yield from session.follow_prediction()):
            continue
        if session.longest_draft == 0:
            yield from session.decode_plainly()
            continue
        longest = min(cap, session.longest_draft)
        run = Draft()
        while True:
            row = row or (yield from draft.read(text.ids))
            token, prob = yield from row.draw(0, session.rng.draft)
            run += Draft([token], [row], probs=[prob])
            after = (yield from draft.read([*text.ids, token])) if reads_after else None
            must_ask = token in session.sampling.stop_token_ids or len(run) >= longest
            if must_ask or not trusts(row, after, token):
                break
            session.append([token], ["rescued"])
            row = after
            if text.finished:
                break
        row = None
        session.stats.drafted += len(run)
        if text.finished:
            session.stats.count(
                run,
                Verdict(accepted=len(run), token=None, judged=len(run), rescued_at=range(len(run))),
            )
            yield from session.rate_rest()
            return
        yield from ask_target(session, run, rule)


def ask_target(session: Session, run: Draft, rule: AcceptanceRule) -> Step[None]:
    """Judge the last token of a run; the earlier ones are text already."""
    text, flagged = session.text, run[-1:]
    trusted = len(run) - 1
    rows = yield from session.verify(flagged)
    verdict = yield from rule.judge(flagged, rows, session.rng, bonus=text.remaining > 1)
    kept = len(text.ids) + verdict.accepted
    session.append(
        flagged.tokens[: verdict.accepted] + ([verdict.token] if verdict.token is not None else []),
        verdict.origins,
        rows,
    )
    for lane in session.lanes.values():
        lane.rollback(kept)
    rescued = [*range(trusted), *(trusted + i for i in verdict.rescued_at)]
    session.stats.count(run, Verdict(trusted + verdict.accepted, verdict.token, len(run), rescued))
