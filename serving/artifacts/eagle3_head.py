"""EAGLE-3 head: one decoder layer that drafts from the target's own states (arXiv 2503.01840),
trained for one target.

The files are the layout that vLLM and SGLang read: `config.json`, and `model.safetensors` in
bfloat16 with the parameters of `LlamaForCausalLMEagle3`, `d2t` (a draft index plus its value is the
target's id) and `t2d` (which of the target's ids the head covers). Embeddings and rows of the
output embedding are the target's, which `head.json` names by the sha256 of its weights;
`write_standalone` adds the rows, which vLLM wants in the file. A head that was trained elsewhere
may bring its own of both, and norms that ours lack (components/distil/eagle3/published.py).
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from draftwell.serving.artifacts.base import ArtifactError, Provenance
from draftwell.serving.artifacts.rounding import restored, rounded
from draftwell.serving.artifacts.trained import Borrower

CONFIG, WEIGHTS, OURS = "config.json", "model.safetensors", "head.json"


class Eagle3Head(Borrower):
    """A head without the embeddings that it borrows.

    Args:
        state: parameters by the names of `LlamaForCausalLMEagle3`; kept in the configuration's
            `torch_dtype`, bfloat16 where it names none.
        config: what `config.json` holds.
        head_tokens: `[draft vocabulary]` int64, the target's ids that the head covers, ascending.
        layers: numbers of the target's layers whose input states the head reads: low, middle, high.
        donor: sha256 of the target's weights.
        int8: matrices are kept on disk in 8 bits, with a scale for each output channel: half the
            size, and then for our runtime alone until `write_standalone` writes them out.
    Raises:
        ArtifactError: tokens or a matrix do not fit the configuration.
    """

    kind = "eagle3_head"

    def __init__(
        self,
        state: dict[str, Tensor],
        config: dict[str, Any],
        head_tokens: Tensor,
        layers: tuple[int, ...],
        donor: str,
        provenance: Provenance,
        *,
        int8: bool = False,
    ):
        self.dtype: torch.dtype = getattr(torch, config.get("torch_dtype", "bfloat16"))
        self.state = {name: tensor.to(self.dtype).contiguous() for name, tensor in state.items()}
        self.config, self.head_tokens, self.layers, self.donor = (
            dict(config),
            head_tokens.long(),
            tuple(layers),
            donor,
        )
        self.provenance, self.int8 = provenance, int8
        self._check()

    def _check(self) -> None:
        ids, hidden = self.head_tokens, self.config["hidden_size"]
        if (
            len(ids) != self.config["draft_vocab_size"]
            or not bool((ids.diff() > 0).all())
            or not 0 <= int(ids[0]) <= int(ids[-1]) < (self.config["vocab_size"])
        ):
            raise ArtifactError(
                "the head's tokens are not ascending ids of its vocabulary: train the head again",
                code="bad_head",
            )
        width = self.config.get("target_hidden_size") or hidden
        if self.state["fc.weight"].shape != (hidden, len(self.layers) * width):
            raise ArtifactError(
                (
                    f"the head does not read {len(self.layers)} states of {width} numbers: "
                    "train the head again"
                ),
                code="bad_head",
            )

    def bound_to(self, pair: str, fingerprint: str) -> Eagle3Head:
        """The same head for another pair: it depends on the target alone, a fingerprint on the
        draft and the number format too."""
        other = copy.copy(self)
        other.provenance, other.digest = (
            self.provenance.model_copy(update={"pair": pair, "fingerprint": fingerprint}),
            None,
        )
        return other

    def write_files(self, folder: Path) -> None:
        self._write(folder, rounded(self.state) if self.int8 else self.state)
        (folder / OURS).write_text(
            json.dumps({"donor": self.donor, "layers": list(self.layers)}, indent=2, sort_keys=True)
            + "\n"
        )

    def write_standalone(self, folder: Path, lm_head_rows: Tensor) -> None:
        """Write the head as vLLM and SGLang load it: their two files, with the rows of the output
        embedding.

        Args:
            folder: of the two files, which is created.
            lm_head_rows: `[draft vocabulary, hidden]`, the target's rows of `head_tokens`; ignored
                where the head has its own.
        Raises:
            ArtifactError: rows of another shape.
        """
        rows = self.state.get("lm_head.weight", lm_head_rows)
        wanted = (len(self.head_tokens), self.config["hidden_size"])
        if rows.shape != wanted:
            raise ArtifactError(
                (
                    f"the rows are {list(rows.shape)}, not {list(wanted)}: give the "
                    "target's rows of the head's tokens"
                ),
                code="bad_head",
            )
        folder.mkdir(parents=True, exist_ok=True)
        rows = rows.detach().cpu().to(self.dtype).contiguous()
        self._write(folder, {**self.state, "lm_head.weight": rows})

    def _write(self, folder: Path, state: Mapping[str, Tensor]) -> None:
        from safetensors.torch import save_file

        covered = torch.zeros(self.config["vocab_size"], dtype=torch.bool)
        covered[self.head_tokens] = True
        tensors = {
            **state,
            "d2t": self.head_tokens - torch.arange(len(self.head_tokens)),
            "t2d": covered,
        }
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
        (folder / CONFIG).write_text(json.dumps(self.config, indent=2, sort_keys=True) + "\n")

    @classmethod
    def read_files(cls, folder: Path, provenance: Provenance) -> Self:
        from safetensors.torch import load_file

        tensors = load_file(folder / WEIGHTS)
        del tensors["t2d"]
        shifts = tensors.pop("d2t")
        int8 = any(tensor.dtype == torch.int8 for tensor in tensors.values())
        ours = json.loads((folder / OURS).read_text())
        return cls(
            restored(tensors),
            json.loads((folder / CONFIG).read_text()),
            shifts + torch.arange(len(shifts)),
            tuple(ours["layers"]),
            ours["donor"],
            provenance,
            int8=int8,
        )
