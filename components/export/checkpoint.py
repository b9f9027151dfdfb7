"""Drafts and heads as folders that other engines read: with the weights that they borrow from their
target."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from draftwell.serving.artifacts.distilled_draft import DistilledDraft
from draftwell.serving.artifacts.eagle3_head import Eagle3Head
from draftwell.serving.artifacts.pair_files import weights_digest
from draftwell.serving.errors import DraftwellError
from draftwell.serving.files import whole_folder
from draftwell.serving.runtime.model_files import build_distilled, load_module, load_tokenizer


@contextmanager
def new_folder(out: Path, what: str) -> Iterator[Path]:
    """A folder to write into, which becomes `out` when all is written.

    Raises:
        DraftwellError: `out` exists already.
    """
    if out.exists():
        raise DraftwellError(
            f"{out} exists already: name a new folder for the {what}", code="folder_exists"
        )
    with whole_folder(out) as place:
        yield place


def save_draft(target: Path, draft: Path, out: Path, dtype: str = "float32") -> Path:
    """Write a distilled draft with its target's embeddings and tokenizer into the new folder `out`.

    Args:
        target, draft: folders of the target's weights and of the draft's artifact.
    Raises:
        DraftwellError: `out` exists already, or the draft was made from another target.
    """
    import torch
    from transformers.utils import logging

    logging.disable_progress_bar()
    with new_folder(out, "draft") as into:
        found = DistilledDraft.load(draft)
        found.check_donor(weights_digest(target))
        donor = load_module(target, getattr(torch, dtype), "cpu")
        module: Any = build_distilled(found, donor)
        module.generation_config = donor.generation_config
        module.save_pretrained(into)
        load_tokenizer(target).save_pretrained(into)
    return out


def save_head(target: Path, head: Eagle3Head, out: Path) -> Path:
    """Write an EAGLE-3 head with the rows of its target's output embedding into the new folder
    `out`, as vLLM and SGLang load it.

    Args:
        target: folder of the target's weights.
    Raises:
        DraftwellError: `out` exists already, or the head was trained for another target.
    """
    import torch

    with new_folder(out, "head") as into:
        head.check_donor(weights_digest(target))
        module = load_module(target, torch.float32, "cpu")
        head.write_standalone(into, module.get_output_embeddings().weight[head.head_tokens])
    return out
