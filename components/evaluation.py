"""The bench: strategies, and peers where asked for, on the same prompts in one run (measures as METHODS defines them)."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from components.measuring import Config, Log, Measurement, Progress, StrategyContender, measure
from components.peers import load_peers
from components.prompts import Prompt
from components.provenance import library_versions
from components.quality import Difference, argmax_matches, difference
from components.statistics import paired_bootstrap_ratio
from components.threads import using_threads
from serving.runtime.device import device_class, usable_cores
from serving.runtime.pair import LoadedPair
from serving.runtime.strategies import Kit

REFERENCE = "autoregressive"
FASTEST = "vanilla_sd at its fastest gamma"
PILOT_GAMMAS, PILOT_PROMPTS, PILOT_TOKENS = (1, 2, 3, 5), 3, 24


def bench(pair: LoadedPair, strategies: Sequence[Config], prompts: Sequence[Prompt], kit: Kit, *, max_tokens: int = 128,
          temperature: float = 0.0, runs: int = 1, warmup: bool = True, seed: int = 0, peers: Sequence[str] = (),
          threads: int | None = None, extra: Sequence[StrategyContender] = (), cost_ratios: bool = True, log: Log | None = None,
          progress: Progress | None = None) -> dict[str, Any]:
    """Measure strategies against autoregressive decoding.

    Args:
        strategies: (name, parameters); `autoregressive` is measured too where it is not among them.
        peers: names of `peers.PEERS`, such as "transformers".
        threads: threads of torch during the run, None leaves them as they are.
        extra: further contenders under labels of their own, such as a champion with its own artifacts.
        cost_ratios: also measure vanilla SD at its fastest gamma where the run lacks it; False leaves cost ratios to what there is.
        log: called with (name, value, 0) for the main figures of every strategy.
    Returns:
        plain JSON: `pair`, `fingerprint`, `machine`, `settings`, `prompts` (how many), `prompt_ids`, `prompts_digest`,
        `strategies: {label: figures}`, `cost_reference` (vanilla SD at its fastest gamma, which cost ratios are against) and
        `peers: {name: {label: figures}}`. A label is the strategy's name, with its parameters where
        it was measured with several. Beside the figures each entry has `per_prompt` rows and, for lossy
        strategies, quality: `target_argmax_share`, and `quality_ratio` over autoregressive's. A figure that cannot be
        had is None.
    """
    configs = list(strategies)
    if REFERENCE not in [name for name, _ in configs]:
        configs.insert(0, (REFERENCE, {}))
    with using_threads(threads):
        extra = [*extra, *(missing_fastest_vanilla(pair, kit, configs, prompts, max_tokens) if cost_ratios else [])]
        groups = load_peers(pair, peers, gamma=gamma_of(configs))
        measured = measure(pair, kit, configs, prompts, max_tokens=max_tokens, temperature=temperature, runs=runs,
                           warmup=warmup, seed=seed, progress=progress,
                           extra=[*extra, *(contender for group in groups.values() for contender in group.contenders)])
        judge = Judge(pair, prompts, measured, greedy=temperature == 0)
        entries = {label: judge.figures(label) for label in measured}
        machine = describe_machine(pair)
    foreign = {contender.label for group in groups.values() for contender in group.contenders}
    settings = {"max_tokens": max_tokens, "temperature": temperature, "runs": runs, "warmup": warmup, "seed": seed}
    own = {label: entry for label, entry in entries.items() if label not in foreign and label != FASTEST}
    if log:
        log_figures(own, log)
    return {
        "pair": pair.name, "fingerprint": pair.fingerprint, "machine": machine, "settings": settings,
        "prompts": len(prompts), "prompt_ids": [p.id for p in prompts], "prompts_digest": prompts_digest(prompts),
        "strategies": own, "cost_reference": judge.cost_reference(),
        "peers": {name: {c.label.partition("/")[2]: entries[c.label] for c in group.contenders} | {"notes": group.notes}
                  for name, group in groups.items()}}


def config_quality(pair: LoadedPair, kit: Kit, config: Config, prompts: Sequence[Prompt], *, max_tokens: int = 64) -> float:
    """Share of a config's emitted tokens, decoded greedily, that are the target's argmax behind the same prefix."""
    measured = next(iter(measure(pair, kit, [config], prompts, max_tokens=max_tokens, warmup=False).values()))
    encoded = [pair.encode_prompt(prompt.prompt) for prompt in prompts]
    matches = sum(argmax_matches(pair, ids, run.tokens) for ids, run in zip(encoded, measured.typical, strict=True))
    return matches / sum(measured.tokens)


class Judge:
    """Figures of measurements that were taken together, each against the autoregressive one.

    Args:
        greedy: outputs can be compared token by token.
    """

    def __init__(self, pair: LoadedPair, prompts: Sequence[Prompt], measured: dict[str, Measurement], *, greedy: bool):
        self.pair, self.measured, self.greedy = pair, measured, greedy
        self.encoded = [pair.encode_prompt(prompt.prompt) for prompt in prompts]
        self.reference = measured[REFERENCE]
        self.vanilla = fastest([m for m in measured.values() if strategy_of(m) == "vanilla_sd"])
        lossy = any(isinstance(m.contender, StrategyContender) and not m.contender.lossless for m in measured.values())
        self.reference_share = self.argmax_share(self.reference) if lossy else None
        self.reference_p95 = latencies(self.reference)["tpot_p95_ms"]

    def figures(self, label: str) -> dict[str, Any]:
        """All figures of one contender, as plain JSON."""
        m = self.measured[label]
        ours = m.contender if isinstance(m.contender, StrategyContender) else None
        differences = self.differences(m) if self.greedy else []
        entry = {"strategy": ours.strategy if ours else None, "parameters": ours.parameters if ours else {},
                 "lossless": ours.lossless if ours else True, "greedy": self.greedy, "dtype": self.pair.dtype, **self.speed(m),
                 **(self.counts(m) if ours else {}), **latencies(m)}
        wrong = {d.prompt_id for d in differences}
        entry["identical_outputs"] = len(m.prompt_ids) - len(wrong) if self.greedy else None
        entry["near_ties"] = sum(d.near_tie for d in differences) if self.greedy else None
        entry["differences"] = [vars(d) for d in differences]
        entry["tpot_p95_ratio"] = share(entry["tpot_p95_ms"] or 0.0, self.reference_p95 or 0.0)
        kept = self.argmax_share(m) if ours is not None and not ours.lossless else None
        entry["target_argmax_share"], entry["quality_ratio"] = kept, share(kept or 0.0, self.reference_share or 0.0)
        entry["per_prompt"] = [
            {"prompt_id": name, "seconds": run.seconds, "tokens": len(run.tokens), "target_calls": run.stats.target_calls,
             "accepted": run.stats.accepted, "judged": run.stats.judged, "ttft_ms": run.stats.first_token_seconds * 1e3,
             "identical": name not in wrong if self.greedy else None}
            for name, run in zip(m.prompt_ids, m.typical, strict=True)]
        return entry

    def cost_reference(self) -> dict[str, Any] | None:
        """The vanilla SD that cost ratios are against: its figures, and whether it was measured for this only."""
        if self.vanilla is None:
            return None
        figures = self.figures(self.vanilla.contender.label)
        return {"num_speculative_tokens": gamma_of([("vanilla_sd", figures["parameters"])]), **figures}

    def speed(self, m: Measurement) -> dict[str, float | None]:
        """Tokens per second, and the speedup over autoregressive with its interval (5 % at each end)."""
        ratio, low, high = paired_bootstrap_ratio(self.reference.seconds, self.reference.tokens, m.seconds, m.tokens)
        return {"tokens_per_second": sum(m.tokens) / sum(m.seconds), "speedup": ratio, "speedup_low": low,
                "speedup_high": high}

    def counts(self, m: Measurement) -> dict[str, Any]:
        """What a strategy of ours counted; shares of nothing are None."""
        s = m.stats
        base = self.vanilla.stats.calls_per_token if self.vanilla else 0.0
        return {
            "emitted": s.emitted, "target_calls": s.target_calls, "draft_calls": s.draft_calls, "rounds": s.rounds,
            "cost_ratio": s.calls_per_token / base if base else None,
            "acceptance_rate": s.acceptance_rate, "draft_efficiency": s.draft_efficiency,
            "mat": s.mat if s.drafted else None, "accepted_per_call": share(s.accepted, s.target_calls) if s.drafted else None,
            "mean_acceptance_length": s.mean_acceptance_length if s.rounds else None,
            "acceptance_by_position": [share(s.accepted_at[i], s.judged_at[i]) for i in sorted(s.judged_at)],
            "rescued_share": share(s.rescued, s.emitted),
            "overhead_fraction": share(s.overhead_seconds, s.wall_seconds),
            "time_share": {"draft": share(s.draft_seconds, s.wall_seconds), "target": share(s.target_seconds, s.wall_seconds),
                           "prefill": share(s.prefill_seconds, s.wall_seconds),
                           "rest": share(s.overhead_seconds, s.wall_seconds)}}

    def differences(self, m: Measurement) -> list[Difference]:
        """For each prompt the first difference from the autoregressive tokens, in the first run that has one."""
        found = []
        for i, runs in enumerate(m.runs):
            reference = self.reference.runs[i][0].tokens
            run = next((run for run in runs if run.tokens != reference), None)
            if run:
                found.append(difference(self.pair, m.prompt_ids[i], self.encoded[i], run.tokens, reference))
        return [d for d in found if d is not None]

    def argmax_share(self, m: Measurement) -> float | None:
        """Share of emitted tokens that are the target's argmax behind the same prefix."""
        matches = [argmax_matches(self.pair, ids, run.tokens) for ids, run in zip(self.encoded, m.typical, strict=True)]
        return share(sum(matches), sum(m.tokens))


def latencies(m: Measurement) -> dict[str, float | None]:
    """Medians over prompts of the time to the first token and per token behind it, in milliseconds."""
    runs = m.typical
    per_token = sorted((run.seconds - run.stats.first_token_seconds) / (len(run.tokens) - 1) * 1e3
                       for run in runs if len(run.tokens) > 1)
    return {"ttft_ms": median(run.stats.first_token_seconds for run in runs) * 1e3,
            "tpot_ms": median(per_token) if per_token else None,
            "tpot_p95_ms": per_token[min(len(per_token) - 1, int(0.95 * len(per_token)))] if per_token else None}


def strategy_of(m: Measurement) -> str | None:
    return m.contender.strategy if isinstance(m.contender, StrategyContender) else None


def fastest(measured: Sequence[Measurement]) -> Measurement | None:
    """The one with the least seconds per token; None of none."""
    return min(measured, key=lambda m: sum(m.seconds) / sum(m.tokens), default=None)


def missing_fastest_vanilla(pair: LoadedPair, kit: Kit, configs: Sequence[Config], prompts: Sequence[Prompt],
                            max_tokens: int) -> list[StrategyContender]:
    """Vanilla SD at its fastest gamma, the measure of every cost ratio, where the run does not hold it already.

    The gamma is found by a short run over a few; a run that names several vanilla_sd configs has made its own choice.
    """
    named = [dict(parameters) for name, parameters in configs if name == "vanilla_sd"]
    if "draft" not in pair.models or len(named) > 1:
        return []
    tried: list[Config] = [("vanilla_sd", {"num_speculative_tokens": gamma}) for gamma in PILOT_GAMMAS]
    pilot = measure(pair, kit, tried, prompts[:PILOT_PROMPTS], max_tokens=min(max_tokens, PILOT_TOKENS))
    best = fastest(list(pilot.values()))
    assert best is not None
    assert isinstance(best.contender, StrategyContender)
    known = {gamma_of([("vanilla_sd", parameters)]) for parameters in named}
    if best.contender.parameters["num_speculative_tokens"] in known:
        return []
    return [StrategyContender(pair, kit, ("vanilla_sd", best.contender.parameters), FASTEST)]


def gamma_of(configs: Sequence[Config]) -> int:
    """Draft length of the first vanilla_sd in the run, else its default: peers draft as many tokens."""
    from serving.runtime.strategies.vanilla_sd import VanillaSD

    parameters = next((parameters for name, parameters in configs if name == VanillaSD.name), {})
    return int(VanillaSD.Config.model_validate(parameters).num_speculative_tokens)


def share(part: float, whole: float) -> float | None:
    """part / whole; None where there is no whole."""
    return part / whole if whole else None


def prompts_digest(prompts: Sequence[Prompt]) -> str:
    """sha256 over ids and first turns, in order."""
    return hashlib.sha256(json.dumps([[p.id, p.prompt] for p in prompts]).encode()).hexdigest()


def describe_machine(pair: LoadedPair) -> dict[str, Any]:
    """What figures depend on: class, CPU model, cores, threads, dtype, versions; no host name."""
    import torch

    return {"device_class": device_class(pair.device), "cpu": cpu_model(), "cores": usable_cores(),
            "threads": torch.get_num_threads(), "dtype": pair.dtype, "device": pair.device, "libraries": library_versions()}


def cpu_model() -> str:
    """Name of the CPU as the system gives it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor())


def log_figures(entries: dict[str, dict[str, Any]], log: Log) -> None:
    """Report the main figures of every strategy."""
    for label, entry in entries.items():
        for name in ("tokens_per_second", "speedup", "acceptance_rate", "mat", "cost_ratio"):
            if entry.get(name) is not None:
                log(f"{label}.{name}", entry[name], 0)
