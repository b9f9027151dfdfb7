"""SPRINTER's verifier: will the target keep this draft token? (SPRINTER, section 3.2)

A sigmoid of a linear layer on standardised features of the draft. It predicts its label: `ratio`
(q̄(x)/p̄(x) <= lambda, the paper's), `argmax` (x is the target's argmax) or `soft` (min(1, p/q));
one that was written before there was a choice has the label `ratio`. Features: `before` (hidden
state that produced x), `after` (state having read x), `scalars`, or unions, in that order.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
import torch
from torch import Tensor

from draftwell.serving.artifacts.base import Artifact, ArtifactError, Provenance
from draftwell.serving.artifacts.trained import check_state
from draftwell.serving.errors import NotFinite

LABELS = ("ratio", "argmax", "soft")


class TokenFigures(NamedTuple):
    """What the raw distribution of a row says of one token, and of itself."""

    raw_prob: float
    confidence: float
    entropy: float
    """In nats."""
    rank: int
    """How many tokens have a larger raw probability."""


class Scalar(NamedTuple):
    """A number that verifiers read of a draft token.

    Args:
        name: kept with a verifier. A number of another meaning takes another name.
        figure: the field of `TokenFigures` that holds it while serving.
        column: the column of a trace that holds it.
        log: read as log(1 + value).
    """

    name: str
    figure: str
    column: str
    log: bool = False

    def of(self, value: Any) -> Any:
        """The feature of a figure or of a column."""
        return np.log1p(value) if self.log else value


SCALARS = (
    Scalar("q_token", "raw_prob", "draft_raw_q"),
    Scalar("confidence", "confidence", "confidence"),
    Scalar("entropy", "entropy", "entropy"),
    Scalar("log_rank", "rank", "rank", log=True),
)
"""The features `scalars`, in the order of a verifier's last weights. How to add one:
CONTRIBUTING.md, "A column of the traces"."""
SCALAR_NAMES = [scalar.name for scalar in SCALARS]
UNNAMED = ["q_token", "confidence", "entropy", "log_rank"]
"""What a verifier without names reads: it was written before names were kept."""


class DraftRow(Protocol):
    """What a verifier reads of a draft distribution; the runtime's `Span` has it."""

    def hidden(self, row: int) -> Tensor: ...
    def token_figures(self, row: int, token: int) -> TokenFigures: ...


def scalar_features(figures: TokenFigures) -> list[float]:
    """The numbers of `SCALARS`, in order."""
    return [scalar.of(getattr(figures, scalar.figure)) for scalar in SCALARS]


def logistic(z: float) -> float:
    """1/(1 + e^−z), kept off 0 and 1.

    Raises:
        NotFinite: z is NaN, which `min` would take for certain acceptance, or infinite.
    """
    if not math.isfinite(z):
        raise NotFinite(
            "a verifier's score is NaN or infinite: check the draft's weights and dtype, "
            "or train the verifier again"
        )
    return 1.0 / (1.0 + math.exp(-max(-60.0, min(60.0, z))))


class Verifier(Artifact):
    """Linear classifier over draft features.

    Args:
        weight: `[features]` float32, acting on raw features (standardisation is folded in).
        bias: scalar.
        features: non-empty subset of ("before", "after", "scalars"), in that order.
        threshold: score from which a token is kept (tau), in (0, 1).
        ratio: lambda of the label `ratio`.
        label: of `LABELS`.
    """

    kind = "verifier"
    parts = ("before", "after", "scalars")

    def __init__(
        self,
        weight: Tensor,
        bias: float,
        features: tuple[str, ...],
        threshold: float,
        ratio: float,
        provenance: Provenance,
        label: str = "ratio",
    ):
        if label not in LABELS:
            raise ArtifactError(
                f"the verifier's label {label!r} is none of {', '.join(LABELS)}: upgrade draftwell",
                code="unknown_label",
            )
        if not features or tuple(features) != tuple(f for f in self.parts if f in features):
            raise ArtifactError(
                f"unknown verifier features {features}: choose from {self.parts}, in that order",
                code="unknown_features",
            )
        if not bool(torch.isfinite(weight).all()) or not math.isfinite(bias):
            raise ArtifactError("the verifier's weights are not finite: train it again")
        self.weight, self.bias, self.features = weight.float(), float(bias), tuple(features)
        self.threshold, self.ratio, self.provenance, self.label = (
            threshold,
            ratio,
            provenance,
            label,
        )
        states = [f for f in features if f != "scalars"]
        end = self.weight.numel() - len(SCALARS) * ("scalars" in features)
        if end < len(states) or end % max(1, len(states)) or (end and not states):
            raise ArtifactError(
                (
                    f"{self.weight.numel()} weights do not fit the features "
                    f"{', '.join(features)}: train the verifier again"
                ),
                code="weights_do_not_fit",
            )
        self._of_states = (
            dict(zip(states, self.weight[:end].chunk(len(states)), strict=True)) if states else {}
        )
        self._of_scalars: list[float] = self.weight[end:].tolist()

    def score_drafted(self, row: DraftRow, after: DraftRow | None, token: int) -> float:
        """Probability in (0, 1) that the target keeps a token that was drafted from a row.

        Args:
            row: the one-row distribution that `token` was drafted from.
            after: the row having read it, needed where `features` names it.
        Raises:
            ArtifactError: the draft's states are not of the size that the verifier reads.
        """
        z = self.bias
        for name, weight in self._of_states.items():
            state = (after if name == "after" else row).hidden(0)  # type: ignore[union-attr]
            check_state(self.kind, state.shape, weight.numel())
            z += float(torch.dot(state.float().cpu(), weight))
        if self._of_scalars:
            values = scalar_features(row.token_figures(0, token))
            z += sum(weight * value for weight, value in zip(self._of_scalars, values, strict=True))
        return logistic(z)

    def write_files(self, folder: Path) -> None:
        from safetensors.torch import save_file

        save_file(
            {"weight": self.weight.contiguous(), "bias": torch.tensor([self.bias])},
            folder / "verifier.safetensors",
        )
        settings = {"features": self.features, "threshold": self.threshold, "ratio": self.ratio}
        if "scalars" in self.features:
            settings["scalars"] = SCALAR_NAMES
        if self.label != "ratio":
            settings["label"] = self.label
        (folder / "verifier.json").write_text(json.dumps(settings, indent=2) + "\n")

    @classmethod
    def read_files(cls, folder: Path, provenance: Provenance) -> Self:
        from safetensors.torch import load_file

        tensors = load_file(folder / "verifier.safetensors")
        settings = json.loads((folder / "verifier.json").read_text())
        scalars = settings.get("scalars", UNNAMED)
        if "scalars" in settings["features"] and scalars != SCALAR_NAMES:
            raise ArtifactError(
                f"the verifier in {folder} reads the numbers {', '.join(scalars)}, this version "
                f"{', '.join(SCALAR_NAMES)}: train it again",
                code="other_scalars",
            )
        return cls(
            tensors["weight"],
            float(tensors["bias"]),
            tuple(settings["features"]),
            settings["threshold"],
            settings["ratio"],
            provenance,
            settings.get("label", "ratio"),
        )
