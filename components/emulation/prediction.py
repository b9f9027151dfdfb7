"""What the papers' formulas expect of a curve: every token of a text is accepted independently with
the rate at which vanilla SD accepts on it, and nothing but passes takes time."""

from __future__ import annotations

from draftwell.components.emulation.curve import Curve
from draftwell.components.papers import formulas
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
        return formulas.overlapped_seconds(tokens, alpha, passes, lambda _: gamma, in_turn=in_turn)
    if isinstance(strategy, DuoDecoding):
        gamma = strategy.lengths()[1]
        return first + formulas.overlapped_seconds(
            tokens - 1, alpha, passes, lambda _: gamma, in_turn=in_turn
        )
    if isinstance(strategy, Spide):
        serial = spides_serial_length(strategy, alpha)
        if not strategy.config.parallel:
            return first + formulas.sd_seconds(tokens - 1, alpha, serial, passes)
        times = strategy.artifact(HardwareProfile).when(overlapping=True)
        return first + formulas.overlapped_seconds(
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
