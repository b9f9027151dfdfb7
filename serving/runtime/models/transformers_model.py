"""Any causal language model of transformers, wrapped in the slot interface.

All rows of a batch are packed into one sequence `[1, total]` with explicit positions; an attention
function registered with transformers' `AttentionInterface` writes each row's keys and values into
its slot and attends within the slot only. No padding, no mask tensors, no cache objects of
transformers; rollback is a lowered length.
"""

from __future__ import annotations

from types import EllipsisType
from typing import Any, ClassVar

from torch import Tensor

from draftwell.serving.errors import DraftwellError
from draftwell.serving.runtime.models.architecture import context_of
from draftwell.serving.runtime.models.features import Entered
from draftwell.serving.runtime.models.module_model import (
    ModuleModel,
    Placed,
    Trees,
    joined,
    refuse_recurrent,
)
from draftwell.serving.runtime.models.row_attention import attend
from draftwell.serving.runtime.models.slots import Slots
from draftwell.serving.runtime.models.visible import visible

ATTENTION = "draftwell_slots"
PACKED = frozenset(
    {
        "llama",
        "mistral",
        "qwen2",
        "qwen3",
        "phi3",
        "gemma2",
        "gemma3_text",
        "afmoe",
        "apertus",
        "arcee",
        "biogpt",
        "bitnet",
        "cohere",
        "cohere2",
        "cohere2_moe",
        "cwm",
        "dots1",
        "ernie4_5",
        "ernie4_5_moe",
        "exaone4",
        "exaone_moe",
        "flex_olmo",
        "gemma",
        "gemma3n_text",
        "glm",
        "glm4",
        "glm4_moe",
        "gpt2",
        "gpt_bigcode",
        "gpt_neox",
        "granite",
        "granitemoe",
        "granitemoeshared",
        "helium",
        "hunyuan_v1_dense",
        "hunyuan_v1_moe",
        "hyperclovax",
        "jais2",
        "minimax_m2",
        "ministral",
        "ministral3",
        "mixtral",
        "nanochat",
        "olmo",
        "olmo2",
        "olmo3",
        "olmoe",
        "opt",
        "persimmon",
        "phi",
        "qwen2_moe",
        "qwen3_moe",
        "seed_oss",
        "smollm3",
        "solar_open",
        "starcoder2",
        "vaultgemma",
    }
)
"""Model types, as transformers names them, that tests have compared with transformers' `generate`
(docs/models.md)."""


def slot_attention(  # noqa: PLR0913
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    sliding_window: int | EllipsisType | None = ...,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of packed rows over their slots; the parameters are those that transformers'
    `AttentionInterface` passes.

    Args:
        query: `[1, heads, total, head_dim]`; key, value: `[1, kv_heads, total, head_dim]`.
        kwargs: must hold `draftwell_rows`, a list of (slot, start, tokens), `draftwell_trees`, the
            parents of those that are trees, and `draftwell_slots`, the `Slots`.
    Returns:
        `[1, total, heads, head_dim]`.
    """
    slots: Slots = kwargs["draftwell_slots"]
    # what a layer passes counts: some name a window on layers that see all
    window = getattr(module, "sliding_window", None) if sliding_window is ... else sliding_window
    layer = module.layer_idx
    outputs, at = [], 0
    trees: Trees = kwargs["draftwell_trees"]
    for slot, start, count in kwargs["draftwell_rows"]:
        q = query[0, :, at : at + count]
        keys, values = slots.write(
            layer, slot, start, key[0, :, at : at + count], value[0, :, at : at + count]
        )
        seen = None
        if count > 1:
            seen = visible(start, count, window, trees.get(slot), q.device)
        elif window:  # one token alone needs no mask: it sees the last of them
            keys, values = keys[:, -window:], values[:, -window:]
        outputs.append(attend(q, keys, values, seen, scaling, softcap).transpose(0, 1))
        at += count
    return joined(outputs).contiguous()[None], None  # some models take views of it


class TransformersModel(ModuleModel):
    """A `PreTrainedModel` with an LM head, over slots.

    Args:
        module: the model; its attention implementation is replaced.
        slots: number of concurrent requests.
        max_context: positions of a slot; None takes the model's own limit, at most 4096.
        head_tokens: `[head]` ids that the head covers, or None for all; other logits are -inf.
        vocab_size: ids of the logits; None: as many as the model's own.

    Attributes:
        features: layers before which hidden states are kept for a head; none until
            `keep_hidden_states`.
    """

    slots_type: ClassVar[type[Slots]] = Slots
    trees = True
    keeps_states = True

    def __init__(
        self, module: Any, *, slots: int = 1, max_context: int | None = None, **settings: Any
    ):
        from transformers import AttentionInterface

        AttentionInterface.register(ATTENTION, slot_attention)
        module.set_attn_implementation(ATTENTION)
        config = module.config.get_text_config()
        check_supported(module, config)
        head_dim = (
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        )
        kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        memory = self.slots_type(
            [(kv_heads, head_dim)] * config.num_hidden_layers,
            slots,
            context_of(config, max_context),
            module.dtype,
            module.device,
        )
        super().__init__(module.eval(), memory, **settings)
        self.features: tuple[int, ...] = ()

    def keep_hidden_states(self, layers: tuple[int, ...]) -> None:
        """Keep the hidden states before these layers from now on, for each position that is read
        into a request's slot; the number of layers stands for the normalised states after the last.

        Raises:
            DraftwellError: those of other layers are kept already, for another head
                (`other_layers`).
        """
        if self.features and self.features != layers:
            raise DraftwellError(
                f"the target keeps hidden states of the layers {self.features} for another "
                f"head, not of {layers}: use one "
                "head at a time",
                code="other_layers",
            )
        count = self.module.config.get_text_config().num_hidden_layers
        if not all(0 <= layer <= count for layer in layers):
            raise DraftwellError(
                f"a head reads the hidden states before the layers {layers}, and the target has "
                f"{count}: use a head that was trained for this target",
                code="other_layers",
            )
        if not self.features:
            self.slots.keep_features(len(layers) * self.hidden_size)
            self.features = layers

    def _states(self, ids: Tensor, positions: Tensor, placed: list[Placed], trees: Trees) -> Tensor:
        features = self.features  # a head that is loaded meanwhile changes them
        found = self._body(
            input_ids=ids[None],
            position_ids=positions[None],
            use_cache=False,
            draftwell_rows=placed,
            draftwell_trees=trees,
            draftwell_slots=self.slots,
            output_hidden_states=bool(features),
        )
        if features:
            entered = Entered(features, placed)
            entering = [*found.hidden_states[:-1], found.last_hidden_state]
            for layer in sorted(set(features)):
                entered.enter(layer, entering[layer][0])
            entered.store(self.slots)
        states: Tensor = found.last_hidden_state[0]
        return states


def check_supported(module: Any, config: Any) -> None:
    """Refuse architectures that could give wrong numbers here: recurrent ones, and those that
    nobody has compared."""
    name = config.model_type
    refuse_recurrent(module)
    if name not in PACKED:
        raise DraftwellError(
            f"{name} models have not been compared with transformers here: choose another model "
            "(docs/models.md names those that work)",
            code="unsupported_architecture",
        )
    strange = set(getattr(config, "layer_types", None) or ()) - {
        "full_attention",
        "sliding_attention",
    }
    if strange:
        raise DraftwellError(
            f"{name} models have layers of {', '.join(sorted(strange))}, which attention over "
            "slots does not know: choose another model",
            code="unsupported_architecture",
        )
