"""What a draft is expected to gain over plain decoding, in tokens of plain decoding: the tokens
that will be kept, less what they cost.

With α_i the chance that draft token i is kept given that those before it are, k tokens gain Σ_{j≤k}
Π_{i≤j} α_i. Against that stand k draft steps, and what verifying k + 1 tokens takes longer than
one. Where the difference is not above 0, nothing is drafted.
"""

from __future__ import annotations

from collections.abc import Sequence

from draftwell.serving.artifacts.acceptance_table import AcceptanceTable
from draftwell.serving.artifacts.forward_costs import ascending, seconds_at, seconds_table
from draftwell.serving.artifacts.hardware_profile import HardwareProfile, RoundOverheads
from draftwell.serving.runtime.commands import Role
from draftwell.serving.runtime.drafting.stopping import FixedLength
from draftwell.serving.runtime.logits import Span


class RoundCosts:
    """Times of a round, what is spent outside forward passes included, in rounds of plain decoding.

    Args:
        verify: k → of a target pass over k tokens, from 0 tokens on; never falling, 1 for one.
        step: of a draft step.
        reading: of a drafting model's pass over one more prompt token.
    """

    def __init__(self, verify: Sequence[float], step: float, reading: float = 0.0):
        self.verify, self.step, self.reading = verify, step, reading

    @classmethod
    def of(
        cls, profile: HardwareProfile, step_seconds: float, longest: int, role: Role | None = None
    ) -> RoundCosts:
        """From measured times, for drafts of at most `longest` tokens.

        Args:
            role: of the model that drafts, which has to read the prompt first; None: nothing has
                to.
        """
        details = profile.details
        rest = (
            details.rest if details else RoundOverheads(round=profile.t_rest, token=0.0, figure=0.0)
        )
        verify = [
            seconds + rest.round + rest.token * max(0, count - 1)
            for count, seconds in enumerate(seconds_table(ascending(profile.t_verify), longest + 1))
        ]
        prefill = details.prefill.get(role, {}) if details and role else {}
        reading = seconds_at(prefill, max(prefill)) / max(prefill) if prefill else 0.0
        alone = verify[1]
        step = step_seconds + rest.figure if step_seconds else 0.0
        return cls([max(1.0, seconds / alone) for seconds in verify], step / alone, reading / alone)

    def lengthening(self, drafted: int, more: int) -> float:
        """What `more` further tokens add to the verification of `drafted` ones."""
        return self.verify[drafted + more + 1] - self.verify[drafted + 1]

    def best_length(self, chances: Sequence[float]) -> tuple[int, float]:
        """Of a draft that cost nothing how many tokens to verify, and their expected gain; (0, 0.0)
        where none is worth it.

        Args:
            chances: α of each token.

        >>> RoundCosts([1.0, 1.0, 1.4, 1.4, 1.4, 1.8], 0.1).best_length([0.5, 0.5, 0.5, 0.1])
        (3, 0.475)
        """
        best, kept, expected = (0, 0.0), 1.0, 0.0
        for length, chance in enumerate(chances, start=1):
            kept *= chance
            expected += kept
            gain = expected - self.lengthening(0, length)
            if gain > best[1]:
                best = length, round(gain, 9)
        return best

    def outlook(self, drafted: int, kept: float, chances: Sequence[float], computed: int) -> float:
        """The best expected gain of drafting further, by one token or more; may be negative.

        Args:
            drafted: tokens so far.
            kept: the chance that all of them are kept.
            chances: α of the tokens to come, one or more.
            computed: draft steps of them that have run already.
        """
        best, expected = -1.0, 0.0
        for more, chance in enumerate(chances, start=1):
            kept *= chance
            expected += kept
            best = max(
                best,
                expected - self.lengthening(drafted, more) - self.step * max(0, more - computed),
            )
        return best


class WorthDrafting(FixedLength):
    """Draft as long as one more token, or several, are expected to gain something.

    Before a token is drawn its distribution is known, and with it the chance that it is kept; of
    those after it the mean is. A draft may be empty: plain decoding is then the better bet.

    Args:
        table: the draft's confidence → the chance that a token is kept.
        ahead: the mean acceptance rate, for draft tokens whose distribution is not known yet.
        max_draft: longest draft.
    """

    def __init__(self, costs: RoundCosts, table: AcceptanceTable, ahead: float, max_draft: int):
        super().__init__(max_draft)
        self.costs, self.table, self.ahead = costs, table, ahead
        self._kept, self._chance = 1.0, 1.0
        self.confidence: list[float] = []
        """Of this draft's tokens, and of one that it stopped before; of a coupled request the share
        of its race's leader, which says more than C."""

    def start(self) -> None:
        super().start()
        self._kept, self.confidence = 1.0, []

    def stop_before(self, row: Span) -> bool:
        raced = row.sampling.coupled
        self.confidence.append(row.contenders(0, 1)[0][1] if raced else row.confidence(0))
        self._chance = self.table.alpha(self.confidence[-1])
        chances = [self._chance, *[self.ahead] * (self.max_draft - self._drafted - 1)]
        return self.costs.outlook(self._drafted, self._kept, chances, computed=1) <= 0.0

    def stop_after(self, row: Span, token: int) -> bool:
        self._kept *= self._chance
        at_cap = super().stop_after(row, token)
        return (
            at_cap
            or self.costs.outlook(
                self._drafted,
                self._kept,
                [self.ahead] * (self.max_draft - self._drafted),
                computed=0,
            )
            <= 0.0
        )
