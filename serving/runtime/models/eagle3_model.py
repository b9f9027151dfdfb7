"""An EAGLE-3 head over slots: one decoder layer that drafts from the target's hidden states
(2503.01840, section 3.1).

Its input at index i is a pair: the target's states at token i, and the embedding of token i + 1;
its output predicts token i + 2. Where the target has not read token i yet, the head's own output
before its norm takes the place of the states. Embeddings and the rows of the output head are the
target's, where the head has none of its own. Names of weights are those of the published
checkpoints, which vLLM and SGLang load too, and so are the switches of its configuration:
`norm_before_residual`, `norm_before_fc`, `fc_norm` and `norm_output` (speculators, `eagle3`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from ctypes import CDLL
from functools import partial
from typing import Any

import torch
from torch import Tensor

from draftwell.serving.artifacts.eagle3_head import Eagle3Head
from draftwell.serving.errors import DraftwellError
from draftwell.serving.number_format import Weights
from draftwell.serving.runtime.commands import Forward
from draftwell.serving.runtime.logits import Logits, Span
from draftwell.serving.runtime.model import Model
from draftwell.serving.runtime.models.architecture import Architecture
from draftwell.serving.runtime.models.beside import kept_beside
from draftwell.serving.runtime.models.eagle3_layer import NORMS, Eagle3Layer
from draftwell.serving.runtime.models.lean_layer import Rope, norm
from draftwell.serving.runtime.models.lean_llama import CHUNK, passes
from draftwell.serving.runtime.models.linear import MakeLinear, linear
from draftwell.serving.runtime.models.module_model import ModuleModel, positions_of
from draftwell.serving.runtime.models.native.decoder import NativeLayers, Product, dots
from draftwell.serving.runtime.models.row_attention import Placed, RowAttention
from draftwell.serving.runtime.models.seen_tokens import SeenTokens
from draftwell.serving.runtime.models.slots import Slots
from draftwell.serving.runtime.slot_texts import SlotText

SCALINGS = ("linear", "llama3", "yarn")
"""Scalings of rotary positions that depend on the position alone."""


class Eagle3Model(Model):
    """A head over as many slots as its target has; slot content is pairs, the
    first of them of tokens 0 and 1.

    Args:
        head: the trained head.
        target: keeps the hidden states that the head was trained on (`ModuleModel.features`), and
            lends embeddings and head rows.
    """

    slots: Slots
    trees = True

    def __init__(self, head: Eagle3Head, target: ModuleModel):
        self.vocab_size, self.max_context, self.device, self.dtype = (
            target.vocab_size,
            target.max_context,
            target.device,
            target.dtype,
        )
        config = head.config
        self.shape, first = architecture_of_head(config), bool(config.get("norm_before_residual"))
        self.slots = Slots(
            [(self.shape.kv_heads, self.shape.head_dim)],
            target.slots.count,
            self.max_context,
            self.dtype,
            self.device,
        )
        weights = {name: tensor.to(self.device, self.dtype) for name, tensor in head.state.items()}
        # the library's layer takes what comes before the norm as its residual
        self.library: CDLL | None = None if first else getattr(target, "library", None)
        make: MakeLinear = linear
        if self.library is not None:
            # a step reads every weight for one token: in 8 bits half as much
            rounding: Weights | None = "int8" if self.dtype == torch.bfloat16 else None
            make = partial(Product, self.library, weights=rounding)
        with torch.inference_mode():
            lent: Tensor = target.module.get_input_embeddings().weight
            self.embedding = weights.get("embed_tokens.weight", lent)
            self.head_tokens = head.head_tokens.to(self.device)
            rows = target.module.get_output_embeddings().weight
            if "lm_head.weight" not in weights:
                weights["lm_head.weight"] = rows[self.head_tokens]
            else:
                rows = None  # they are another head's
            own = {} if self.library is None else {"dots": partial(dots, self.library)}
            self.seen = SeenTokens(self.head_tokens, rows, **own)
            self._fc = make(weights["fc.weight"], None)
            self.layer = layer_of(weights, make, self.shape, norm_before_residual=first)
            self._rope = rope_table(config, self.shape.head_dim, self.max_context, self.device)
        self._input_norms = input_norms(weights)
        self._feeds_normed = bool(config.get("norm_output"))
        self.native = None if self.library is None else self._by_library(self.library, config)
        self.exact = self.native is not None
        self.hidden_size = int(config["hidden_size"])

    def _by_library(self, library: CDLL, config: dict[str, Any]) -> NativeLayers:
        products: dict[str, Any] = dict(self.layer.products)
        norms = {
            "attention_norm": self.layer.norms["input_layernorm"],
            "beside_norm": self.layer.norms["hidden_norm"],
            "mlp_norm": self.layer.norms["post_attention_layernorm"],
        }
        layer = {
            "qkv": products["qkv"],
            "out": products["out"],
            "gate_up0": products["gate_up"],
            "down0": products["down"],
        }
        hidden = int(config["hidden_size"])
        return NativeLayers(library, self.shape, hidden, self.slots, [norms], [layer], [self._rope])

    def open(self, text: SlotText | None = None, prompt: Sequence[int] = ()) -> int:
        slot = self.slots.open(text, prompt)
        self.seen.clear(slot)
        self.seen.read(slot, text.tokens if text else ())
        return slot

    def close(self, slot: int) -> None:
        self.slots.close(slot)

    def rollback(self, slot: int, length: int) -> None:
        self.slots.rollback(slot, length)

    def open_branch(self) -> int:
        return self.slots.open_branch()

    @torch.inference_mode()
    def fork(self, source: int, into: int, length: int, known: int = 0) -> None:
        self.slots.fork(source, into, length, known)
        text = self.slots.texts[source].tokens if source in self.slots.texts else []
        if length <= len(text):  # of another request, which has gone on otherwise
            self.seen.clear(into)
            self.seen.read(into, text[:length])
        else:
            self.seen.copy(source, into)

    @torch.inference_mode()
    def forward(self, rows: Sequence[Forward]) -> list[Span]:
        placed = []
        try:
            for row in rows:
                placed.append(
                    (row.slot, self.slots.reserve(row.slot, len(row.tokens)), len(row.tokens))
                )
            found = self._predictions(rows, placed)
        except BaseException:
            for slot, start, _ in placed:  # a failed forward pass leaves every slot as it was
                self.slots.rollback(slot, start)
            raise
        counts = [row.keep for row in rows]
        outputs: list[Span] = []
        for row, states, normed, logits in zip(
            rows, *(one.split(counts) for one in found), strict=True
        ):
            self.seen.read(row.slot, row.tokens)
            widened, support = self.seen.widened(row.slot, logits, normed)
            states = normed if self._feeds_normed else states
            outputs += Logits(widened, states, support, self.vocab_size).split([row.keep])
        return outputs

    def _predictions(
        self, rows: Sequence[Forward], placed: list[Placed]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Of all pairs whose rows are kept: states before and after the norm, `[kept, hidden]`, and
        logits `[kept, head]` float32."""
        embedded, hidden, positions = self._inputs(rows, placed)
        trees = {row.slot: row.parents for row in rows if row.parents is not None}
        if self.native is not None:
            parts, at = [], 0
            for some in passes(placed, CHUNK, trees):
                own = slice(at, at := at + sum(count for _, _, count in some))
                parts.append(
                    self.native(hidden[own], positions[own], some, trees, beside=embedded[own])[0]
                )
            states = torch.cat(parts)
        else:
            attend = RowAttention(self.slots, placed, self.shape, trees)
            cos, sin = (one[positions] for one in self._rope)
            query, key, value = self.layer.before(embedded, hidden, (cos, sin))
            states = self.layer.after(attend(0, query, key, value), hidden)
        ends = torch.tensor([count for _, _, count in placed]).cumsum(0).tolist()
        kept = torch.cat(
            [states[end - row.keep : end] for row, end in zip(rows, ends, strict=True)]
        )
        if self.native is None:
            return kept, *self.layer.predict(kept)
        normed = self.native.norm(kept, self.layer.norms["norm"])
        head: Any = self.layer.products["head"]
        return kept.to(self.dtype), normed.to(self.dtype), head.in_float32(normed)

    def _inputs(
        self, rows: Sequence[Forward], placed: list[Placed]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Embeddings and states, `[total, hidden]`, and positions `[total]` of packed pairs."""
        ids = torch.tensor([token for row in rows for token in row.tokens], device=self.device)
        positions = torch.tensor(
            [p for row, one in zip(rows, placed, strict=True) for p in positions_of(row, one)],
            device=self.device,
        )
        return self.embedding[ids], torch.cat([self._hidden(row) for row in rows]), positions

    def _hidden(self, row: Forward) -> Tensor:
        """What a row's tokens are paired with, `[tokens, hidden]`: the target's states brought to
        the head's width, or its own output."""
        assert row.features is not None, "a head reads states with its tokens"
        features = row.features.to(self.dtype)
        if features.shape[-1] == self.hidden_size:
            return features
        if self._input_norms:
            parts = features.chunk(len(self._input_norms), -1)
            normed = zip(parts, self._input_norms, strict=True)
            features = torch.cat([norm(part, one, self.shape.eps) for part, one in normed], -1)
        return self._fc(features)


def layer_of(
    weights: Mapping[str, Tensor],
    make: MakeLinear,
    shape: Architecture,
    *,
    norm_before_residual: bool,
) -> Eagle3Layer:
    """The layer of a head's weights; `make` makes its products."""
    layer = {
        name.removeprefix("midlayer."): one
        for name, one in weights.items()
        if name.startswith("midlayer.")
    }
    whole = {
        "qkv": torch.cat([layer[f"self_attn.{part}_proj.weight"] for part in "qkv"]),
        "out": layer["self_attn.o_proj.weight"],
        "gate_up": torch.cat([layer["mlp.gate_proj.weight"], layer["mlp.up_proj.weight"]]),
        "down": layer["mlp.down_proj.weight"],
        "head": weights["lm_head.weight"],
    }
    norms = {name: layer[f"{name}.weight"] for name in NORMS if name != "norm"} | {
        "norm": weights["norm.weight"]
    }
    products = {name: make(one, None) for name, one in whole.items()}
    return Eagle3Layer(products, norms, shape, norm_before_residual=norm_before_residual)


def input_norms(weights: Mapping[str, Tensor]) -> list[Tensor]:
    """Norms of what `fc` reads: one over all states together, one for each, or none."""
    if "input_norm.weight" in weights:
        return [weights["input_norm.weight"]]
    return [weights[name] for name in sorted(weights) if name.startswith("fc_norm.")]


def architecture_of_head(config: dict[str, Any]) -> Architecture:
    """The shape of a head's layer.

    Args:
        config: as `config.json` of an EAGLE-3 checkpoint has it.
    Raises:
        DraftwellError: it scales its rotary positions in a way that depends on more than the
            position, or has another activation (`unsupported_architecture`).
    """
    scaling, activation = scaling_of(config), config.get("hidden_act", "silu")
    if scaling not in (None, *SCALINGS) or activation != "silu":
        raise DraftwellError(
            f"this head scales its rotary positions by {scaling} and has the activation "
            f"{activation}, and only {', '.join(SCALINGS)} and silu are supported: choose another "
            "head",
            code="unsupported_architecture",
        )
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return Architecture(
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_dim=head_dim,
        scale=head_dim**-0.5,
        eps=config["rms_norm_eps"],
        activation="silu",
        windows=(None,),
        ropes=(None,),
    )


def scaling_of(config: dict[str, Any]) -> str | None:
    """How a head scales its rotary positions, by transformers' name; None: not at all."""
    scaling = config.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    return None if kind == "default" else str(kind)


def rope_table(config: dict[str, Any], head_dim: int, positions: int, device: torch.device) -> Rope:
    """Cosines and signed sines `[positions, 1, head_dim]` float32 of a head's rotary positions."""
    inverse = 1.0 / config["rope_theta"] ** (
        torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    )
    factor, kind = 1.0, scaling_of(config)
    if kind is not None:
        from transformers import LlamaConfig
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        names = ("hidden_size", "num_attention_heads", "max_position_embeddings")
        shape = LlamaConfig(
            head_dim=head_dim,
            rope_parameters={**config["rope_scaling"], "rope_theta": config["rope_theta"]},
            **{name: config[name] for name in names},
        )
        inverse, factor = ROPE_INIT_FUNCTIONS[kind](shape, device)
    angles = torch.outer(torch.arange(positions, dtype=torch.float32, device=device), inverse)[
        :, None
    ]
    cos, sin = angles.cos() * factor, angles.sin() * factor
    return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)


def head_of(target: Any, head: Eagle3Head) -> Eagle3Model:
    """The model of a head beside its target; made once, and shared by all that use it or read the
    same artifact again.

    From then on the target keeps the hidden states of what it reads. The model is dropped with the
    last artifact of the head.

    Raises:
        DraftwellError: the target keeps no hidden states (`no_hidden_states`), or those that it
            keeps are of other layers.
    """

    def make() -> Eagle3Model:
        if not target.keeps_states:
            raise DraftwellError(
                (
                    "this kind of target keeps no hidden states for a head: use a strategy "
                    "with a draft model, or none"
                ),
                code="no_hidden_states",
            )
        target.keep_hidden_states(head.layers)
        return Eagle3Model(head, target)

    return kept_beside(target, head, make)
