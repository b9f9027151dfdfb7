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
from typing import Protocol, Self

import torch
from torch import Tensor

from draftwell.serving.artifacts.base import Artifact, ArtifactError, Provenance
from draftwell.serving.artifacts.kinds import KINDS
from draftwell.serving.errors import NotFinite

LABELS = ("ratio", "argmax", "soft")
SCALARS = ("q_token", "confidence", "entropy", "rank")
"""q̄(x), C, H in nats, and log(1 + rank of x); all of the raw draft distribution."""


class Figures(Protocol):
    """Raw probability and rank of a token, and confidence C and entropy H (nats) of the
    distribution it was drafted from."""

    @property
    def raw_prob(self) -> float: ...
    @property
    def confidence(self) -> float: ...
    @property
    def entropy(self) -> float: ...
    @property
    def rank(self) -> int: ...


class DraftRow(Protocol):
    """What a verifier reads of a draft distribution; the runtime's `Rows` has it."""

    def hidden(self, row: int) -> Tensor: ...
    def token_figures(self, row: int, token: int) -> Figures: ...


def scalar_features(raw: Tensor, token: int) -> Tensor:
    """The four scalar features `[4]` float32 of drafting `token` from raw probabilities
    `[vocab]`."""
    q = raw[token]
    return torch.stack(
        [q, raw.max(), torch.special.entr(raw).sum(), torch.log1p((raw > q).sum().float())]
    ).float()


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

    def score(self, before: Tensor | None, after: Tensor | None, raw: Tensor, token: int) -> float:
        """Probability in (0, 1) that the target keeps `token`.

        Args:
            before, after: `[hidden]` draft states, needed where `features` names them.
            raw: `[vocab]` raw draft probabilities that `token` was drafted under.
        """
        parts = {
            "before": before,
            "after": after,
            "scalars": scalar_features(raw, token) if "scalars" in self.features else None,
        }
        x = torch.cat([parts[f].float().cpu() for f in self.features])  # type: ignore[union-attr]
        return logistic(float(x @ self.weight) + self.bias)

    def score_drafted(self, row: DraftRow, after: DraftRow | None, token: int) -> float:
        """`score` of a token that was drafted from a row, without a distribution over the whole
        vocabulary.

        Args:
            row: the one-row distribution that `token` was drafted from.
            after: the row having read it, needed where `features` names it.
        Raises:
            ArtifactError: the draft's states are not of the size that the verifier reads.
        """
        z = self.bias
        for name, weight in self._of_states.items():
            state = (after if name == "after" else row).hidden(0)  # type: ignore[union-attr]
            if state.shape != weight.shape:
                raise ArtifactError(
                    f"the verifier reads states of {weight.numel()} numbers, the draft's "
                    f"have {state.numel()}: train it "
                    f"for this pair (`{KINDS[self.kind].made_by}`)",
                    code="state_size_differs",
                )
            z += float(torch.dot(state.float().cpu(), weight))
        if self._of_scalars:
            seen = row.token_figures(0, token)
            values = (seen.raw_prob, seen.confidence, seen.entropy, math.log1p(seen.rank))
            z += sum(weight * value for weight, value in zip(self._of_scalars, values, strict=True))
        return logistic(z)

    def write_files(self, folder: Path) -> None:
        from safetensors.torch import save_file

        save_file(
            {"weight": self.weight.contiguous(), "bias": torch.tensor([self.bias])},
            folder / "verifier.safetensors",
        )
        settings = {"features": self.features, "threshold": self.threshold, "ratio": self.ratio}
        if self.label != "ratio":
            settings["label"] = self.label
        (folder / "verifier.json").write_text(json.dumps(settings, indent=2) + "\n")

    @classmethod
    def read_files(cls, folder: Path, provenance: Provenance) -> Self:
        from safetensors.torch import load_file

        tensors = load_file(folder / "verifier.safetensors")
        settings = json.loads((folder / "verifier.json").read_text())
        return cls(
            tensors["weight"],
            float(tensors["bias"]),
            tuple(settings["features"]),
            settings["threshold"],
            settings["ratio"],
            provenance,
            settings.get("label", "ratio"),
        )
