"""Training: SPRINTER's verifier (`verifier`) and SpecDec++'s acceptance head (`acceptance_head`), from collected traces.

Verifier: `examples` reads and splits a trace, `logistic` fits, `metrics` tests, `transfer` crosses tasks. Acceptance head:
`head_examples` and `head_network`. Both: `reports` types the results, `plots` and `verifier_page` show them, `score_cost` times a score.
"""

from components.train.acceptance_head import train_acceptance_head
from components.train.head_network import HeadTrainingSettings
from components.train.reports import HeadReport, VerifierReport
from components.train.verifier import train_verifier

__all__ = ["HeadReport", "HeadTrainingSettings", "VerifierReport", "train_acceptance_head", "train_verifier"]
