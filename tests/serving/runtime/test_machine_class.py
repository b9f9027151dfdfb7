"""Times of compiled layers and of eager ones are of different machine classes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from draftwell.serving.device import device_class
from draftwell.serving.runtime.machine_class import machine_class, without_layers


def pair(**steps: Any) -> Any:
    """As much of a pair as the class looks at: role → what decodes single tokens of its model; a
    model may have no such attribute."""
    models = {role: SimpleNamespace(step=step) for role, step in steps.items()}
    return SimpleNamespace(device="cpu", models={**models, "draft_onnx": SimpleNamespace()})


def test_compiled_layers_make_another_class() -> None:
    here = device_class("cpu")
    assert machine_class(pair(target=None, draft=None)) == here, (
        "as profiles of earlier versions name it"
    )
    assert machine_class(pair(target=object(), draft=None)) == f"{here}+compiled-target"
    both = machine_class(pair(target=object(), draft=object()))
    assert both == f"{here}+compiled-draft-target"
    assert machine_class(pair(target=object(), draft=object(), qualifier=object())) == both, (
        "some commands load no qualifier"
    )
    assert without_layers(both) == without_layers(here) == here
