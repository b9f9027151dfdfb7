"""Times of the library's layers and of torch's are of different machine classes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from draftwell.serving.device import device_class
from draftwell.serving.runtime.machine_class import machine_class, without_layers


def pair(**layers: Any) -> Any:
    """As much of a pair as the class looks at: role → what computes its model's layers; a model of
    another kind has no such attribute."""
    cpu = torch.device("cpu")
    models = {role: SimpleNamespace(native=one, device=cpu) for role, one in layers.items()}
    return SimpleNamespace(device="cpu", models={**models, "draft_onnx": SimpleNamespace()})


def test_layers_by_torch_make_another_class() -> None:
    here = device_class("cpu")
    assert machine_class(pair(target=object(), draft=object())) == here
    assert machine_class(pair()) == here, "models that the library does not compute"
    assert machine_class(pair(target=None, draft=object())) == f"{here}+torch-target"
    both = machine_class(pair(target=None, draft=None))
    assert both == f"{here}+torch-draft-target"
    assert machine_class(pair(target=None, draft=None, qualifier=None)) == both, (
        "some commands load no qualifier"
    )
    assert without_layers(both) == without_layers(here) == here
