"""Distilled draft: a few trained layers of any architecture, whose embeddings are borrowed from the
target.

On disk every matrix is int8 with one float32 scale a row, which for linear layers is an output
channel (GPT-2 stores its matrices transposed: an input channel); vectors are float32. The head
covers only `head_tokens`, the ids that the target emits most: everywhere else the draft's
probability is zero, which the exact rule allows. The donor of the embeddings is named by the sha256
of its weights.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Self

from torch import Tensor

from draftwell.serving.artifacts.base import Provenance
from draftwell.serving.artifacts.rounding import restored, rounded
from draftwell.serving.artifacts.trained import Borrower


def lent_names(module: Any) -> frozenset[str]:
    """Names, in a causal language model's state, of what a distilled draft borrows: input and
    output embeddings, tied or not.

    They are found as modules, because every architecture has its own words for them
    (`embed_tokens`, `wte`, `embed_in`, `lm_head`).
    """
    lent = [
        part
        for part in (module.get_input_embeddings(), module.get_output_embeddings())
        if part is not None
    ]
    return frozenset(
        f"{name}.{key}"
        for name, child in module.named_modules(remove_duplicate=False)
        if any(child is part for part in lent)
        for key in child.state_dict()
    )


class DistilledDraft(Borrower):
    """A draft without its embeddings, in transformers' names, dequantised to float32.

    Args:
        state: layers, final norm and, where the architecture has them, embeddings of positions;
            float32.
        config: the transformers configuration of the draft as a dict (its `num_hidden_layers` is
            the draft's).
        head_tokens: `[head]` int64, ids that the head covers, ascending.
        donor: sha256 of the weights file that lends embeddings and head rows.
    """

    kind = "distilled_draft"

    def __init__(
        self,
        state: dict[str, Tensor],
        config: dict[str, Any],
        head_tokens: Tensor,
        donor: str,
        provenance: Provenance,
    ):
        self.state, self.config, self.head_tokens, self.donor = state, config, head_tokens, donor
        self.provenance = provenance

    def write_files(self, folder: Path) -> None:
        from safetensors.torch import save_file

        tensors: dict[str, Tensor] = {"head_tokens": self.head_tokens.int()}
        state = {name: tensor.float().contiguous() for name, tensor in self.state.items()}
        save_file(tensors | rounded(state), folder / "draft.safetensors")
        (folder / "draft.json").write_text(
            json.dumps({"config": self.config, "donor": self.donor}, indent=2, sort_keys=True)
            + "\n"
        )

    @classmethod
    def read_files(cls, folder: Path, provenance: Provenance) -> Self:
        from safetensors.torch import load_file

        tensors = load_file(folder / "draft.safetensors")
        meta = json.loads((folder / "draft.json").read_text())
        head = tensors.pop("head_tokens").long()
        return cls(restored(tensors), meta["config"], head, meta["donor"], provenance)
