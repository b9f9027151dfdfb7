"""Replace a function wherever a module has imported it by name."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from types import ModuleType
from typing import Any

import pytest

import draftwell.flows


def replace_everywhere(
    monkeypatch: pytest.MonkeyPatch, target: ModuleType | str, *rest: Any
) -> None:
    """As `monkeypatch.setattr`: (module, name, value) or ("package.module.name", value).

    All of `draftwell.flows` is imported first: a module that imports the name while it is replaced
    would keep what replaces it.
    """
    if isinstance(target, str):
        path, _, name = target.rpartition(".")
        module, value = importlib.import_module(path), rest[0]
    else:
        module, (name, value) = target, rest
    for found in pkgutil.walk_packages(draftwell.flows.__path__, "draftwell.flows."):
        importlib.import_module(found.name)
    real = getattr(module, name)
    for other in list(sys.modules.values()):
        ours = getattr(other, "__name__", "").startswith("draftwell.")
        if ours and other.__dict__.get(name) is real:
            monkeypatch.setattr(other, name, value)
