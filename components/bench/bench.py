"""The bench: strategies, and peers where asked for, on the same prompts in one run (metrics are
defined in docs/methods.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from draftwell.components.bench.device_parity import check_against
from draftwell.components.bench.interleaved import REFERENCE, Progress, leaving_out
from draftwell.components.bench.metrics import (
    BenchMetrics,
    gamma_of_parameters,
    is_baseline,
)
from draftwell.components.bench.peak_memory import peaks_over_models
from draftwell.components.bench.peers.group import PeerGroup
from draftwell.components.bench.peers.loading import open_peers
from draftwell.components.bench.ratios import headlines
from draftwell.components.bench.runner import (
    Config,
    Measurement,
    StrategyContender,
    contenders_of,
    labels_of,
    measure,
    naming,
)
from draftwell.components.bench.schema import (
    SCHEMA,
    BenchEntry,
    BenchReport,
    Machine,
    ReportSettings,
)
from draftwell.components.bench.settings import DEFAULTS, BenchSettings, QualityFloor, RunSettings
from draftwell.components.bench.until import Until
from draftwell.components.prompts.prompt import Prompt, ids_of, prompts_digest, several_turns
from draftwell.components.report.machine import Others, describe_machine, using_threads
from draftwell.serving.runtime.pair import LoadedPair
from draftwell.serving.runtime.strategies import PLAIN, StrategyChoice, StrategyResources

PILOT_GAMMAS, PILOT_PROMPTS, PILOT_TOKENS = (1, 2, 3, 5), 3, 24


def run_bench(  # noqa: PLR0913
    pair: LoadedPair,
    strategies: Sequence[Config],
    prompts: Sequence[Prompt],
    resources: StrategyResources,
    settings: BenchSettings = DEFAULTS,
    *,
    extra: Sequence[StrategyContender] = (),
    check: LoadedPair | None = None,
    until: Until | None = None,
    cost_ratios: bool = True,
    memory: bool = False,
    floor: QualityFloor | None = None,
    left_out: dict[str, str] | None = None,
    progress: Progress | None = None,
) -> BenchReport:
    """Measure strategies against autoregressive decoding, whose failure ends the run.

    Args:
        strategies: (name, parameters); `autoregressive` is measured too where it is not among them.
            A name with the suffix `@1+1` runs on equal cores, each model on its own share.
        extra: further contenders under labels of their own.
        check: the same pair on the CPU, whose greedy outputs those of lossless strategies are
            compared with.
        until: measure on a few prompts, and on others as far as this asks; None: on all.
        cost_ratios: measure vanilla SD at its fastest gamma, too, which they refer to.
        memory: first decode the longest prompt with each strategy, to see its peak memory.
        floor: what a lossy strategy must keep; None judges none.
        left_out: gets contenders that fail, with the reason; None: the first failure ends the run.
    Returns:
        the report. Labels are names of strategies, with parameters where one was measured with
        several; each entry also has digests of what it was made from (`origins`) and, for lossy
        strategies, quality.
    """
    configs = with_plain(strategies)
    peaks: dict[str, float | None] = {}
    further, everything = [*extra], prompts
    prompts = prompts if until is None else prompts[: until.fewest]
    with using_threads(settings.threads):
        warm_up(pair)
        if memory:
            peaks = memory_peaks(pair, resources, configs, prompts, settings, left_out, progress)
        if cost_ratios:
            with leaving_out("vanilla_sd at its fastest gamma", left_out):
                further += missing_fastest_vanilla(pair, resources, configs, prompts, settings)
        others = Others()
        groups, measured = measure_with_peers(
            pair, resources, configs, prompts, settings, further, left_out, progress
        )
        if until is not None:
            more: Any = {"extra": further, "left_out": left_out, "progress": progress}
            again = partial(measure, pair, resources, configs, **more)
            measured = until.narrowed(measured, labels_of(configs), everything, again, settings)
            prompts = everything[: len(measured[REFERENCE].prompt_ids)]
        metrics = BenchMetrics(pair, prompts, measured, settings, floor)
        checked = check and check_against(check, measured, prompts, max_tokens=settings.max_tokens)
        return report_of(metrics, groups, peaks, gamma_of(configs), others).model_copy(
            update={"cpu_check": checked, "left_out": left_out or {}}
        )


def with_plain(strategies: Sequence[Config]) -> list[Config]:
    """The strategies, with plain decoding first where it is not among them."""
    named = any(config.name == REFERENCE for config in strategies)
    return [*strategies] if named else [PLAIN, *strategies]


def measure_with_peers(
    pair: LoadedPair,
    resources: StrategyResources,
    configs: Sequence[Config],
    prompts: Sequence[Prompt],
    settings: BenchSettings,
    extra: Sequence[StrategyContender],
    left_out: dict[str, str] | None,
    progress: Progress | None,
) -> tuple[dict[str, PeerGroup], dict[str, Measurement]]:
    """The peers that started, and what was measured of all."""
    with open_peers(
        pair,
        settings.peers,
        gamma=gamma_of(configs),
        context=longest_request(pair, prompts, settings.max_tokens),
        head=resources.artifacts.get("eagle3_head"),
        left_out=left_out,
    ) as groups:
        peers = [peer for group in groups.values() for peer in group.contenders]
        return groups, measure(
            pair,
            resources,
            configs,
            prompts,
            settings,
            extra=[*extra, *peers],
            left_out=left_out,
            progress=progress,
        )


def report_of(
    metrics: BenchMetrics,
    groups: Mapping[str, PeerGroup],
    peaks: Mapping[str, float | None],
    gamma: int,
    others: Others,
) -> BenchReport:
    """The report of what was measured."""
    used = None if groups else others.cores()  # peers are other processes
    own: dict[str, BenchEntry] = {}
    peers: dict[str, dict[str, BenchEntry]] = {name: {} for name in groups}
    for label, m in metrics.measured.items():
        peer, _, variant = label.partition("/")
        group, name = (own, label) if m.ours else (peers[peer], variant)
        group[name] = metrics.entry(label, peaks.get(label))
    return BenchReport(
        **subject(metrics.pair, metrics.prompts),
        schema_version=SCHEMA,
        machine=Machine(**describe_machine(metrics.pair), others=used),
        settings=ReportSettings(
            **metrics.settings.model_dump(include=set(RunSettings.model_fields))
        ),
        longest_prompt=max(len(ids) for ids in metrics.encoded),
        strategies=own,
        cost_reference=metrics.vanilla.label if metrics.vanilla else None,
        peers=peers,
        peer_versions={name: group.version for name, group in groups.items() if group.version},
        peer_notes=tuple(note for group in groups.values() for note in group.notes),
        headlines=tuple(headlines(metrics, own, gamma)),
    )


def subject(pair: LoadedPair, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """The fields of a report that name the pair and the prompts."""
    return {
        "pair": pair.name,
        "fingerprint": pair.fingerprint,
        "padded_to": pair.padded_to,
        "prompts": len(prompts),
        "prompt_ids": [prompt.id for prompt in prompts],
        "prompts_digest": prompts_digest(prompts),
        "several_turns": several_turns(prompts),
        "references": sum(bool(prompt.reference) for prompt in prompts),
    }


def longest_request(pair: LoadedPair, prompts: Sequence[Prompt], max_tokens: int) -> int:
    """Tokens of the longest prompt with its answer."""
    return max((len(ids_of(pair, prompt)) for prompt in prompts), default=0) + max_tokens


def warm_up(pair: LoadedPair) -> None:
    """Let models on an accelerator capture their graphs, so that no capture falls into a measured
    run."""
    if not pair.device.startswith("cuda"):
        return
    for model in pair.models.values():
        if hasattr(model, "warm_up"):
            model.warm_up()


def missing_fastest_vanilla(
    pair: LoadedPair,
    resources: StrategyResources,
    configs: Sequence[Config],
    prompts: Sequence[Prompt],
    settings: BenchSettings,
) -> list[StrategyContender]:
    """Vanilla SD at its fastest gamma, which every cost ratio refers to, where the run does not
    measure it already.

    The gamma is found by a short run over a few; a run that names several vanilla_sd configs has
    made its own choice.
    """
    named = vanilla_parameters(configs)
    if "draft" not in pair.models or len(named) > 1:
        return []
    tried = [
        StrategyChoice("vanilla_sd", {"num_speculative_tokens": gamma}) for gamma in PILOT_GAMMAS
    ]
    short = BenchSettings(max_tokens=min(settings.max_tokens, PILOT_TOKENS))
    pilot = measure(pair, resources, tried, prompts[:PILOT_PROMPTS], short)
    best = min(zip(tried, pilot.values(), strict=True), key=lambda row: row[1].pace)[0]
    if gamma_of_parameters(best.parameters) in map(gamma_of_parameters, named):
        return []
    return [StrategyContender(pair, resources, best, str(best))]


def memory_peaks(
    pair: LoadedPair,
    resources: StrategyResources,
    configs: Sequence[Config],
    prompts: Sequence[Prompt],
    settings: BenchSettings,
    left_out: dict[str, str] | None,
    progress: Progress | None,
) -> dict[str, float | None]:
    """Peak megabytes of every config in addition to the models, on the longest prompt (see
    `peak_memory`)."""
    if progress:
        progress(0, len(configs), "memory")
    if not prompts:
        return {}
    longest = max(prompts, key=lambda prompt: len(ids_of(pair, prompt)))
    with naming(longest):
        return peaks_over_models(
            pair,
            contenders_of(pair, resources, configs),
            ids_of(pair, longest),
            pair.sampling(max_tokens=settings.max_tokens),
            left_out,
        )


def gamma_of(configs: Sequence[Config]) -> int:
    """Draft length of the first vanilla_sd in the run, else its default; peers draft as many
    tokens."""
    return gamma_of_parameters(next(iter(vanilla_parameters(configs)), {}))


def vanilla_parameters(configs: Sequence[Config]) -> list[Mapping[str, Any]]:
    """Parameters of every vanilla SD of the run."""
    return [one.parameters for one in configs if is_baseline(one.name, one.parameters)]
