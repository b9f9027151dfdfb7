"""The search space, the trials in it, and the models that order trials before any is measured."""
