"""Hardware profile: measured seconds of the draft's and the target's forward passes on one device
class.

A strategy that overlaps draft and target gives each a share of the cores, so its forward passes
take longer than those of a serial strategy. A profile holds both.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field

from draftwell.serving.artifacts.base import Artifact, ArtifactError, Provenance
from draftwell.serving.artifacts.forward_costs import in_one_pass, seconds_at


class RoundOverheads(BaseModel):
    """Seconds outside forward passes."""

    model_config = ConfigDict(frozen=True)

    round: float = Field(ge=0, description="of a target call: sampling, judging")
    token: float = Field(
        ge=0,
        description=(
            "additionally, of a drafted token: its row, and the target's row that judges it"
        ),
    )
    figure: float = Field(
        ge=0,
        description="additionally, of a draft row whose confidence, entropy or probability is read",
    )


class RequestTimes(BaseModel):
    """Times for predictions of complete requests, in seconds; of the strategies `hybrid` reads
    them."""

    model_config = ConfigDict(frozen=True)

    t_draft: dict[int, float] = Field(
        description=(
            "tokens → median draft forward pass after `context` tokens; empty without a draft model"
        )
    )
    prefill: dict[str, dict[int, float]] = Field(
        description="role → tokens → median forward pass into an empty slot, one row kept; "
        "empty where not measured, as the next"
    )
    per_context_token: dict[str, float] = Field(
        description="role → additional seconds for every further token in the slot"
    )
    context: int = Field(
        ge=0, description="tokens in the slot before every forward pass that is not a prefill"
    )
    split_alone: tuple[float, dict[int, float]] | None = Field(
        None,
        description=(
            "as `split`, with the other model idle: the rest of an overlap after its shorter "
            "side has ended"
        ),
    )
    rest: RoundOverheads
    chains: bool = Field(
        False,
        description=(
            "the draft model decodes a draft of fixed length in one command (`Forward.steps`)"
        ),
    )


class HardwareProfile(Artifact):
    """Times of single forward passes, in seconds.

    Args:
        t_draft: median seconds of a draft forward pass over one token; None where the pair has no
            draft model.
        t_verify: k → median seconds of a target forward pass over k tokens, k ascending and
            starting at 1.
        t_rest: median seconds that a round spends outside forward passes (sampling, judging).
        split: (t_draft, t_verify) with each model on its own cores and the other one busy; None
            where not measured.
        t_draft_onnx: as `split`'s t_draft, of the draft in ONNX Runtime; None where not measured.
        t_head: median seconds of a head's pass in a draft of three, the first of them after a
            target pass; None where there is no head, or it was not measured.
        details: for predictions of complete requests; None where not measured.
    Raises:
        ArtifactError: a time is not positive, or `t_verify` lacks one token.
    """

    kind = "hardware_profile"

    def __init__(
        self,
        t_draft: float | None,
        t_verify: dict[int, float],
        t_rest: float,
        provenance: Provenance,
        split: tuple[float, dict[int, float]] | None = None,
        t_draft_onnx: float | None = None,
        details: RequestTimes | None = None,
        *,
        t_head: float | None = None,
    ):
        if (
            (t_draft is not None and t_draft <= 0)
            or not t_verify
            or 1 not in t_verify
            or min(t_verify.values()) <= 0
        ):
            raise ArtifactError(
                "a hardware profile needs positive times and a target forward pass of one "
                "token: measure it again with "
                "`draftwell step calibrate`"
            )
        self.t_draft, self.t_verify, self.t_rest = t_draft, dict(sorted(t_verify.items())), t_rest
        self.provenance, self.split, self.t_draft_onnx, self.details = (
            provenance,
            split,
            t_draft_onnx,
            details,
        )
        self.t_head = t_head

    def when(self, overlapping: bool, *, onnx_draft: bool = False) -> HardwareProfile:
        """The profile of strategies that overlap draft and target, or of those that do not.

        Args:
            onnx_draft: the draft runs in ONNX Runtime.
        """
        t_draft, t_verify = (
            self.split if overlapping and self.split is not None else (self.t_draft, self.t_verify)
        )
        if onnx_draft and self.t_draft_onnx is not None:
            t_draft = self.t_draft_onnx
        return HardwareProfile(t_draft, t_verify, self.t_rest, self.provenance, t_head=self.t_head)

    def verify_seconds(self, tokens: int) -> float:
        """Seconds of a target forward pass over `tokens` >= 1 tokens, as in `seconds_at`."""
        return seconds_at(self.t_verify, tokens)

    @property
    def speed_ratio(self) -> float:
        """t_verify / t_draft of one token each: how many draft passes fit into one target pass."""
        return self.t_verify[1] / self.draft_seconds

    def overlapped_length(self, most: int) -> int:
        """Gamma where draft and target run at once: how many times as fast as the target the draft
        is, but no longer than `in_one_pass` (ours): the next verification reads the draft."""
        profile = self.when(overlapping=True)
        return min(in_one_pass(profile.t_verify, most), max(1, round(profile.speed_ratio)))

    @property
    def draft_seconds(self) -> float:
        """`t_draft`, of a pair that has a draft model.

        Raises:
            ArtifactError: it has none, or had none when this was measured
                (`profile_without_draft`).
        """
        if self.t_draft is None:
            raise ArtifactError(
                (
                    "this hardware profile was measured without a draft model: measure it "
                    "again with `draftwell step calibrate`"
                ),
                code="profile_without_draft",
            )
        return self.t_draft

    def write_files(self, folder: Path) -> None:
        times: dict[str, Any] = {} if self.t_draft is None else {"t_draft": self.t_draft}
        times |= {"t_verify": self.t_verify, "t_rest": self.t_rest}
        if self.split is not None:
            times["split"] = {"t_draft": self.split[0], "t_verify": self.split[1]}
        if self.t_draft_onnx is not None:
            times["t_draft_onnx"] = self.t_draft_onnx
        if self.t_head is not None:
            times["t_head"] = self.t_head
        if self.details is not None:
            times["details"] = self.details.model_dump()
        (folder / "profile.json").write_text(json.dumps(times, indent=2) + "\n")

    @classmethod
    def read_files(cls, folder: Path, provenance: Provenance) -> Self:
        times = json.loads((folder / "profile.json").read_text())
        split, details = times.get("split"), times.get("details")
        return cls(
            times.get("t_draft"),
            sizes(times["t_verify"]),
            times["t_rest"],
            provenance,
            (split["t_draft"], sizes(split["t_verify"])) if split else None,
            times.get("t_draft_onnx"),
            RequestTimes.model_validate(details) if details else None,
            t_head=times.get("t_head"),
        )


def sizes(times: dict[str, float]) -> dict[int, float]:
    """The string keys of JSON as numbers of tokens."""
    return {int(tokens): seconds for tokens, seconds in times.items()}
