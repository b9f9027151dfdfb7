"""Evidence of tunings, made by hand in the JSON form of `TuningEvidence`: of lossless strategies,
with lossy ones."""

from __future__ import annotations

from typing import Any

CHOICE = {"strategy": "spide", "parameters": {"tau": 0.4, "parallel": True}}
PLAIN = {"strategy": "autoregressive", "parameters": {}}


def trial(
    strategy: str,
    milliseconds: float,
    calls: float | None,
    divergence: float | None = 0.0,
    source: str = "replayed",
    **parameters: Any,
) -> dict[str, Any]:
    return {
        "strategy": strategy,
        "parameters": parameters,
        "predicted_seconds_per_token": milliseconds / 1e3,
        "exact": source == "replayed",
        "target_calls_per_token": calls,
        "divergence": divergence,
        "source": source,
    }


def figure(
    config: dict[str, Any], milliseconds: float, speedup: float = 1.0, **more: Any
) -> dict[str, Any]:
    return {
        **config,
        "prompts": 4,
        "seconds_per_token": milliseconds / 1e3,
        "target_calls_per_token": 0.5,
        "speedup": speedup,
        "speedup_low": speedup - 0.05,
        "speedup_high": speedup + 0.07,
        **more,
    }


TRIALS = [
    trial("vanilla_sd", 30.0, 0.70, num_speculative_tokens=1),
    trial("vanilla_sd", 28.0, 0.55, num_speculative_tokens=2),
    trial("vanilla_sd", 29.0, 0.50, num_speculative_tokens=3),
    trial("spide", 27.0, 0.55, tau=0.4, parallel=False),
    trial("spide", 26.0, 0.57, tau=0.6, parallel=False),
    trial("spide", 20.0, 0.52, tau=0.4, parallel=True),
    trial("spide", 24.0, 0.53, tau=0.4, parallel=True, max_draft=4),
    trial("spide", 22.0, 0.56, tau=0.6, parallel=True),
    trial("pearl", 26.0, 0.60, num_speculative_tokens=None),
    trial("pearl", 25.0, 0.58, num_speculative_tokens=4),
]
GAMMA2 = {"strategy": "vanilla_sd", "parameters": {"num_speculative_tokens": 2}}
GAMMA1 = {"strategy": "vanilla_sd", "parameters": {"num_speculative_tokens": 1}}

CONFIRMED = [
    figure(
        PLAIN,
        33.0,
        quality_loss=0.0,
        cost_ratio=1.9,
        lossless=True,
        rouge_l_lost=None,
        objection=None,
    ),
    figure(
        CHOICE,
        21.0,
        1.5714,
        quality_loss=0.0,
        cost_ratio=0.94,
        lossless=True,
        rouge_l_lost=None,
        objection=None,
    ),
]
RUNG = {
    "prompts": ["demo/qa/1", "<b>bold</b>"],
    "figures": [figure(PLAIN, 34.0), figure(CHOICE, 23.0, 1.478), figure(GAMMA2, 30.0, 1.13)],
    "dropped": [{**GAMMA2, "why": "1.13 times as fast as autoregressive, place 2 of 2"}],
}

LOSSLESS: dict[str, Any] = {
    "schema_version": 3,
    "choice": CHOICE,
    "reason": "spide(…) is 1.57 times as fast as autoregressive",
    "trials": TRIALS,
    "rungs": [RUNG],
    "confirmation": {"tail": 0.05, "figures": CONFIRMED},
    "measured": [
        CONFIRMED[0]
        | {"predicted_seconds_per_token": 32.0e-3, "confirmed": True, "divergence": 0.0},
        CONFIRMED[1]
        | {"predicted_seconds_per_token": 20.0e-3, "confirmed": True, "divergence": 0.0},
        RUNG["figures"][2]
        | {"predicted_seconds_per_token": 28.0e-3, "confirmed": False, "divergence": 0.0},
    ],
    "constraints": {
        "lossless_only": True,
        "max_quality_loss": 0.1,
        "max_rouge_l_loss": 2.0,
        "max_cost_ratio": None,
    },
    "champion": GAMMA1,
    "left_out": {"sprinter": "it is lossy, and only lossless strategies are allowed"},
    "artifacts": {"acceptance_table": "a" * 64},
    "trace_digest": "7" * 64,
    "fingerprint": "f" * 64,
    "padded_to": None,
    "device_class": "cpu-test",
    "prompts": 4,
    "machine": {
        "device_name": "A <i>CPU</i>",
        "cores": 2,
        "threads": 2,
        "dtype": "bfloat16",
        "commit": "c" * 40,
    },
    "seed": 0,
}
"""A tuning of lossless strategies."""

CSD = {"strategy": "csd", "parameters": {"tau": 0.05, "num_speculative_tokens": 6}}
CONFIRMED_CSD = figure(
    CSD,
    17.5,
    1.8857,
    quality_loss=0.07,
    cost_ratio=0.8,
    lossless=False,
    rouge_l_lost=0.4,
    objection=None,
)
LOSSY: dict[str, Any] = {
    **LOSSLESS,
    "choice": CSD,
    "trials": [
        *TRIALS,
        trial("csd", 18.0, 0.45, 0.06, "measured", tau=0.05, num_speculative_tokens=6),
        trial("csd", 19.0, 0.46, 0.08, "measured", tau=0.01, num_speculative_tokens=6),
    ],
    "confirmation": {"tail": 0.05, "figures": [CONFIRMED[0], CONFIRMED_CSD]},
    "measured": [
        CONFIRMED[0] | {"predicted_seconds_per_token": 32.0e-3, "divergence": 0.0},
        CONFIRMED_CSD | {"predicted_seconds_per_token": None, "divergence": 0.07},
    ],
}
"""One that chose a lossy strategy; its first, short measurement is no prediction."""
