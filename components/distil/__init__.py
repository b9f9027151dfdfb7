"""Distillation: a draft of a few of a target's own layers, trained on the target's own text.

`distil` is the entry: `corpus` has the target write (`writers`), `training` trains the kept layers
(`family`), `artifact` stores the draft and measures its agreement. `instructions` lets the target
invent its prompts, and `default_pair` is the recipe of the shipped draft and qualifier. All of them
import torch, so nothing is imported here.
"""
