"""Throughput of requests one at a time and several at once, on the same prompts, interleaved.

Online state is copied for every request, so that what a request gives does not depend on its
neighbours and the outputs of both ways can be compared: in float32 they are equal but for
near-ties, in bfloat16 near-ties are common.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from draftwell.components.bench.runner import WARMUP_TOKENS, Config, Progress, core_plan, labels_of
from draftwell.components.bench.settings import DEFAULTS, BenchSettings
from draftwell.components.bench.target_agreement import difference
from draftwell.components.collect.decoding import Request, decode_all
from draftwell.components.prompts.prompt import Prompt, ids_of, several_turns
from draftwell.components.report.machine import describe_machine
from draftwell.components.report.tables import first_turns, rich_table
from draftwell.serving.errors import DraftwellError
from draftwell.serving.runtime.engine.engine import Engine
from draftwell.serving.runtime.pair import LoadedPair
from draftwell.serving.runtime.strategies import Strategy, StrategyResources, build_strategy

if TYPE_CHECKING:
    from rich.table import Table


Passes = list[tuple[float, list[list[int]]]]
"""Seconds and outputs of each pass over the requests."""


def batch_throughput(
    pair: LoadedPair,
    resources: StrategyResources,
    configs: Sequence[Config],
    prompts: Sequence[Prompt],
    settings: BenchSettings = DEFAULTS,
    *,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Tokens a second of every config, with one request in flight and with `settings.concurrency`
    in flight.

    Args:
        pair: loaded with at least `settings.concurrency` slots.
        settings: each config runs `runs` times both ways; the median of each way counts.
    Returns:
        plain JSON: `pair`, `fingerprint`, `padded_to`, `machine`, `settings`, `several_turns`
            (prompts of which only the first of
        several turns was decoded) and `configs: {label: {alone, together (tokens/s, median), ratio,
        alone_runs, together_runs, tokens, identical, near_ties, differences}}`. `tokens` are those
        of one pass alone; at temperature 0 outputs that differ are near-ties or differences,
        sampled ones are only counted.
    Raises:
        DraftwellError: fewer prompts than requests at once.
    """
    concurrency = settings.concurrency
    if concurrency > len(prompts):
        raise DraftwellError(
            f"{len(prompts)} prompts are too few to measure {concurrency} requests at "
            "once: give more prompts, or lower "
            "--concurrency",
            code="too_few_prompts",
        )
    base = pair.sampling(max_tokens=settings.max_tokens, temperature=settings.temperature)
    requests: list[Request] = [
        (ids_of(pair, prompt), replace(base, seed=settings.seed + i))
        for i, prompt in enumerate(prompts)
    ]
    measured = measure_both_ways(
        pair, replace(resources, deterministic=True), configs, requests, settings, progress
    )
    found = {
        label: compared(pair, prompts, requests, alone, together)
        for label, (alone, together) in zip(labels_of(configs), measured, strict=True)
    }
    shown = settings.model_dump(
        include={"concurrency", "max_tokens", "temperature", "runs", "seed"}
    )
    return {
        "pair": pair.name,
        "fingerprint": pair.fingerprint,
        "padded_to": pair.padded_to,
        "machine": describe_machine(pair),
        "settings": {"prompts": len(prompts), "dtype": pair.dtype, **shown},
        "several_turns": several_turns(prompts),
        "configs": found,
    }


def measure_both_ways(
    pair: LoadedPair,
    resources: StrategyResources,
    configs: Sequence[Config],
    requests: Sequence[Request],
    settings: BenchSettings,
    progress: Progress | None,
) -> list[tuple[Passes, Passes]]:
    """For each config its passes with one request in flight, and those with several; both ways
    alternate."""
    plans = [core_plan(config.name) for config in configs]
    strategies = [
        build_strategy(name, dict(config.parameters), resources)
        for (name, _), config in zip(plans, configs, strict=True)
    ]
    short = min(settings.max_tokens, WARMUP_TOKENS)
    warm = [
        (ids, replace(sampling, max_tokens=short))
        for ids, sampling in requests[: settings.concurrency]
    ]
    measured: list[tuple[Passes, Passes]] = [([], []) for _ in configs]
    done, total = 0, settings.runs * len(configs) * 2
    for run in range(settings.runs):
        for strategy, (_, split), ways in zip(strategies, plans, measured, strict=True):
            for at_once, passes in zip((1, settings.concurrency), ways, strict=True):
                engine = pair.engine(split=split)
                if run == 0:
                    drive(engine, strategy, warm, at_once)
                passes.append(drive(engine, strategy, requests, at_once))
                engine.close()
                done += 1
                if progress:
                    progress(done, total, f"{strategy.name}, {at_once} at once")
    return measured


def drive(
    engine: Engine, strategy: Strategy, requests: Sequence[Request], at_once: int
) -> tuple[float, list[list[int]]]:
    """Run all requests, `at_once` in flight while there are so many; seconds and outputs."""
    started = time.perf_counter()
    outputs = decode_all(engine, requests, [strategy] * len(requests), at_once)
    return time.perf_counter() - started, outputs


def compared(
    pair: LoadedPair,
    prompts: Sequence[Prompt],
    requests: Sequence[Request],
    alone: Passes,
    together: Passes,
) -> dict[str, Any]:
    """Figures of one config."""
    rates = [
        [sum(map(len, outputs)) / seconds for seconds, outputs in runs]
        for runs in (alone, together)
    ]
    one, many = map(statistics.median, rates)
    pairs = list(zip(prompts, requests, alone[0][1], together[0][1], strict=True))
    differing = [row for row in pairs if row[2] != row[3]]
    found = [
        difference(pair, prompt.id, ids, batched, single)
        for prompt, (ids, sampling), single, batched in differing
        if sampling.greedy
    ]
    return {
        "alone": one,
        "together": many,
        "ratio": many / one,
        "alone_runs": rates[0],
        "together_runs": rates[1],
        "tokens": sum(map(len, alone[0][1])),
        "identical": len(pairs) - len(differing),
        "near_ties": [d.prompt_id for d in found if d and d.near_tie],
        "differences": [d.prompt_id for d in found if d and not d.near_tie],
    }


def batch_table(report: dict[str, Any]) -> Table:
    """The report as a table for the terminal."""
    settings = report["settings"]
    rows = [
        [
            label,
            f"{f['alone']:.1f}",
            f"{f['together']:.1f}",
            f"{f['ratio']:.2f}",
            f"{f['identical']} of {settings['prompts']}",
            str(len(f["near_ties"])),
        ]
        for label, f in report["configs"].items()
    ]
    elsewhere = (
        f", draft on {report['machine']['draft_device']}"
        if report["machine"].get("draft_device")
        else ""
    )
    padded = f", target padded to {report['padded_to']:,} parameters" if report["padded_to"] else ""
    caption = (
        f"{report['pair']}, {settings['dtype']}{padded}{elsewhere}, {settings['prompts']} prompts"
        f"{first_turns(report['several_turns'])}, up to {settings['max_tokens']} new "
        f"tokens, median of {settings['runs']}"
    )
    return rich_table(
        (
            "strategy",
            "tokens/s, one at a time",
            f"tokens/s, {settings['concurrency']} at once",
            "ratio",
            "same output",
            "near-ties",
        ),
        rows,
        caption,
        "Batching",
    )
