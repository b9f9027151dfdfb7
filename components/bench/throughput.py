"""Throughput of requests one at a time and several at once, on the same prompts, interleaved.

Online state is copied for every request, so that what a request gives does not depend on its
neighbours and the outputs of both ways can be compared: in float32 they are equal but for
near-ties, in bfloat16 near-ties are common.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from draftwell.components.bench.interleaved import (
    WARMUP_TOKENS,
    Progress,
    leaving_out,
    take_turns,
)
from draftwell.components.bench.runner import Config, core_plan, labels_of
from draftwell.components.bench.settings import DEFAULTS, BenchSettings
from draftwell.components.bench.target_agreement import differences
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

Pass = tuple[float, list[list[int]]]
"""Seconds and outputs of all requests."""


def batch_throughput(
    pair: LoadedPair,
    resources: StrategyResources,
    configs: Sequence[Config],
    prompts: Sequence[Prompt],
    settings: BenchSettings = DEFAULTS,
    *,
    left_out: dict[str, str] | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Tokens a second of every config, with one request in flight and with `settings.concurrency`
    in flight.

    Args:
        pair: loaded with at least `settings.concurrency` slots.
        settings: each config runs `runs` times both ways; the median of each way counts.
        left_out: as of `run_bench`.
    Returns:
        plain JSON: `pair`, `fingerprint`, `padded_to`, `machine`, `settings`, `several_turns`
        (prompts of which only the first of several turns was decoded), `left_out` (label → reason)
        and `configs: {label: {alone, together (tokens/s, median), ratio, alone_runs,
        together_runs, tokens, identical, near_ties, differences}}`. `tokens` are those of one pass
        alone; at temperature 0 outputs that differ are near-ties or differences, sampled ones are
        only counted.
    Raises:
        DraftwellError: fewer prompts than requests at once.
    """
    check_prompts(prompts, settings)
    base = pair.sampling(max_tokens=settings.max_tokens, temperature=settings.temperature)
    requests: list[Request] = [
        (ids_of(pair, prompt), replace(base, seed=settings.seed + i))
        for i, prompt in enumerate(prompts)
    ]
    measured = measure_both_ways(
        pair,
        replace(resources, deterministic=True),
        configs,
        requests,
        settings,
        left_out,
        progress,
    )
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
        "configs": {
            label: compared(pair, prompts, requests, alone, together)
            for label, (alone, together) in measured.items()
        },
        "left_out": left_out or {},
    }


def check_prompts(prompts: Sequence[Prompt], settings: BenchSettings) -> None:
    """Refuse fewer prompts than requests at once."""
    if settings.concurrency > len(prompts):
        raise DraftwellError(
            f"{len(prompts)} prompts are too few to measure {settings.concurrency} requests at "
            "once: give more prompts, or lower concurrency",
            code="too_few_prompts",
        )


def measure_both_ways(
    pair: LoadedPair,
    resources: StrategyResources,
    configs: Sequence[Config],
    requests: Sequence[Request],
    settings: BenchSettings,
    left_out: dict[str, str] | None,
    progress: Progress | None,
) -> dict[str, list[list[Pass]]]:
    """Label → the passes with one request in flight, and those with several."""
    ways = (1, settings.concurrency)
    short = min(settings.max_tokens, WARMUP_TOKENS)
    warm = [
        (ids, replace(sampling, max_tokens=short))
        for ids, sampling in requests[: settings.concurrency]
    ]

    def decode(strategy: Strategy, split: bool | None, asked: Sequence[Request], way: int) -> Pass:
        engine = pair.engine(split=split)
        try:
            return drive(engine, strategy, asked, ways[way])
        finally:
            engine.close()

    turns: dict[str, Callable[[int], Pass]] = {}
    for label, config in zip(labels_of(configs), configs, strict=True):
        name, split = core_plan(config.name)
        strategy = build_strategy(name, dict(config.parameters), resources)
        with leaving_out(label, left_out):
            for way in range(len(ways)):
                decode(strategy, split, warm, way)
            turns[label] = partial(decode, strategy, split, requests)
    return take_turns(turns, len(ways), settings.runs, left_out=left_out, progress=progress)


def drive(engine: Engine, strategy: Strategy, requests: Sequence[Request], at_once: int) -> Pass:
    """Run all requests, `at_once` in flight while there are so many; seconds and outputs."""
    started = time.perf_counter()
    outputs = decode_all(engine, requests, [strategy] * len(requests), at_once)
    return time.perf_counter() - started, outputs


def compared(
    pair: LoadedPair,
    prompts: Sequence[Prompt],
    requests: Sequence[Request],
    alone: Sequence[Pass],
    together: Sequence[Pass],
) -> dict[str, Any]:
    """Figures of one config."""
    rates = [
        [sum(map(len, outputs)) / seconds for seconds, outputs in runs]
        for runs in (alone, together)
    ]
    one, many = map(statistics.median, rates)
    singles, batched = alone[0][1], together[0][1]
    same = sum(single == output for single, output in zip(singles, batched, strict=True))
    greedy = requests[0][1].greedy
    found = (
        differences(
            pair,
            [p.id for p in prompts],
            [ids for ids, _ in requests],
            batched,
            singles,
            exact=pair.exact,
        )
        if greedy
        else []
    )
    return {
        "alone": one,
        "together": many,
        "ratio": many / one,
        "alone_runs": rates[0],
        "together_runs": rates[1],
        "tokens": sum(map(len, singles)),
        "identical": same,
        "near_ties": [d.prompt_id for d in found if d.near_tie],
        "differences": [d.prompt_id for d in found if not d.near_tie],
    }


def batch_table(report: Mapping[str, Any]) -> Table:
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
    draft = report["machine"].get("draft_device")
    parts = [
        report["pair"],
        settings["dtype"],
        f"target padded to {report['padded_to']:,} parameters" if report["padded_to"] else "",
        f"draft on {draft}" if draft else "",
        f"{settings['prompts']} prompts{first_turns(report['several_turns'])}",
        f"up to {settings['max_tokens']} new tokens",
        f"median of {settings['runs']}",
    ]
    columns = (
        "strategy",
        "tokens/s, one at a time",
        f"tokens/s, {settings['concurrency']} at once",
        "ratio",
        "same output",
        "near-ties",
    )
    return rich_table(columns, rows, ", ".join(part for part in parts if part), "Batching")
