"""What the papers' formulas expect of a curve: every token of a text is accepted independently with
the rate at which vanilla SD accepts on it, and nothing but passes takes time.

`overlapped_time` is SPIDE's Algorithm 1 as `papers.formulas.spide_seconds` has it, for every
strategy that drafts on while the target verifies, and also for models that take turns.
"""

from __future__ import annotations

from collections.abc import Callable

from draftwell.components.emulation.curve import Curve
from draftwell.components.papers import formulas
from draftwell.serving.artifacts.forward_costs import seconds_at
from draftwell.serving.artifacts.hardware_profile import HardwareProfile
from draftwell.serving.runtime.strategies.base import Strategy
from draftwell.serving.runtime.strategies.lossless.duo_decoding import DuoDecoding
from draftwell.serving.runtime.strategies.lossless.pearl import Pearl
from draftwell.serving.runtime.strategies.lossless.spide import Spide


def predicted_time(
    strategy: Strategy, curve: Curve, tokens: int, alpha: float, *, in_turn: bool
) -> float | None:
    """Time of a text whose prompt both models have read, in the curve's unit; None where no formula
    is known, or the draft has no curve.

    DuoDecoding counts as one sequence: that another sequence may be kept is not in the formula.

    Args:
        strategy: with the profile of this curve.
        tokens: of the text, its first one included.
        alpha: accepted / judged draft tokens of vanilla SD on the text; a first token that is
            judged, too, as PEARL's is, counts like the others.
        in_turn: draft and target share a device.
    """
    if strategy.name == "autoregressive":
        return tokens * curve.target[1]
    if curve.draft is None:
        return None
    passes = curve.draft[1], curve.target_times()
    first = curve.target[1]  # the token that comes with the prompt's last one
    if isinstance(strategy, Pearl):
        gamma = strategy.gamma()
        return overlapped_time(tokens, alpha, passes, lambda _: gamma, in_turn=in_turn)
    if isinstance(strategy, DuoDecoding):
        gamma = strategy.lengths()[1]
        return first + overlapped_time(tokens - 1, alpha, passes, lambda _: gamma, in_turn=in_turn)
    if isinstance(strategy, Spide):
        serial = spides_serial_length(strategy, alpha)
        if not strategy.config.parallel:
            return first + formulas.sd_seconds(tokens - 1, alpha, serial, passes)
        times = strategy.artifact(HardwareProfile).when(overlapping=True)
        return first + overlapped_time(
            tokens - 1,
            alpha,
            passes,
            lambda pending: strategy.overlap_steps(times, pending),
            serial=serial,
            in_turn=in_turn,
        )
    if strategy.name == "vanilla_sd":
        gamma = strategy.config.num_speculative_tokens
        return first + formulas.sd_seconds(tokens - 1, alpha, gamma, passes)
    return None


def spides_serial_length(strategy: Spide, alpha: float) -> int:
    """Tokens that SPIDE drafts before it verifies."""
    config = strategy.config
    if not config.dynamic:
        return int(config.num_speculative_tokens)
    return formulas.serial_length(alpha, config.tau, strategy.most_unverified)


def overlapped_time(
    tokens: int,
    alpha: float,
    passes: formulas.Passes,
    steps: Callable[[int], int],
    *,
    serial: int = 0,
    in_turn: bool = False,
) -> float:
    """Time in which a strategy that drafts on while the target verifies writes a text.

    A cycle begins with `serial` drafts. The target judges what is pending and the first token that
    is drafted meanwhile; as long as all are kept, the others are pending next. A rejection ends the
    cycle.

    Args:
        tokens: to write.
        passes: of draft and target.
        steps: pending tokens → tokens that are drafted during their verification.
        in_turn: a verification and its drafts take their sum, not the longer of the two.

    >>> overlapped_time(4, 1.0, (0.5, {1: 1.0}), lambda pending: 2)
    3.0
    """
    draft, verify = passes
    fresh = [0.0]  # tokens left → time from the beginning of a cycle
    going = [[0.0]]  # tokens left → pending drafts → time from their verification on
    longest = max(steps(0), serial)
    longest = max(longest, *(steps(pending) for pending in range(longest + 1)))
    verifying = [seconds_at(verify, pending + 1) for pending in range(longest + 1)]
    for left in range(1, tokens + 1):
        lost = formulas.after_rejection(left, alpha, fresh, longest + 1)
        row = []
        for pending in range(min(longest, left) + 1):
            drafted = min(steps(pending), left - pending)
            both = verifying[pending], drafted * draft
            judged = pending + min(1, drafted)
            kept = (
                going[left - judged][drafted - 1] if drafted else fresh[max(0, left - pending - 1)]
            )
            row.append((sum(both) if in_turn else max(both)) + alpha**judged * kept + lost[judged])
        going.append(row)
        begun = min(serial, left - 1)
        fresh.append(begun * draft + row[begun])
    return fresh[tokens]
