"""An installation without extras, played: what the base package does not ask for is not found."""

from __future__ import annotations

BASE = """
import sys
from importlib.machinery import PathFinder

LEFT_OUT = {
    *("prefect", "mlflow", "sqlalchemy", "fastapi", "starlette", "uvicorn", "prometheus_client"),
    *("llguidance", "datasets", "sklearn", "scipy", "pandas", "gguf", "accelerate", "matplotlib"),
    *("jsonschema", "cyclonedx", "packageurl", "httpx"),
}

class Base(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.split(".")[0] in LEFT_OUT else super().find_spec(name, path, target)

sys.meta_path = [Base if finder is PathFinder else finder for finder in sys.meta_path]
"""
"""Python that a test runs before its own."""
