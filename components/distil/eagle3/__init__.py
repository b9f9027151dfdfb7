"""Training of EAGLE-3 heads: one decoder layer that drafts from the target's own states (arXiv
2503.01840).

`distil` is the entry: the target writes its text with the states of three layers
(`draftwell.components.distil.writers`), `start` finds where training starts, `training` unrolls the
head over its own outputs (`unroll`) and measures how far its drafts reach (`measure`).
`network` is the head itself, under the names that vLLM and SGLang read. All of them import torch,
so nothing is imported here.
"""
