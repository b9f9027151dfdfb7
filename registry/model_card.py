"""What MLflow shows of an artifact: its MLmodel file with signature and input example, and words for a person.

The flavour is our own: no `python_function`, hence nothing that MLflow could unpickle or run.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from mlflow.models import ModelSignature

WORDS = {
    "verifier": "SPRINTER's verifier: predicts from the draft's features whether the target keeps a draft token.",
    "acceptance_head": "SpecDec++'s acceptance head: predicts from the draft's last hidden state whether the target keeps a token.",
    "acceptance_table": "SPIDE's acceptance table: how often the target keeps a token, by the draft's confidence.",
    "correction_memory": "CSD's correction memory: how often the target corrected one token to another.",
    "hardware_profile": "Hardware profile: seconds of single draft and target forwards on one class of machine.",
    "decoding_config": "Tuned decoding configuration: the chosen strategy, its parameters and the evidence.",
    "distilled_draft": "Draft model distilled from the pair's target.",
    "release": "Release: the exact versions that are served together. Aliases: candidate, challenger, champion.",
}
"""kind → what it is, as a registered model's description."""


def describe(manifest: dict[str, Any], metrics: dict[str, float]) -> str:
    """A version's description where the publisher gives none."""
    made = manifest["provenance"]
    lines = [WORDS.get(manifest["kind"], manifest["kind"]), "",
             f"Pair {made['pair']}, fingerprint {made['fingerprint'][:12]}."]
    if made.get("device_class"):
        lines.append(f"Measured on {made['device_class']}.")
    if made.get("trace_digest"):
        lines.append(f"Made from the traces {made['trace_digest'][:12]}.")
    if metrics:
        rows = [f"| {name} | {value:.4g} |" for name, value in sorted(metrics.items())]
        lines += ["", "| figure | value |", "| --- | --- |", *rows]
    return "\n".join(lines)


def write_mlmodel(folder: Path, manifest: dict[str, Any], location: str, run_id: str, model_id: str) -> None:
    """Write MLmodel, and an input example where the kind is a function, beside the artifact's files."""
    from mlflow.models import Model
    from mlflow.models.utils import _save_example

    made = manifest["provenance"]
    metadata = {key: made[key] for key in ("pair", "fingerprint", "trace_digest", "device_class", "git_commit")}
    metadata |= {"kind": manifest["kind"], "schema_version": manifest["schema_version"], "parents": made["parents"]}
    model = Model(location, run_id=run_id, model_id=model_id, model_uuid=model_id, metadata=metadata)
    model.add_flavor("draftwell", kind=manifest["kind"], schema_version=manifest["schema_version"], data=".")
    if example := interface(folder, manifest["kind"]):
        inputs, outputs = example
        model.signature = _signature(inputs, outputs)
        _save_example(model, inputs, str(folder))
    model.save(str(folder / "MLmodel"))


def interface(folder: Path, kind: str) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]] | None:
    """An example input and output of a kind that is a function; the first axis is the batch."""
    import numpy as np

    if kind == "verifier":
        from safetensors import safe_open

        with safe_open(folder / "verifier.safetensors", "np") as tensors:
            features = tensors.get_slice("weight").get_shape()[0]
        return {"features": np.zeros((1, features), np.float32)}, {"score": np.zeros(1, np.float32)}
    if kind == "acceptance_head":
        from safetensors import safe_open

        with safe_open(folder / "acceptance_head.safetensors", "np") as tensors:
            width = tensors.get_slice("weight").get_shape()[0]
        return {"hidden_state": np.zeros((1, width), np.float32)}, {"acceptance": np.zeros(1, np.float32)}
    if kind == "acceptance_table":
        return {"confidence": np.array([0.95])}, {"acceptance": np.zeros(1)}
    if kind == "correction_memory":
        return {"drafted": np.array([3]), "correction": np.array([4])}, {"count": np.zeros(1, np.int64)}
    if kind == "hardware_profile":
        return {"tokens": np.array([1])}, {"seconds": np.zeros(1)}
    if kind == "distilled_draft":
        return {"input_ids": np.array([[1, 2, 3]])}, {"logits": np.zeros((1, 3, 1), np.float32)}
    return None


def _signature(inputs: dict[str, np.ndarray], outputs: dict[str, np.ndarray]) -> ModelSignature:
    from mlflow.models import ModelSignature
    from mlflow.types import Schema, TensorSpec

    def schema(arrays: dict[str, np.ndarray]) -> Schema:
        fixed = {"features", "hidden_state"}  # their second axis is what the artifact reads; all other axes are free
        shapes = {n: (-1, *a.shape[1:]) if n in fixed else (-1,) * a.ndim for n, a in arrays.items()}
        return Schema([TensorSpec(a.dtype, shapes[n], n) for n, a in arrays.items()])

    return ModelSignature(schema(inputs), schema(outputs))
