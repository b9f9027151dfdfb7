"""What a person decided about the bundle that another engine serves, so that the bundle that
follows it keeps that.

A recalibration chooses how to speculate and nothing else: name and port of the API, image, replicas
and memory are the user's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draftwell.flows.steps.engine.deploy import OPTIONS
from draftwell.flows.steps.engine.monitor import served_settings
from draftwell.registry.bundles.vllm.build import bundles_of
from draftwell.registry.bundles.vllm.settings import BUNDLED


@dataclass(frozen=True)
class Deployment:
    """What a bundle is deployed with, besides what was judged; the defaults are those of `draftwell
    deploy`.

    Args:
        options: of `OPTIONS`, as a person writes them.
        temperature: of the requests that the choice is for.
        with_weights: whether the target is in the bundle although it is a commit on the hub.
        threads: that it was measured with; None: not known.
        follows: the bundle that is served; None, none is.
    """

    options: Mapping[str, str] = field(default_factory=dict)
    temperature: float = 0.0
    with_weights: bool = False
    threads: int | None = None
    follows: Path | None = None

    def at_once(self, measured: int) -> int:
        """Requests that a replica decodes at once: as many as were measured, and no fewer than are
        served.

        >>> Deployment({"max_num_seqs": "64"}).at_once(8), Deployment().at_once(8)
        (64, 8)
        """
        return max(measured, int(self.options.get("max_num_seqs", measured)))


def served_deployment(out: Path, pair: str) -> Deployment:
    """What the bundle was deployed with that `current` leads to.

    Args:
        out: folder of bundles.
    Raises:
        DraftwellError: there is none (`no_bundle`).
    """

    settings: Mapping[str, Any] = served_settings(out, pair)
    return Deployment(
        options={name: str(settings[name]) for name in OPTIONS if settings.get(name) is not None},
        temperature=float((settings.get("tuned") or {}).get("temperature") or 0.0),
        with_weights=str(settings.get("model")).startswith(BUNDLED),
        threads=settings["gate"].get("threads"),
        follows=(bundles_of(out, pair) / "current").resolve(),
    )
