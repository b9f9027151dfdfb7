"""A distribution of somebody else's, as a folder on the path: entry points and small modules."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from textwrap import dedent

from draftwell.components.engines.remote.discover import PLUGINS
from draftwell.serving.artifacts.kinds import KINDS
from draftwell.serving.runtime.strategies import STRATEGIES

MODULES = {
    "own_strategy": """
        from draftwell.serving.runtime.acceptance.exact import Exact
        from draftwell.serving.runtime.drafting.ngram import NGram
        from draftwell.serving.runtime.schedules.serial import serial
        from draftwell.serving.runtime.strategies import Strategy, StrategyConfig
        from own_artifact import Lengths


        class Echo(Strategy):
            name, lossless, paper = "echo", True, "none: words of the prompt, as many as are kept"
            roles, artifacts = ("target",), ("lengths",)
            search_space = {"words": (2, 4)}

            class Config(StrategyConfig):
                words: int = 4

            def run(self, session):
                longest = min(self.config.words, self.artifact(Lengths).longest)
                yield from serial(session, NGram(max_ngram=2, num_tokens=longest), Exact())
        """,
    "own_kind": """
        from draftwell.serving.artifacts.kinds import ArtifactKind, Card

        CARD = Card("What it is.", "How it is made.", "How good it is.", "How to use it.")
        LENGTHS = ArtifactKind("lengths", "Lengths", "own-tool", ("lengths.json",), CARD,
                               read_by_strategies=True, module="own_artifact")
        """,
    "own_artifact": """
        import json
        from draftwell.serving.artifacts.base import Artifact


        class Lengths(Artifact):
            kind = "lengths"

            def __init__(self, longest, provenance):
                self.longest, self.provenance = longest, provenance

            def write_files(self, folder):
                (folder / "lengths.json").write_text(json.dumps(self.longest))

            @classmethod
            def read_files(cls, folder, provenance):
                return cls(json.loads((folder / "lengths.json").read_text()), provenance)
        """,
}
POINTS = {
    "draftwell.strategies": {"echo": "own_strategy:Echo"},
    "draftwell.artifacts": {"lengths": "own_kind:LENGTHS"},
}
Points = Mapping[str, Mapping[str, str]]


def write_distribution(
    folder: Path, points: Points = POINTS, modules: Mapping[str, str] = MODULES
) -> Path:
    """A distribution called own, whose folder has to be on the path."""
    about = folder / "own-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: own\nVersion: 1.0\n")
    lines = [
        line
        for group, named in points.items()
        for line in (f"[{group}]", *(f"{name} = {value}" for name, value in named.items()))
    ]
    (about / "entry_points.txt").write_text("\n".join(lines) + "\n")
    for name, text in modules.items():
        (folder / f"{name}.py").write_text(dedent(text))
    return folder


@contextmanager
def installed(folder: Path) -> Iterator[None]:
    """With a distribution's folder on the path; afterwards as if it had never been there."""
    tables, before = (STRATEGIES, KINDS, PLUGINS), set(sys.modules)
    for table in tables:
        vars(table).pop("_all", None)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for name in set(sys.modules) - before:
            if str(folder) in str(getattr(sys.modules[name], "__file__", "")):
                del sys.modules[name]
        for table in tables:
            vars(table).pop("_all", None)
