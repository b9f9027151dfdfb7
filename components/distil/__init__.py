"""Distillation: a small draft out of a target's own layers, trained on the target's own text."""
