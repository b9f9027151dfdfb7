"""Models whose layers the library computes, and texts that pass through them in any company."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
import torch

from draftwell.serving.runtime.commands import Forward
from draftwell.serving.runtime.models.cuda.cuda_llama import CudaLlama
from draftwell.serving.runtime.models.lean_llama import LeanLlama
from draftwell.serving.runtime.models.native.library import compiler

by_library = partial(LeanLlama, compiled="on")
"""`LeanLlama` by the library."""
compiles = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
WAYS = [pytest.param(LeanLlama, id="torch"), pytest.param(by_library, id="library", marks=compiles)]
"""Both ways to compute a model's layers."""
ALL_WAYS = [*WAYS, pytest.param(CudaLlama, id="as for CUDA")]
"""And passes of fixed shapes, which leave no layer out."""


def logits_of(model: LeanLlama, text: Sequence[int], cuts: Sequence[int] = ()) -> torch.Tensor:
    """Of all tokens of a text that is read alone, cut before these places."""
    slot, found, at = model.open(), [], 0
    for end in (*cuts, len(text)):
        row = Forward("target", slot, tuple(text[at:end]), end - at)
        found.append(model.forward([row])[0].logits)
        at = end
    model.close(slot)
    return torch.cat(found)
