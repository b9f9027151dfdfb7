"""Training: SPRINTER's verifier (`verifier`) and SpecDec++'s acceptance head (`acceptance_head`),
from collected traces.

Verifier: `settings`, `examples` reads and splits a trace, `logistic` fits, `metrics` tests.
Acceptance head: `head_examples` and `head_network`. Both: `reports` types the results, `report`
shows them. `fit` and `checkpoint` are the training loop of everything that takes gradient steps.
"""
