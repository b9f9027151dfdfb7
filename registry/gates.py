"""What a release must show before it is promoted: thresholds, recorded baselines, and the record of
a verdict."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from draftwell.registry.strict import Strict, read_json, read_yaml

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


class StrategyCounts(Strict):
    """Counts of one strategy over the baseline's prompts, greedy and in float32: the same on every
    machine."""

    target_calls: int = Field(ge=0)
    judged: int = Field(ge=0, description="draft tokens that the target looked at")
    accepted: int = Field(ge=0)
    output_digest: str = Field(description="sha256 over the output tokens of all prompts")


class Baseline(Strict):
    """Deterministic counts of a pair, which a fresh clone can be compared with."""

    pair: str
    fingerprint: str = Field(description="pair fingerprint in float32")
    prompts_digest: str = Field(description="sha256 over the prompts")
    prompts: int = Field(ge=1)
    max_tokens: int = Field(ge=1)
    strategies: dict[str, StrategyCounts]


def load_baseline(pair: str) -> Baseline | None:
    """The recorded counts of a pair, or None where none were recorded (`baselines/README.md` says
    how)."""
    path = HERE / "baselines" / f"{pair}.json"
    return read_json(path, Baseline) if path.is_file() else None


class GateCheck(Strict):
    """One measured value against its threshold."""

    name: str
    value: float
    threshold: float
    passed: bool
    transient: bool = Field(False, description="failed for what the machine lacked at that moment")
    enough: bool = Field(
        True,
        description=(
            "False: not passed for want of evidence, not failed; records of earlier versions "
            "knew no such"
        ),
    )
    prompts_needed: int | None = Field(
        None,
        ge=1,
        description="estimate of the prompts that would decide, where evidence is not enough",
    )


class GateRecord(Strict):
    """A verdict about exact versions. It is valid as long as the release pins exactly these."""

    pair: str
    device: str
    release_version: int = Field(ge=1)
    pins: dict[str, int] = Field(description="kind → version that was judged")
    passed: bool
    checks: tuple[GateCheck, ...] = Field(min_length=1)
    baseline_version: int | None = Field(
        None, description="the champion when it was judged; None where there was none"
    )
    bundle_digest: str | None = Field(
        None,
        description="digest of the bundle that was judged; None in records of earlier versions",
    )
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
    created: str = Field(description="when it was judged, ISO 8601")

    @property
    def undecided(self) -> bool:
        """Whether it failed for nothing but what the machine lacked at that moment: it may be
        judged again."""
        failed = [check for check in self.checks if not check.passed]
        return bool(failed) and all(check.transient for check in failed)

    def objection(self, version: int, pins: dict[str, int]) -> str | None:
        """Why the record does not let a release pass, or None."""
        if self.release_version != version or self.pins != pins:
            return f"its gate record names version {self.release_version} with other artifacts"
        failed = [check.name for check in self.checks if not check.passed and check.enough]
        doubtful = [check.name for check in self.checks if not check.passed and not check.enough]
        if doubtful and not failed:
            return f"its gate had not enough evidence ({', '.join(doubtful)}{self.prompts_hint()})"
        if failed or not self.passed:
            return f"its gate failed ({', '.join(failed) or 'as a whole'})"
        return None

    def serves_greedy_choice(self, version: int, pins: dict[str, int]) -> bool:
        """Whether bundles of a release that passed let its greedy choice serve sampled requests,
        for which nothing was tuned."""
        return self.sampled_as_greedy and self.objection(version, pins) is None

    def prompts_hint(self) -> str:
        """How many prompts would decide, where that can be estimated."""
        needed = [check.prompts_needed for check in self.checks if check.prompts_needed]
        return f"; an estimated {max(needed)} prompts would decide" if needed else ""

    @property
    def result(self) -> str:
        """passed, failed or not enough evidence."""
        if self.passed:
            return "passed"
        return (
            "failed"
            if all(check.passed or check.enough for check in self.checks)
            else "not enough evidence"
        )
