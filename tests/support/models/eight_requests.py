"""Eight different requests, decoded together or one after the other."""

from __future__ import annotations

from typing import Any

from draftwell.serving.runtime.engine.engine import Engine
from draftwell.serving.runtime.requests import Sampling


def requests(vocab: int, temperature: float) -> list[tuple[list[int], Sampling]]:
    """Eight that end at different times; some are penalised or biased, some may stop early."""
    extra: list[dict[str, Any]] = [
        {},
        {"frequency_penalty": 0.8},
        {"stop_token_ids": frozenset({3})},
        {"logit_bias": {4: 1.0}},
    ]
    return [
        (
            [1 + i % (vocab - 1), 2, i % vocab][: 1 + i % 3],
            Sampling(max_tokens=8 + i, temperature=temperature, seed=i, **extra[i % 4]),
        )
        for i in range(8)
    ]


def check_together(
    engine: Engine, build: Any, wanted: list[tuple[list[int], Sampling]]
) -> list[list[int]]:
    """All at once they write what each writes alone, and every slot comes back; returns it."""
    alone = outputs(engine, build, wanted, together=False)
    assert outputs(engine, build, wanted, together=True) == alone
    assert {len(model.slots._free) for model in engine.models.values()} == {8}
    return alone


def outputs(
    engine: Engine, build: Any, wanted: list[tuple[list[int], Sampling]], together: bool
) -> list[list[int]]:
    if together:
        jobs = [engine.submit(prompt, sampling, build()) for prompt, sampling in wanted]
        engine.run(jobs)
    else:
        jobs = [engine.generate(prompt, sampling, build()) for prompt, sampling in wanted]
    return [job.output for job in jobs]
