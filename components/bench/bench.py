"""The bench: strategies, and peers where asked for, on the same prompts in one run (metrics are
defined in docs/methods.md)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from draftwell.components.bench.device_parity import check_against
from draftwell.components.bench.metrics import (
    REFERENCE,
    BenchMetrics,
    fastest,
    gamma_of_parameters,
    is_baseline,
)
from draftwell.components.bench.peak_memory import peaks_over_models
from draftwell.components.bench.peers.loading import open_peers
from draftwell.components.bench.ratios import curves, headlines, largest_overheads
from draftwell.components.bench.runner import (
    Config,
    Progress,
    StrategyContender,
    contenders_of,
    measure,
    naming,
)
from draftwell.components.bench.schema import (
    SCHEMA,
    BenchReport,
    Machine,
    PeerReport,
    ReportSettings,
)
from draftwell.components.bench.settings import DEFAULTS, BenchSettings
from draftwell.components.prompts.prompt import Prompt, ids_of, prompts_digest, several_turns
from draftwell.components.report.machine import describe_machine, using_threads
from draftwell.serving.runtime.pair import LoadedPair
from draftwell.serving.runtime.strategies import PLAIN, StrategyChoice, StrategyResources

FASTEST = "vanilla_sd at its fastest gamma"
PILOT_GAMMAS, PILOT_PROMPTS, PILOT_TOKENS = (1, 2, 3, 5), 3, 24


def run_bench(
    pair: LoadedPair,
    strategies: Sequence[Config],
    prompts: Sequence[Prompt],
    resources: StrategyResources,
    settings: BenchSettings = DEFAULTS,
    *,
    extra: Sequence[StrategyContender] = (),
    check: LoadedPair | None = None,
    progress: Progress | None = None,
) -> BenchReport:
    """Measure strategies against autoregressive decoding.

    Args:
        strategies: (name, parameters); `autoregressive` is measured too where it is not among them.
            A name with the suffix `@1+1` runs on equal cores, each model on its own share.
        extra: further contenders under labels of their own, such as a champion with its own
            artifacts.
        check: the same pair on the CPU, whose greedy outputs those of lossless strategies are
            compared with.
    Returns:
        the report. Labels are names of strategies, with parameters where one was measured with
        several; each entry also has digests of what it was made from (`origins`) and, for lossy
        strategies, quality.
    """
    configs = list(strategies)
    if REFERENCE not in [config.name for config in configs]:
        configs.insert(0, PLAIN)
    with using_threads(settings.threads):
        warm_up(pair, prompts, settings.max_tokens)
        peaks = (
            memory_peaks(pair, resources, configs, prompts, settings, progress)
            if settings.memory
            else {}
        )
        extra = [
            *extra,
            *(
                missing_fastest_vanilla(pair, resources, configs, prompts, settings)
                if settings.cost_ratios
                else []
            ),
        ]
        longest = longest_request(pair, prompts, settings.max_tokens)
        with open_peers(
            pair,
            settings.peers,
            gamma=gamma_of(configs),
            context=longest,
            temperature=settings.temperature,
            head=resources.artifacts.get("eagle3_head"),
        ) as groups:
            peers = [contender for group in groups.values() for contender in group.contenders]
            measured = measure(
                pair,
                resources,
                configs,
                prompts,
                settings,
                progress=progress,
                extra=[*extra, *peers],
            )
        metrics = BenchMetrics(
            pair, prompts, measured, temperature=settings.temperature, floor=settings.quality_floor
        )
        entries = {label: metrics.entry(label, peaks.get(label)) for label in measured}
        machine = describe_machine(pair)
        checked = (
            check_against(check, measured, prompts, max_tokens=settings.max_tokens)
            if check
            else None
        )
    own = {
        label: entry
        for label, entry in entries.items()
        if label != FASTEST and label not in {peer.label for peer in peers}
    }
    return BenchReport(
        **subject(pair, prompts),
        schema_version=SCHEMA,
        machine=Machine(**machine),
        settings=ReportSettings(
            **settings.model_dump(include={"max_tokens", "temperature", "runs", "warmup", "seed"})
        ),
        longest_prompt=max(len(ids) for ids in metrics.encoded),
        strategies=own,
        cost_reference=metrics.cost_reference(),
        peers={
            name: PeerReport(
                entries={c.label.partition("/")[2]: entries[c.label] for c in group.contenders},
                notes=tuple(group.notes),
                version=group.version,
            )
            for name, group in groups.items()
        },
        headlines=tuple(headlines(metrics, entries, gamma_of(configs))),
        worst=largest_overheads(own),
        curves=curves(own),
        cpu_check=checked,
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


def warm_up(pair: LoadedPair, prompts: Sequence[Prompt], max_tokens: int) -> None:
    """Let models on an accelerator capture every shape that the prompts need, so that no capture
    falls into a measured run."""
    if not pair.device.startswith("cuda"):
        return
    reach = longest_request(pair, prompts, max_tokens)
    for model in pair.models.values():
        if hasattr(model, "warm_up"):
            model.warm_up(reach=min(reach, model.max_context))


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
    named = [
        dict(config.parameters) for config in configs if is_baseline(config.name, config.parameters)
    ]
    if "draft" not in pair.models or len(named) > 1:
        return []
    tried = [
        StrategyChoice("vanilla_sd", {"num_speculative_tokens": gamma}) for gamma in PILOT_GAMMAS
    ]
    pilot = measure(
        pair,
        resources,
        tried,
        prompts[:PILOT_PROMPTS],
        BenchSettings(max_tokens=min(settings.max_tokens, PILOT_TOKENS)),
    )
    best = fastest(list(pilot.values()))
    assert best is not None
    assert isinstance(best.contender, StrategyContender)
    known = {gamma_of_parameters(parameters) for parameters in named}
    if best.contender.parameters["num_speculative_tokens"] in known:
        return []
    return [
        StrategyContender(
            pair, resources, StrategyChoice("vanilla_sd", best.contender.parameters), FASTEST
        )
    ]


def memory_peaks(
    pair: LoadedPair,
    resources: StrategyResources,
    configs: Sequence[Config],
    prompts: Sequence[Prompt],
    settings: BenchSettings,
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
        )


def gamma_of(configs: Sequence[Config]) -> int:
    """Draft length of the first vanilla_sd in the run, else its default; peers draft as many
    tokens."""
    return gamma_of_parameters(
        dict(
            next(
                (
                    config.parameters
                    for config in configs
                    if is_baseline(config.name, config.parameters)
                ),
                {},
            )
        )
    )
