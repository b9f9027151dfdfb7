"""What another engine serves: the settings of its bundle, and what a person decided about it, so
that the bundle that follows keeps that.

A recalibration chooses how to speculate and nothing else: name and port of the API, image, replicas
and memory are the user's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draftwell.components.engines.vllm import NAME
from draftwell.registry.bundles.vllm.build import bundles_of
from draftwell.registry.bundles.vllm.render import MANIFEST
from draftwell.registry.bundles.vllm.settings import BUNDLED
from draftwell.serving.errors import DraftwellError

OPTIONS = (
    "image",
    "served_name",
    "max_model_len",
    "max_num_seqs",
    "memory",
    "cache",
    "gpus",
    "cpus",
    "replicas",
    "port",
)
"""Fields of `VllmServing` that a person may set; all others follow from what was judged."""


@dataclass(frozen=True)
class Deployment:
    """What a bundle is deployed with, besides what was judged; the defaults are those of `draftwell
    deploy`.

    Args:
        options: of `OPTIONS`, as a person writes them.
        temperature: of the requests that the choice is for.
        with_weights: whether the target is in the bundle although it is a commit on the hub.
        threads: that it was measured with; None: not known.
    """

    options: Mapping[str, str] = field(default_factory=dict)
    temperature: float = 0.0
    with_weights: bool = False
    threads: int | None = None

    @property
    def at_once(self) -> int:
        """Requests that a replica decodes at once; 0 where nobody decided.

        >>> Deployment({"max_num_seqs": "64"}).at_once, Deployment().at_once
        (64, 0)
        """
        return int(self.options.get("max_num_seqs", 0))


def served_settings(out: Path, pair: str) -> dict[str, Any]:
    """The settings of the bundle that `current` leads to, as its manifest has them.

    Args:
        out: folder of bundles.
    Raises:
        DraftwellError: there is none (`no_bundle`).
    """
    current = bundles_of(out, pair) / "current"
    try:
        found = dict(json.loads((current / MANIFEST).read_text())["settings"])
        _ = found["speculative"], found["release"], found["gate"]["device"]
        return found
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DraftwellError(
            f"no bundle at {current}: build one with `draftwell deploy --engine {NAME}`",
            code="no_bundle",
        ) from error


def served_deployment(out: Path, pair: str) -> Deployment:
    """What the bundle was deployed with that `current` leads to.

    Raises:
        DraftwellError: as `served_settings`.
    """
    settings = served_settings(out, pair)
    return Deployment(
        options={name: str(settings[name]) for name in OPTIONS if settings.get(name) is not None},
        temperature=float((settings.get("tuned") or {}).get("temperature") or 0.0),
        with_weights=str(settings.get("model")).startswith(BUNDLED),
        threads=settings["gate"].get("threads"),
    )
