"""MLflow's `python_function` flavour of verifiers, acceptance tables and acceptance heads:
`predict` runs installed code.

`MLmodel` names this module (`loader_module`) and the artifact's folder. There is no pickle in it
and no code: MLflow imports the installed package and calls `_load_pyfunc`, which checks every file
like any other reader of an artifact. The module keeps its name, because published versions hold it.

    model = mlflow.pyfunc.load_model("models:/acceptance_table.smollm2-135m@champion-cpu")
    model.predict({"confidence": np.array([0.5, 0.95])})["acceptance"]
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftwell.registry.folders import copy_artifact
from draftwell.serving.artifacts.base import read_manifest
from draftwell.serving.artifacts.kinds import KINDS
from draftwell.serving.errors import DraftwellError

if TYPE_CHECKING:
    import numpy as np

Arrays = dict[str, "np.ndarray"]


class PyfuncModel:
    """An artifact as MLflow calls it.

    Args:
        kind: of the artifact.
        function: named input arrays, the batch first, → named output arrays.
        example: inputs that the function takes.
    """

    def __init__(self, kind: str, function: Callable[[Any], Arrays], example: Arrays):
        self.kind, self.function, self.example = kind, function, example

    def predict(self, model_input: Any, params: dict[str, Any] | None = None) -> Arrays:
        """The outputs for named arrays, or for a data frame with columns of these names."""
        return self.function(model_input)


def _load_pyfunc(path: str) -> PyfuncModel:
    """What MLflow calls with the artifact's folder; every file is checked.

    Raises:
        DraftwellError: the artifact is damaged, newer than this version, or of a kind that predicts
            nothing.
    """
    folder = Path(path)
    kind = read_manifest(folder)["kind"]
    if kind not in MODELS:
        raise DraftwellError(
            f"a {kind} predicts nothing by itself: {', '.join(MODELS)} do", code="no_pyfunc"
        )
    # beside the artifact are MLflow's own files, which no artifact may have
    with tempfile.TemporaryDirectory() as place:
        artifact = KINDS[kind].load_class().load(copy_artifact(folder, Path(place) / kind))
    function, example = MODELS[kind](artifact)
    return PyfuncModel(kind, function, example)


def _verifier(verifier: Any) -> tuple[Callable[[Any], Arrays], Arrays]:
    """`features` `[batch, features]` float32 → `score` `[batch]` float32, the probability that the
    target keeps the token.

    The example is a token with q̄(x) = .7 of three candidates, and, where the verifier reads
    states, states of zeros.
    """
    import numpy as np
    import torch

    from draftwell.serving.artifacts.verifier import SCALARS, scalar_features

    def score(inputs: Any) -> Arrays:
        return {
            "score": torch.sigmoid(
                _rows(inputs, "features") @ verifier.weight + verifier.bias
            ).numpy()
        }

    features = np.zeros((1, verifier.weight.numel()), np.float32)
    if "scalars" in verifier.features:
        features[0, -len(SCALARS) :] = scalar_features(torch.tensor([0.7, 0.2, 0.1]), 0).numpy()
    return score, {"features": features}


def _acceptance_head(head: Any) -> tuple[Callable[[Any], Arrays], Arrays]:
    """`hidden_state` `[batch, hidden]` float32 → `acceptance` `[batch]` float32; the example is the
    mean state that the head was trained on, and one standard deviation above it."""
    import torch

    def acceptance(inputs: Any) -> Arrays:
        return {
            "acceptance": torch.sigmoid(head.logit(_rows(inputs, "hidden_state"))).detach().numpy()
        }

    return acceptance, {"hidden_state": torch.stack([head.mean, head.mean + head.scale]).numpy()}


def _acceptance_table(table: Any) -> tuple[Callable[[Any], Arrays], Arrays]:
    """`confidence` `[batch]` float64 in 0..1 → `acceptance` `[batch]` float64, α of its bin; the
    example is the middle of each bin."""
    import numpy as np

    from draftwell.serving.artifacts.acceptance_table import MIDPOINTS

    def acceptance(inputs: Any) -> Arrays:
        return {
            "acceptance": np.array(
                [
                    table.alpha(float(confidence))
                    for confidence in np.asarray(inputs["confidence"]).ravel()
                ]
            )
        }

    return acceptance, {"confidence": np.array(MIDPOINTS)}


def _rows(inputs: Any, name: str) -> Any:
    """`[batch, n]` float32 of a named input."""
    import numpy as np
    import torch

    return torch.from_numpy(np.stack([np.asarray(row, np.float32) for row in inputs[name]]))


MODELS: dict[str, Callable[[Any], tuple[Callable[[Any], Arrays], Arrays]]] = {
    "verifier": _verifier,
    "acceptance_head": _acceptance_head,
    "acceptance_table": _acceptance_table,
}
"""kind → what makes its function and example."""
