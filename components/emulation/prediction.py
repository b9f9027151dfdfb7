"""What the papers' formulas expect of a curve: every token of a text is accepted independently with
the rate at which vanilla SD accepts on it, and nothing but passes takes time."""

from __future__ import annotations

from functools import lru_cache

from draftwell.components import formulas
from draftwell.components.emulation.curve import Curve
from draftwell.components.emulation.result import EmulatedRun
from draftwell.serving.artifacts.base import Provenance
from draftwell.serving.artifacts.hardware_profile import HardwareProfile
from draftwell.serving.runtime.strategies import StrategyResources, build_strategy
from draftwell.serving.runtime.strategies.base import Strategy
from draftwell.serving.runtime.strategies.lossless.duo_decoding import DuoDecoding
from draftwell.serving.runtime.strategies.lossless.pearl import Pearl
from draftwell.serving.runtime.strategies.lossless.spide import Spide


def profile_of(curve: Curve, made_of: Provenance, cost: float | None = None) -> HardwareProfile:
    """The curve as the hardware profile by which strategies choose.

    Args:
        cost: a draft pass over a target pass, where the draft has no curve.
    """
    times, cost = curve.target_times(), curve.cost or cost
    return HardwareProfile(None if cost is None else cost * times[1], times, 0.0, made_of)


def predicted_speeds(run: EmulatedRun) -> dict[str, float]:
    """Tokens for each unit of the curve's time, of the strategies that have a formula.

    Of each text with the acceptance rate of the fastest vanilla SD. Another strategy's own depends
    on which tokens it has judged: it counts only where no vanilla SD was measured.
    """
    sd = [row for row in run.rows.values() if row.strategy == "vanilla_sd"]
    profile = profile_of(run.curve, Provenance(pair=run.pair, fingerprint=run.fingerprint))
    resources = StrategyResources({profile.kind: profile})
    found = {}
    for label, row in run.rows.items():
        base = max(sd, key=lambda one: one.speed or 0.0) if sd else row
        strategy = build_strategy(row.strategy, row.parameters, resources)
        times = [
            predicted_time(
                strategy,
                profile,
                tokens,
                accepted / max(1, judged),
                in_turn=run.placement == "shared",
                first_kept=first,
            )
            for tokens, accepted, judged, first in zip(
                row.tokens, base.accepted, base.judged, run.first_kept, strict=True
            )
        ]
        known = [time for time in times if time is not None]
        if known:
            found[label] = sum(row.tokens) / sum(known)
    return found


def predicted_time(
    strategy: Strategy,
    profile: HardwareProfile,
    tokens: int,
    alpha: float,
    *,
    in_turn: bool,
    first_kept: bool | None = None,
) -> float | None:
    """Time of a text whose prompt both models have read, in the curve's unit; None where no formula
    is known, or the draft has no curve.

    DuoDecoding counts as one sequence: that another sequence may be kept is not in the formula.

    Args:
        profile: of the curve, as the strategy has it.
        tokens: of the text, its first one included.
        alpha: accepted / judged draft tokens of vanilla SD on the text.
        in_turn: draft and target share a device.
        first_kept: whether the draft's first token, which PEARL judges and vanilla SD does not
            draft, is the target's; None: with chance α, like the others.
    """
    first = profile.t_verify[1]  # the token that comes with the prompt's last one
    if strategy.name == "autoregressive":
        return tokens * first
    if profile.t_draft is None:
        return None
    passes = profile.t_draft, profile.t_verify
    if isinstance(strategy, Pearl):
        return pearls_time(strategy.gamma(), passes, tokens, alpha, in_turn, first_kept)
    if isinstance(strategy, DuoDecoding):
        gamma = strategy.lengths()[1]
        return first + formulas.overlapped_seconds(
            tokens - 1, alpha, passes, lambda _: gamma, in_turn=in_turn
        )
    if isinstance(strategy, Spide):
        serial = spides_serial_length(strategy, alpha)
        if not strategy.config.parallel:
            return first + formulas.sd_seconds(tokens - 1, alpha, serial, passes)
        return first + formulas.overlapped_seconds(
            tokens - 1,
            alpha,
            passes,
            lambda pending: spides_overlap_steps(strategy, pending),
            serial=serial,
            in_turn=in_turn,
        )
    if strategy.name == "vanilla_sd":
        gamma = strategy.config.num_speculative_tokens
        return first + formulas.sd_seconds(tokens - 1, alpha, gamma, passes)
    return None


def pearls_time(
    gamma: int,
    passes: formulas.Passes,
    tokens: int,
    alpha: float,
    in_turn: bool,
    first_kept: bool | None,
) -> float:
    """The time of a text by PEARL, whose first draft token is judged with the prompt.

    The formula is the sum over both cases of the first token, of which that of a rejection is known
    by itself; so the other one is what is left.
    """

    def whole(tokens: int) -> float:
        return formulas.overlapped_seconds(tokens, alpha, passes, lambda _: gamma, in_turn=in_turn)

    if first_kept is None or not alpha:
        return whole(tokens)
    both = passes[1][1], passes[0] * min(gamma, tokens)
    rejected = (sum(both) if in_turn else max(both)) + whole(tokens - 1)
    if not first_kept:
        return rejected
    return (whole(tokens) - (1 - alpha) * rejected) / alpha


def spides_serial_length(strategy: Spide, alpha: float) -> int:
    """Tokens that SPIDE drafts before it verifies."""
    config = strategy.config
    if not config.dynamic:
        return int(config.num_speculative_tokens)
    return formulas.serial_length(alpha, config.tau, strategy.most_unverified)


@lru_cache(maxsize=1024)
def spides_overlap_steps(strategy: Spide, pending: int) -> int:
    """Tokens that SPIDE drafts while so many are verified."""
    return strategy.overlap_steps(strategy.artifact(HardwareProfile), pending)
