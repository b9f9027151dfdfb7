"""What a release must show before it is promoted: thresholds, recorded baselines, and the record of
a verdict."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from draftwell.registry.strict import Model, Strict, read_json, read_yaml
from draftwell.serving.bundle.verdict import Check, JudgedRecord

HERE = Path(__file__).parent


class Gates(Strict):
    """Thresholds of promotion; `gates.yaml` explains each."""

    max_regression: float = Field(
        ge=0, lt=1, description="share by which a candidate may be slower than the champion"
    )
    min_speedup_lower_bound: float = Field(
        ge=0, description="lower end of the speedup over autoregressive"
    )
    lossless_identical: bool = Field(
        description="lossless strategies give autoregressive's tokens in float32"
    )
    min_acceptance_ratio: float = Field(
        ge=0, description="acceptance rate over the recorded baseline's, of deterministic counts"
    )
    min_quality_ratio: float = Field(
        ge=0, le=1, description="quality of a lossy strategy over autoregressive's"
    )
    min_weights_agreement: float = Field(
        ge=0,
        le=1,
        description="share of positions where a target with rounded weights chooses the "
        "full weights' token",
    )
    max_rouge_l_loss: float = Field(
        ge=0, description="ROUGE-L points that a lossy strategy may lose to autoregressive decoding"
    )
    max_surprisal_shift: float = Field(
        ge=0,
        description="nats a token by which the target may find a lossy strategy's samples more or "
        "less likely than samples of its own",
    )
    max_tpot_ratio: float = Field(
        gt=0, description="time per output token over autoregressive's, the mean over requests"
    )
    max_prediction_loss_ratio: float = Field(
        ge=1, description="log loss of table and verifier over the champion's, on the same traces"
    )
    max_bundle_mb: float = Field(
        gt=0, description="size of the bundle without the models that are fetched, in 10^6 bytes"
    )
    max_startup_seconds: float = Field(
        gt=0, description="from the start of a process to its first tokens from the bundle"
    )
    unknown_prompts: Literal["warn", "refuse"] = Field(
        "warn",
        description="what becomes of a release with something whose training "
        "prompts are not all recorded",
    )


def load_gates(path: Path | None = None) -> Gates:
    """The thresholds, from the project's `gates.yaml` or another file.

    >>> load_gates().lossless_identical
    True
    """
    return read_yaml(path or HERE / "gates.yaml", Gates)


def load_baseline(pair: str, model: type[Model]) -> Model | None:
    """The recorded counts of a pair as a `model`, or None where none were recorded
    (`baselines/README.md` says how)."""
    path = HERE / "baselines" / f"{pair}.json"
    return read_json(path, model) if path.is_file() else None


class GateRecord(JudgedRecord):
    """A verdict about exact versions. It is valid as long as the release pins exactly these."""

    pair: str
    device: str
    release_version: int = Field(ge=1)
    pins: dict[str, int] = Field(description="kind → version that was judged")
    checks: tuple[Check, ...] = Field(min_length=1)
    baseline_version: int | None = Field(
        None, description="the champion when it was judged; None where there was none"
    )
    bundle_digest: str | None = Field(None, description="digest of the bundle that was judged")
    sampled_lower_bound: float | None = Field(
        None,
        description="where nothing was tuned for sampled requests: lower end of the greedy "
        "choice's "
        "speedup over plain decoding for "
        "them; None where it was not measured",
    )
    sampled_as_greedy: bool = Field(
        False,
        description="whether that lets the greedy choice serve them; else plain decoding does",
    )
    judged: str | None = Field(
        None, description="digest of the prompts and tokens that were judged; None: not recorded"
    )
    created: str = Field(description="when it was judged, ISO 8601")

    def objection(self, version: int, pins: dict[str, int]) -> str | None:
        """Why the record does not let a release pass, or None."""
        if self.release_version != version or self.pins != pins:
            return f"its gate record names version {self.release_version} with other artifacts"
        return self.refusal()

    def serves_greedy_choice(self, version: int, pins: dict[str, int]) -> bool:
        """Whether bundles of a release that passed let its greedy choice serve sampled requests,
        for which nothing was tuned."""
        return self.sampled_as_greedy and self.objection(version, pins) is None
