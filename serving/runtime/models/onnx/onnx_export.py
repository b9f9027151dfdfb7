"""A Llama-shaped draft as an ONNX graph with explicit keys and values.

The graph reads embeddings, not ids (the table stays where it is, in the target), and writes new
keys and values into the buffers that it is given: `GroupQueryAttention` of ONNX Runtime appends in
place where its past and present are the same memory. Rotary tables are inputs, so that a file does
not depend on the length of the context. Everything is float32: ONNX Runtime has no fast bfloat16 on
CPUs.

A written graph is kept in the home, under a key of everything that it depends on.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from draftwell.serving.files import whole_folder
from draftwell.serving.runtime.models.lean_llama import fits

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

GRAPH = "draft.onnx"
WEIGHTS = "draft.weights"
VERSION = 1
"""Of the graph's layout: counted up with every change to this file that changes what it writes."""
OPSET, IR_VERSION = 17, 8
MICROSOFT = "com.microsoft"
HEAD_MULTIPLE = 16
"""Head sizes that ONNX Runtime's rotary embedding takes are multiples of this."""


def exportable(module: Any) -> bool:
    """Whether `export_llama` can write a module: what the lean path runs, with a head size that
    ONNX Runtime takes."""
    if not fits(module):
        return False
    config = module.config
    return bool(
        (getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
        % HEAD_MULTIPLE
        == 0
    )


def cached(module: Any, head_weight: Tensor, digests: dict[str, str], home: Path) -> Path:
    """The file of a draft's graph, written at first use.

    Args:
        head_weight: `[head, hidden]` rows of the output embedding that the draft's head covers.
        digests: what identifies the weights (of the draft, and of the target that lends
            embeddings).
        home: folder of all state; the graph is in `onnx/<key>/` below.
    """
    body = json.dumps(
        [VERSION, str(module.dtype), list(head_weight.shape), sorted(digests.items())]
    )
    folder = home / "onnx" / hashlib.sha256(body.encode()).hexdigest()[:32]
    if not (folder / GRAPH).is_file():
        with whole_folder(folder) as place:
            save(export_llama(module, head_weight), place)
    return folder / GRAPH


def save(graph: ModelProto, folder: Path) -> None:
    """Write a graph with its weights next to it: one protobuf message cannot hold more than 2
    GB."""
    import onnx

    onnx.save_model(
        graph,
        str(folder / GRAPH),
        save_as_external_data=True,
        location=WEIGHTS,
        size_threshold=1024,
    )


class GraphWriter:
    """Nodes and weights of a graph that grows; each method answers the name of what it computes."""

    def __init__(self, eps: float):
        from onnx import helper, numpy_helper

        self.make_node, self.from_array = helper.make_node, numpy_helper.from_array
        self.eps = eps
        self.nodes: list[NodeProto] = []
        self.weights = [
            self.from_array(torch.tensor([2**62]).numpy(), "end"),
            self.from_array(torch.tensor([1]).numpy(), "token_axis"),
        ]

    def constant(self, name: str, tensor: Tensor) -> str:
        array = tensor.detach().cpu().float().contiguous().numpy()
        self.weights.append(self.from_array(array, name))
        return name

    def add(
        self, op: str, inputs: list[str], outputs: list[str], domain: str = "", **attributes: Any
    ) -> str:
        self.nodes.append(self.make_node(op, inputs, outputs, domain=domain, **attributes))
        return outputs[0]

    def product(self, x: str, name: str, *parts: Any) -> str:
        """x times the transposed, concatenated weights of linear layers."""
        weight = self.constant(f"{name}_weight", torch.cat([part.weight for part in parts]).T)
        return self.add("MatMul", [x, weight], [name])

    def norm(self, x: str, name: str, part: Any) -> str:
        return self.add(
            "SimplifiedLayerNormalization",
            [x, self.constant(f"{name}_scale", part.weight)],
            [name],
            axis=-1,
            epsilon=self.eps,
            stash_type=1,
        )

    def layer(self, x: str, i: int, layer: Any, **heads: Any) -> str:
        """A decoder layer: attention with the keys and values of layer i, then the MLP."""
        attention, mlp = layer.self_attn, layer.mlp
        qkv = self.product(
            self.norm(x, f"attention_norm_{i}", layer.input_layernorm),
            f"qkv_{i}",
            attention.q_proj,
            attention.k_proj,
            attention.v_proj,
        )
        attended = self.add(
            "GroupQueryAttention",
            [qkv, "", "", f"key_{i}", f"value_{i}", "last", "total", "cos", "sin"],
            [f"attended_{i}", f"new_key_{i}", f"new_value_{i}"],
            MICROSOFT,
            do_rotary=1,
            rotary_interleaved=0,
            **heads,
        )
        out = self.product(attended, f"out_{i}", attention.o_proj)
        x = self.add("Add", [x, out], [f"after_attention_{i}"])
        gate_up = self.product(
            self.norm(x, f"mlp_norm_{i}", layer.post_attention_layernorm),
            f"gate_up_{i}",
            mlp.gate_proj,
            mlp.up_proj,
        )
        self.add("Split", [gate_up], [f"gate_{i}", f"up_{i}"], axis=-1)
        sigmoid = self.add("Sigmoid", [f"gate_{i}"], [f"sigmoid_{i}"])
        gate = self.add("Mul", [f"gate_{i}", sigmoid], [f"silu_{i}"])
        gated = self.add("Mul", [gate, f"up_{i}"], [f"gated_{i}"])
        down = self.product(gated, f"down_{i}", mlp.down_proj)
        return self.add("Add", [x, down], [f"after_mlp_{i}"])


@torch.inference_mode()
def export_llama(module: Any, head_weight: Tensor) -> ModelProto:
    """The graph of a `LlamaForCausalLM`.

    Inputs: `embeddings` `[batch, tokens, hidden]`; `last` `[batch]` int32, position of each row's
    last token; `total` `[1]` int32, the largest length with the new tokens; `first` `[1]` int64,
    the first token whose row is wanted; `cos`, `sin` `[positions, head_dim / 2]`; `key_i`,
    `value_i` `[batch, kv_heads, positions, head_dim]` of every layer i. Outputs: `logits` `[batch,
    kept, head]`, `hidden` `[batch, kept, hidden]` (normalised), `new_key_i`, `new_value_i`.
    """
    from onnx import helper

    config, layers = module.config, list(module.model.layers)
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    graph = GraphWriter(float(config.rms_norm_eps))
    x = "embeddings"
    for i, layer in enumerate(layers):
        x = graph.layer(
            x,
            i,
            layer,
            num_heads=heads,
            kv_num_heads=config.num_key_value_heads,
            scale=head_dim**-0.5,
        )
    kept = graph.add("Slice", [x, "first", "end", "token_axis"], ["kept"])
    states = graph.norm(kept, "hidden", module.model.norm)
    graph.add("MatMul", [states, graph.constant("head_weight", head_weight.T)], ["logits"])

    inputs, outputs = signature(config, len(layers), head_dim, head_weight.shape[0])
    return helper.make_model(
        helper.make_graph(graph.nodes, "draft", inputs, outputs, graph.weights),
        ir_version=IR_VERSION,
        opset_imports=[helper.make_opsetid("", OPSET), helper.make_opsetid(MICROSOFT, 1)],
    )


def signature(config: Any, layers: int, head_dim: int, head: int) -> tuple[list[Any], list[Any]]:
    """Inputs and outputs of the graph of `export_llama`, with names, types and shapes."""
    from onnx import TensorProto, helper

    def value(name: str, kind: int, *shape: str | int) -> Any:
        return helper.make_tensor_value_info(name, kind, list(shape))

    real, hidden = TensorProto.FLOAT, config.hidden_size
    memory = [
        (f"{kind}_{i}", ("batch", config.num_key_value_heads, "positions", head_dim))
        for i in range(layers)
        for kind in ("key", "value")
    ]
    inputs = [
        value("embeddings", real, "batch", "tokens", hidden),
        value("last", TensorProto.INT32, "batch"),
        value("total", TensorProto.INT32, 1),
        value("first", TensorProto.INT64, 1),
        value("cos", real, "table", head_dim // 2),
        value("sin", real, "table", head_dim // 2),
        *(value(name, real, *shape) for name, shape in memory),
    ]
    outputs = [
        value("logits", real, "batch", "kept", head),
        value("hidden", real, "batch", "kept", hidden),
        *(value(f"new_{name}", real, *shape) for name, shape in memory),
    ]
    return inputs, outputs
