"""MLflow's flavour `onnx` of verifiers, acceptance heads and acceptance tables: what they predict,
as a graph.

The graph is for people who compare versions with MLflow alone; serving reads safetensors and JSON.

    table = mlflow.pyfunc.load_model("models:/acceptance_table.smollm2-135m@champion-cpu")
    table.predict({"confidence": np.array([0.5, 0.95])})["acceptance"]
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from draftwell.serving.artifacts.acceptance_head import AcceptanceHead
from draftwell.serving.artifacts.acceptance_table import EDGES, MIDPOINTS, AcceptanceTable
from draftwell.serving.artifacts.base import Artifact
from draftwell.serving.artifacts.verifier import SCALARS, TokenFigures, Verifier, scalar_features

if TYPE_CHECKING:
    from mlflow.models import Model

HEAD = '<ir_version: 8, opset_import: ["": 17]>'


@dataclass(frozen=True)
class Graph:
    """A graph in ONNX's textual syntax, with its constants by name, and inputs that it takes."""

    text: str
    constants: dict[str, np.ndarray]
    example: dict[str, np.ndarray]


def verifier_graph(verifier: Verifier) -> Graph:
    """`features` `[batch, features]` → `score` `[batch]`, the probability that the target keeps the
    token.

    The example is the likeliest token with q̄(x) = .7, and, where the verifier reads states, states
    of zeros.
    """
    example = np.zeros((1, verifier.weight.numel()), np.float32)
    if "scalars" in verifier.features:
        likely = TokenFigures(raw_prob=0.7, confidence=0.7, entropy=0.8, rank=0)
        example[0, -len(SCALARS) :] = scalar_features(likely)
    text = f"""verifier (float[batch, {example.shape[1]}] features) => (float[batch] score) {{
        weighted = MatMul(features, weight)
        logit = Add(weighted, bias)
        score = Sigmoid(logit)
    }}"""
    constants = {"weight": verifier.weight.numpy(), "bias": np.array(verifier.bias, np.float32)}
    return Graph(text, constants, {"features": example})


def head_graph(head: AcceptanceHead) -> Graph:
    """`hidden_state` `[batch, hidden]` → `acceptance` `[batch]`; the example is the mean state that
    the head was trained on, and one standard deviation above it."""
    blocks = "".join(
        f"""
        product{i} = MatMul(x{i}, weight{i})
        linear{i} = Add(product{i}, bias{i})
        gate{i} = Sigmoid(linear{i})
        silu{i} = Mul(linear{i}, gate{i})
        x{i + 1} = Add(x{i}, silu{i})"""
        for i in range(len(head.blocks))
    )
    width = head.weight.numel()
    text = f"""acceptance_head
    (float[batch, {width}] hidden_state) => (float[batch] acceptance) {{
        centred = Sub(hidden_state, mean)
        x0 = Div(centred, scale){blocks}
        weighted = MatMul(x{len(head.blocks)}, weight)
        logit = Add(weighted, bias)
        acceptance = Sigmoid(logit)
    }}"""
    constants = {
        "mean": head.mean.numpy(),
        "scale": head.scale.numpy(),
        "weight": head.weight.numpy(),
        "bias": np.array(head.bias, np.float32),
    }
    for i, (matrix, vector) in enumerate(head.blocks):
        constants |= {f"weight{i}": matrix.T.contiguous().numpy(), f"bias{i}": vector.numpy()}
    states = torch.stack([head.mean, head.mean + head.scale]).numpy()
    return Graph(text, constants, {"hidden_state": states})


def table_graph(table: AcceptanceTable) -> Graph:
    """`confidence` `[batch]` float64 in 0..1 → `acceptance` `[batch]` float64, α of its bin; the
    example is the middle of each bin."""
    text = """acceptance_table (double[batch] confidence) => (double[batch] acceptance) {
        column = Unsqueeze(confidence, bins_axis)
        reached = GreaterOrEqual(column, edges)
        counted = Cast<to = 7>(reached)
        bin = ReduceSum<keepdims = 0>(counted, bins_axis)
        acceptance = Gather(alpha, bin)
    }"""
    constants = {
        "bins_axis": np.array([1], np.int64),
        "edges": np.array(EDGES),
        "alpha": np.array([table.alpha(middle) for middle in MIDPOINTS]),
    }
    return Graph(text, constants, {"confidence": np.array(MIDPOINTS)})


GRAPHS: dict[str, Callable[[Any], Graph]] = {
    Verifier.kind: verifier_graph,
    AcceptanceHead.kind: head_graph,
    AcceptanceTable.kind: table_graph,
}
"""kind → what makes its graph."""


def save_onnx(artifact: Artifact, folder: Path, model: Model) -> None:
    """Write an artifact's graph and `MLmodel` into a new folder, with an input example and the
    signature of what the graph makes of that."""
    import mlflow.onnx
    import onnxruntime
    from mlflow.models import infer_signature
    from onnx import numpy_helper, parser

    graph = GRAPHS[artifact.kind](artifact)
    proto = parser.parse_model(f"{HEAD} {graph.text}")
    proto.graph.initializer.extend(
        numpy_helper.from_array(value, name) for name, value in graph.constants.items()
    )
    session = onnxruntime.InferenceSession(
        proto.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    names = [output.name for output in session.get_outputs()]
    outputs = dict(zip(names, session.run(names, graph.example), strict=True))
    mlflow.onnx.save_model(
        proto,
        folder,
        mlflow_model=model,
        signature=infer_signature(graph.example, outputs),
        input_example=graph.example,
        pip_requirements=mlflow.onnx.get_default_pip_requirements(),
        onnx_execution_providers=["CPUExecutionProvider"],
        save_as_external_data=False,
    )
