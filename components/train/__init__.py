"""Training of learned artifacts: SPRINTER's verifier and SpecDec++'s acceptance head."""
