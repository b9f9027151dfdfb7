"""The bench: strategies, and peers where asked for, on the same prompts in one run (measures as METHODS defines them)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from components.bench.device_parity import check_against
from components.bench.metrics import REFERENCE, BenchMetrics, fastest, gamma_of_parameters
from components.bench.peak_memory import peaks_over_models
from components.bench.peers import load_peers
from components.bench.ratios import curves, headlines, largest_overheads
from components.bench.runner import Config, Log, Progress, StrategyContender, contenders_of, measure, naming
from components.bench.target_agreement import argmax_matches
from components.prompts.prompt import Prompt, ids_of, prompts_digest, several_turns
from components.report.machine import describe_machine
from components.report.threads import using_threads
from serving.runtime.pair import LoadedPair
from serving.runtime.strategies import PLAIN, StrategyChoice, StrategyResources

FASTEST = "vanilla_sd at its fastest gamma"
PILOT_GAMMAS, PILOT_PROMPTS, PILOT_TOKENS = (1, 2, 3, 5), 3, 24


def run_bench(
    pair: LoadedPair,
    strategies: Sequence[Config],
    prompts: Sequence[Prompt],
    resources: StrategyResources,
    *,
    max_tokens: int = 128,
    temperature: float = 0.0,
    runs: int = 1,
    warmup: bool = True,
    seed: int = 0,
    peers: Sequence[str] = (),
    threads: int | None = None,
    extra: Sequence[StrategyContender] = (),
    cost_ratios: bool = True,
    memory: bool = False,
    check: LoadedPair | None = None,
    log: Log | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Measure strategies against autoregressive decoding.

    Args:
        strategies: (name, parameters); `autoregressive` is measured too where it is not among them. A name with `@1+1` behind
            it runs on equal cores, each model on its own share.
        peers: names of `peers.PEERS`, such as "transformers".
        threads: threads of torch during the run, None leaves them as they are.
        extra: further contenders under labels of their own, such as a champion with its own artifacts.
        cost_ratios: also measure vanilla SD at its fastest gamma where the run lacks it; False leaves cost ratios to what there is.
        memory: first decode the longest prompt with each strategy, to see its peak memory.
        check: the same pair on the CPU, whose greedy outputs those of lossless strategies are checked against.
        log: called with (name, value, 0) for the main figures of every strategy.
    Returns:
        plain JSON: `pair`, `fingerprint`, `padded_to` (None: the target as it is), `machine`, `settings`, `prompts` (how many),
        `prompt_ids`, `prompts_digest`, `several_turns` (prompts of which only the first of several turns was decoded), `references`
        (prompts behind every ROUGE-L), `strategies: {label: figures}`, `cost_reference` (vanilla SD at its fastest gamma, which
        cost ratios are against), `peers: {name: {label: figures}}`, `headlines` (ratios with intervals), `largest_overheads`, `curves` and
        `cpu_check`. A label is the strategy's name, with its parameters where it was measured with several. Beside the
        figures each entry has `per_prompt` rows, digests of what it rests on (`origins`) and, for lossy strategies, quality. A
        figure that cannot be had is None.
    """
    configs = list(strategies)
    if REFERENCE not in [config.name for config in configs]:
        configs.insert(0, PLAIN)
    with using_threads(threads):
        warm_up(pair, prompts, max_tokens)
        peaks = memory_peaks(pair, resources, configs, prompts, max_tokens, progress) if memory else {}
        extra = [*extra, *(missing_fastest_vanilla(pair, resources, configs, prompts, max_tokens) if cost_ratios else [])]
        groups = load_peers(pair, peers, gamma=gamma_of(configs))
        measured = measure(pair, resources, configs, prompts, max_tokens=max_tokens, temperature=temperature, runs=runs,
                           warmup=warmup, seed=seed, progress=progress,
                           extra=[*extra, *(contender for group in groups.values() for contender in group.contenders)])
        judge = BenchMetrics(pair, prompts, measured, temperature=temperature)
        entries = {label: judge.figures(label) | {"peak_memory_mb": peaks.get(label)} for label in measured}
        machine = describe_machine(pair)
        checked = check_against(check, measured, prompts, max_tokens=max_tokens) if check else None
    foreign = {contender.label for group in groups.values() for contender in group.contenders}
    settings = {"max_tokens": max_tokens, "temperature": temperature, "runs": runs, "warmup": warmup, "seed": seed}
    own = {label: entry for label, entry in entries.items() if label not in foreign and label != FASTEST}
    if log:
        log_figures(own, log)
    return {
        "pair": pair.name,
        "fingerprint": pair.fingerprint,
        "padded_to": pair.padded_to,
        "machine": machine,
        "settings": settings,
        "prompts": len(prompts),
        "prompt_ids": [p.id for p in prompts],
        "prompts_digest": prompts_digest(prompts),
        "several_turns": several_turns(prompts),
        "references": sum(bool(p.reference) for p in prompts),
        "longest_prompt": max(len(ids) for ids in judge.encoded),
        "strategies": own,
        "cost_reference": judge.cost_reference(),
        "peers": {
            name: {c.label.partition("/")[2]: entries[c.label] for c in group.contenders} | {"notes": group.notes}
            for name, group in groups.items()
        },
        "headlines": headlines(judge, entries, gamma_of(configs)),
        "worst": largest_overheads(own),
        "curves": curves(own),
        "cpu_check": checked,
    }


def warm_up(pair: LoadedPair, prompts: Sequence[Prompt], max_tokens: int) -> None:
    """Let models on an accelerator capture every shape that the prompts need, so that no capture falls into a measured run."""
    if not pair.device.startswith("cuda"):
        return
    reach = max(len(ids_of(pair, prompt)) for prompt in prompts) + max_tokens
    for model in pair.models.values():
        if hasattr(model, "warm_up"):
            model.warm_up(reach=min(reach, model.max_context))


def config_quality(
    pair: LoadedPair, resources: StrategyResources, config: Config, prompts: Sequence[Prompt], *, max_tokens: int = 64
) -> float:
    """Share of a config's emitted tokens, decoded greedily, that are the target's argmax behind the same prefix."""
    measured = next(iter(measure(pair, resources, [config], prompts, max_tokens=max_tokens, warmup=False).values()))
    encoded = [ids_of(pair, prompt) for prompt in prompts]
    matches = sum(argmax_matches(pair, ids, run.tokens) for ids, run in zip(encoded, measured.typical, strict=True))
    return matches / sum(measured.tokens)


def missing_fastest_vanilla(pair: LoadedPair, resources: StrategyResources, configs: Sequence[Config], prompts: Sequence[Prompt],
                            max_tokens: int) -> list[StrategyContender]:
    """Vanilla SD at its fastest gamma, the measure of every cost ratio, where the run does not hold it already.

    The gamma is found by a short run over a few; a run that names several vanilla_sd configs has made its own choice.
    """
    named = [dict(config.parameters) for config in configs if config.name == "vanilla_sd"]
    if "draft" not in pair.models or len(named) > 1:
        return []
    tried = [StrategyChoice("vanilla_sd", {"num_speculative_tokens": gamma}) for gamma in PILOT_GAMMAS]
    pilot = measure(pair, resources, tried, prompts[:PILOT_PROMPTS], max_tokens=min(max_tokens, PILOT_TOKENS))
    best = fastest(list(pilot.values()))
    assert best is not None
    assert isinstance(best.contender, StrategyContender)
    known = {gamma_of_parameters(parameters) for parameters in named}
    if best.contender.parameters["num_speculative_tokens"] in known:
        return []
    return [StrategyContender(pair, resources, StrategyChoice("vanilla_sd", best.contender.parameters), FASTEST)]


def memory_peaks(pair: LoadedPair, resources: StrategyResources, configs: Sequence[Config], prompts: Sequence[Prompt], max_tokens: int,
                 progress: Progress | None) -> dict[str, float | None]:
    """Peak megabytes of every config over the models, on the longest prompt (see `memory`)."""
    if progress:
        progress(0, len(configs), "memory")
    if not prompts:
        return {}
    longest = max(prompts, key=lambda prompt: len(ids_of(pair, prompt)))
    with naming(longest):
        return peaks_over_models(pair, contenders_of(pair, resources, configs), ids_of(pair, longest),
                                 pair.sampling(max_tokens=max_tokens))


def gamma_of(configs: Sequence[Config]) -> int:
    """Draft length of the first vanilla_sd in the run, else its default: peers draft as many tokens."""
    return gamma_of_parameters(dict(next((config.parameters for config in configs if config.name == "vanilla_sd"), {})))


def log_figures(entries: dict[str, dict[str, Any]], log: Log) -> None:
    """Report the main figures of every strategy."""
    for label, entry in entries.items():
        for name in ("tokens_per_second", "speedup", "acceptance_rate", "mat", "cost_ratio"):
            if entry.get(name) is not None:
                log(f"{label}.{name}", entry[name], 0)
