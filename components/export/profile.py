"""`speculation_profile.json`: how far drafts are accepted, as a file that travels with a head or a
draft.

Schema 1.0 of NVIDIA Model-Optimizer's pull requests 2247 (schema, specdec_bench), 2313 (attached at
export) and 2315 (`ar_validate`), which were open when this was written; read from
`examples/specdec_bench/specdec_bench/speculation_profile.py`
(095124e9d582ea52b3aeb636efc281919f3aa4db, and the later version that carries gaps of the histogram
down). Two conventions stand side by side: `marginal_accept_rates` are shares of all rounds that
keep the token at a position and all before it (vLLM's `synthetic_acceptance_rates`), and
`conditional_accept_rates` of those that kept all before it (dynamo's mocker).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from operator import mul
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from draftwell.serving.errors import DraftwellError, first_wrong
from draftwell.serving.files import read_text, write_json

FILE = "speculation_profile.json"
SCHEMA_VERSION = "1.0"
CHAINS = frozenset({"eagle3", "draft_model"})
"""Methods whose draft of k tokens begins the one of k + 1, so that the rates hold for shorter ones,
too."""
TOLERANCE = 0.02
"""Between a mean and what the rates add up to, and between the two conventions, as upstream."""
Rates = list[Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]]


class SpeculationProfile(BaseModel):
    """What is known of a head or a draft. Producers leave fields out and add others, so only the
    version is asked for; what they add is kept."""

    model_config = ConfigDict(extra="allow", frozen=True)

    schema_version: str
    measured: bool = True
    method: str | None = None
    draft_checkpoint: dict[str, Any] | None = None
    target_model: dict[str, Any] | None = None
    num_speculative_tokens: int | None = Field(None, ge=1)
    block_size: int | None = None
    max_supported_k: int | None = None
    verification_method: str = "longest_prefix"
    conditional_accept_rates: Rates | None = None
    marginal_accept_rates: Rates | None = None
    mean_accept_length: float | None = Field(None, ge=1, allow_inf_nan=False)
    """Tokens a round, its own token of the target included: the mean over rounds."""
    mean_accept_length_per_request: float | None = None
    """The mean over requests of their means, as model cards often give it."""
    accept_length_model: str | None = None
    accept_length_by_k: dict[str, float] = Field(default_factory=dict)
    acceptance_length_histogram: dict[str, int] | None = None
    """Tokens a round → rounds."""
    per_category: dict[str, Any] | None = None
    measurement_conditions: dict[str, Any] | None = None
    validation: dict[str, Any] | None = None

    @property
    def expected(self) -> tuple[float, ...]:
        """Share of all rounds that keep the token at each position of the draft and all before it:
        non-increasing, 0 to 1.

        Raises:
            DraftwellError: it was not measured (`profile_not_measured`), or holds no rates of
                single positions (`profile_without_rates`).
        """
        if not self.measured:
            raise DraftwellError(
                f"this {FILE} says that nothing was measured: name one of a measured draft",
                code="profile_not_measured",
            )
        if self.marginal_accept_rates:
            return tuple(self.marginal_accept_rates)
        if self.conditional_accept_rates:
            return tuple(accumulate(self.conditional_accept_rates, mul))
        raise DraftwellError(
            f"this {FILE} has no accept rates by position: name one that has",
            code="profile_without_rates",
        )

    def written(self) -> dict[str, Any]:
        """As plain JSON."""
        found: dict[str, Any] = json.loads(self.model_dump_json())
        return found


def profile_of(
    rounds: int, accepted_at: Sequence[int], *, method: str, k: int, **known: Any
) -> SpeculationProfile:
    """A profile of counts.

    Args:
        rounds: in which the target verified a draft, at least 1.
        accepted_at: rounds that kept the token at each position and all before it.
        k: draft tokens of a round; the rates have that many entries.
        known: further fields.
    """
    at = [*accepted_at, *[0] * k][:k]
    marginal = [count / rounds for count in at]
    conditional = [count / before if before else 0.0 for before, count in pairwise([rounds, *at])]
    # k accepted tokens and the target's own: the last entry counts those who kept all
    histogram = {
        str(length): before - count
        for length, (before, count) in enumerate(pairwise([rounds, *at, 0]), 1)
        if before > count
    }
    mean = 1 + sum(accepted_at) / rounds
    fields = {
        "schema_version": SCHEMA_VERSION,
        "method": method,
        "num_speculative_tokens": k,
        "max_supported_k": k,
        "conditional_accept_rates": [round(rate, 6) for rate in conditional],
        "marginal_accept_rates": [round(rate, 6) for rate in marginal],
        "mean_accept_length": round(mean, 6),
        "accept_length_model": "chain_analytic" if method in CHAINS else "measured_per_k",
        "accept_length_by_k": {str(k): round(mean, 6)},
        "acceptance_length_histogram": histogram,
        "validation": checks(mean, marginal),
    }
    return SpeculationProfile(**{**fields, **known})


def checks(mean: float, marginal: Sequence[float]) -> dict[str, Any]:
    """Whether mean and rates tell the same, and whether no later token is kept more often."""
    implied = 1 + sum(marginal)
    rising = [
        {"position": i, "value": after, "previous": before}
        for i, (before, after) in enumerate(pairwise(marginal), 1)
        if after > before + 1e-9
    ]
    return {
        "mean_consistency": {
            "implied_mean_accept_length": round(implied, 6),
            "reported_mean_accept_length": round(mean, 6),
            "abs_delta": round(abs(implied - mean), 6),
            "tolerance": TOLERANCE,
            "passed": abs(implied - mean) <= TOLERANCE,
        },
        "marginal_monotonicity": {"passed": not rising, "violations": rising},
    }


def unmeasured(method: str, **known: Any) -> SpeculationProfile:
    """What stands beside a head that nobody measured, so that this is not taken for a head of
    before there were profiles."""
    return SpeculationProfile(
        schema_version=SCHEMA_VERSION,
        measured=False,
        method=method,
        note="not measured: export again with --set measured=…, or attach a profile of "
        "specdec_bench",
        **known,
    )


def write_profile(folder: Path, profile: SpeculationProfile) -> Path:
    """Write it beside the weights, in the place of an older one."""
    return write_json(folder / FILE, profile.written())


def read_profile(path: Path) -> SpeculationProfile:
    """A profile, from its file or from the folder of its checkpoint.

    Raises:
        DraftwellError: there is none, or it is none of schema 1 (`bad_profile`); rates that cannot
            be what they are called (`profile_mixes_conventions`). One line each.
    """
    file = path / FILE if path.is_dir() else path
    try:
        found = json.loads(read_text(file))
    except OSError as error:
        raise bad_profile(file, f"it cannot be read, {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise bad_profile(file, "it is not JSON and may be cut off") from error
    if not isinstance(found, Mapping) or "schema_version" not in found:
        raise bad_profile(file, "it has no schema_version")
    if not str(found["schema_version"]).startswith("1."):
        raise bad_profile(file, f"it is of schema {found['schema_version']}, and 1 is read here")
    try:
        profile = SpeculationProfile.model_validate(found)
    except ValidationError as error:
        raise bad_profile(file, first_wrong(error)) from error
    check_conventions(file, profile)
    return profile


def check_conventions(file: Path, profile: SpeculationProfile) -> None:
    """Refuse rates of one convention under the other's name: read as they are called, they describe
    a much better or a much worse draft."""
    marginal, conditional = profile.marginal_accept_rates, profile.conditional_accept_rates
    rises = marginal and any(b > a + 1e-6 for a, b in pairwise(marginal))
    product = accumulate(conditional or (), mul)
    differ = (
        marginal
        and conditional
        and any(abs(one - other) > TOLERANCE for one, other in zip(marginal, product, strict=False))
    )
    if rises or differ:
        raise DraftwellError(
            f"{file}: marginal_accept_rates are no shares of all rounds: they "
            + ("rise" if rises else "are not the products of conditional_accept_rates")
            + "; write the rates again under their right names",
            code="profile_mixes_conventions",
        )


def bad_profile(file: Path, what: str) -> DraftwellError:
    """What is wrong with a file, in one line."""
    return DraftwellError(f"{file} is no {FILE}: {what}: name another file", code="bad_profile")
