"""Draftwell: tune, prove and ship speculative decoding.

A bundle that `draftwell deploy` or a tuning built answers in a program of your own:

    import draftwell

    with draftwell.load("dist/smollm2-135m/current") as model:
        answer = model.generate("What is a prime number?", max_tokens=64)
        print(answer.text)

`draftwell.tune` makes such a bundle of two models, and `draftwell.bench` compares strategies.
Importing this package loads nothing; each name loads what it needs when it is first used.

The four packages are the folders beside this one, linked here: in a checkout `draftwell.serving` is
`serving/`, and an installed wheel has them inside `draftwell` and nowhere else.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from draftwell.components.card.card import Card
    from draftwell.flows.library import bench, tune
    from draftwell.serving.errors import DraftwellError
    from draftwell.serving.library import Answer, LoadedBundle, load

    __version__: str

__all__ = [
    "Answer",
    "Card",
    "DraftwellError",
    "LoadedBundle",
    "__version__",
    "bench",
    "load",
    "tune",
]

_HOMES = {
    "Answer": "serving.library",
    "Card": "components.card.card",
    "DraftwellError": "serving.errors",
    "LoadedBundle": "serving.library",
    "bench": "flows.library",
    "load": "serving.library",
    "tune": "flows.library",
}
"""Public name → the module that it is loaded from."""


def __getattr__(name: str) -> Any:
    """A public name, at its first use."""
    if name == "__version__":
        found: Any = _version()
    elif name in _HOMES:
        found = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _version() -> str:
    """That of the installed project, or of the runtime's wheel, which a bundle brings."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("draftwell")
    except PackageNotFoundError:
        return version("draftwell-runtime")
