"""Hardware profile: seconds of a draft forward and of a target forward over k tokens, as measured on one device class."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Self

from serving.runtime.artifacts.base import Artifact, ArtifactError, Provenance


class HardwareProfile(Artifact):
    """Times of single forwards, in seconds.

    Args:
        t_draft: median seconds of a one-token draft forward.
        t_verify: k → median seconds of a k-token target forward, k ascending and starting at 1.
        t_rest: median seconds that a round spends outside model forwards (sampling, judging).
    """

    kind = "hardware_profile"

    def __init__(self, t_draft: float, t_verify: dict[int, float], t_rest: float, provenance: Provenance):
        if t_draft <= 0 or not t_verify or 1 not in t_verify or min(t_verify.values()) <= 0:
            raise ArtifactError("a hardware profile needs positive times and a target forward of one token")
        self.t_draft, self.t_verify, self.t_rest = t_draft, dict(sorted(t_verify.items())), t_rest
        self.provenance = provenance

    def verify_seconds(self, tokens: int) -> float:
        """Seconds of a target forward over `tokens` >= 1 tokens: linear between measured sizes and beyond the last."""
        sizes = list(self.t_verify)
        if len(sizes) == 1:
            return self.t_verify[1]
        high = next((i for i, k in enumerate(sizes) if k >= tokens and i > 0), len(sizes) - 1)
        k0, k1 = sizes[high - 1], sizes[high]
        t0, t1 = self.t_verify[k0], self.t_verify[k1]
        return t0 + (t1 - t0) * (tokens - k0) / (k1 - k0)

    @property
    def speed_ratio(self) -> float:
        """t_verify / t_draft of one token each: how many draft forwards fit into a target forward."""
        return self.t_verify[1] / self.t_draft

    def write_files(self, folder: Path) -> None:
        times = {"t_draft": self.t_draft, "t_verify": {str(k): v for k, v in self.t_verify.items()}, "t_rest": self.t_rest}
        (folder / "profile.json").write_text(json.dumps(times, indent=2) + "\n")

    @classmethod
    def read_files(cls, folder: Path, provenance: Provenance) -> Self:
        times = json.loads((folder / "profile.json").read_text())
        return cls(times["t_draft"], {int(k): v for k, v in times["t_verify"].items()}, times["t_rest"], provenance)
