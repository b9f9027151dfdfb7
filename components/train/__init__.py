"""Training: SPRINTER's verifier (`verifier`) and SpecDec++'s acceptance head (`acceptance_head`),
from collected traces.

Verifier: `settings`, `examples` reads and splits a trace, `logistic` fits, `metrics` tests,
`transfer` crosses tasks. Acceptance head: `head_examples` and `head_network`. Both: `reports` types
the results, `report` shows them, `score_cost` times a score.

Only what needs no torch is imported here, so that the command line starts fast.
"""

from draftwell.components.train.settings import LabelKind, VerifierSettings

__all__ = ["LabelKind", "VerifierSettings"]
