"""SPRINTER's verifier as a stop policy: it ends a draft instead of replacing the target, so the
output stays exact."""

from __future__ import annotations

from draftwell.serving.artifacts.verifier import Verifier
from draftwell.serving.errors import DraftwellError
from draftwell.serving.runtime.drafting.stopping import FixedLength
from draftwell.serving.runtime.types import Rows


class Untrusted(FixedLength):
    """Stop after a token whose score falls below tau; the token stays, and the target judges the
    whole draft.

    Args:
        verifier: reads the state that produced a token (`before`) or `scalars`; `after` is known
            one forward pass too late.
        tau: in [0, 1]; None takes the verifier's own threshold.
        cap: longest draft.
    """

    def __init__(self, verifier: Verifier, tau: float | None = None, cap: int = 20):
        super().__init__(cap)
        if "after" in verifier.features:
            raise DraftwellError(
                "this verifier reads the state after a token, which a stop policy does not "
                "have: train one with "
                "the features before or scalars",
                code="unsupported_features",
            )
        self.verifier, self.tau = verifier, verifier.threshold if tau is None else tau

    def stop_after(self, row: Rows, token: int) -> bool:
        return (
            super().stop_after(row, token)
            or self.verifier.score_drafted(row, None, token) < self.tau
        )
