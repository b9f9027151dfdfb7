"""What `draftwell.bench` and `draftwell.tune` are: the commands of these names, for programs."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from draftwell.components.bench.bench import run_bench
from draftwell.components.bench.schema import BenchReport
from draftwell.components.bench.settings import BenchSettings
from draftwell.components.card.card import Card
from draftwell.components.prompts.prompt import Prompt
from draftwell.components.prompts.sources import load_prompts
from draftwell.flows.settings import quality_floor
from draftwell.flows.steps.profile import find_or_measure_profile
from draftwell.flows.workspace import Workspace
from draftwell.serving.artifacts.hardware_profile import HardwareProfile
from draftwell.serving.bundle.manifest import MANIFEST, read_bundle_manifest
from draftwell.serving.device import checked_device, default_device
from draftwell.serving.errors import missing_package
from draftwell.serving.runtime.pair import LoadedPair
from draftwell.serving.runtime.strategies import (
    StrategyChoice,
    StrategyResources,
    build_strategy,
)
from draftwell.serving.server.model.loading import from_bundle, profile_fits
from draftwell.serving.server.settings import ServerSettings

log = logging.getLogger(__name__)
Strategies = Sequence[str | tuple[str, Mapping[str, Any]]]
"""Names of strategies; one with parameters is a pair of its name and these."""


def bench(  # noqa: PLR0913
    subject: str | Path,
    prompts: str | Path | Sequence[str],
    *,
    strategies: Strategies | None = None,
    limit: int | None = None,
    max_tokens: int = 64,
    temperature: float = 0.0,
    runs: int = 1,
    seed: int = 0,
    threads: int | None = None,
    device: str | None = None,
) -> BenchReport:
    """Compare strategies on the same prompts, interleaved, with plain decoding beside them. One
    parameter for each thing that decides what is measured.

    Args:
        subject: a bundle's folder, or a pair: its name, alias or YAML file.
        prompts: texts, or a file or folder of prompts as `draftwell step collect` takes.
        strategies: what to measure; None: the bundle's tuned strategy, and vanilla_sd of a pair.
        limit: takes the first prompts only.
        max_tokens: to generate for each prompt, at most.
        temperature: 0 is greedy.
        runs: interleaved passes over the prompts; of each prompt the median run counts.
        seed: of the first prompt; each further one has the next.
        threads: compute threads; None leaves them as they are.
        device: cpu or cuda, of a pair; None: that of this machine. A bundle has its own.
    Returns:
        The report. `strategies` has an entry by name, with `speedup` and its interval; what failed
        is in `left_out`.
    Raises:
        DraftwellError: the subject, a prompt or a strategy cannot be used.
    """
    settings = BenchSettings(
        max_tokens=max_tokens,
        temperature=temperature,
        runs=runs,
        seed=seed,
        threads=threads,
    )
    rows = prompt_rows(prompts, limit)
    folder = Path(subject).expanduser()
    if (folder / MANIFEST).is_file():
        pair, resources, wanted = open_bundle_to_bench(folder, strategies)
    else:
        pair, resources, wanted = open_pair_to_bench(str(subject), strategies, device)
    return run_bench(pair, wanted, rows, resources, settings, floor=quality_floor(), left_out={})


def tune(  # noqa: PLR0913
    target: str | Path | None = None,
    draft: str | Path | None = None,
    *,
    pair: str | Path | None = None,
    prompts: str | Path | None = None,
    minutes: float | None = None,
    distil: float | None = None,
    engine: str = "draftwell",
    launcher: str | None = None,
    device: str | None = None,
    fresh: bool = False,
    **settings: Any,
) -> Card:
    """Find what makes a model faster on your prompts, prove it, and build the bundle that serves
    it: `draftwell tune` for programs. A run that was stopped continues when it is called again.

    One parameter for each of the command's options.

    Args:
        target: folder or hub id of the model to make faster.
        draft: folder or hub id of a small model of the same vocabulary; None: only what needs none
            is tried.
        pair: a pair in the place of both: its name, alias or YAML file. None of all three takes
            the shipped pair, but for a launcher or an engine of another machine.
        prompts: file or folder of prompts; None takes the shipped ones.
        minutes: for everything but distilling; None: 10, with vLLM 45.
        distil: minutes to train a draft first, for a target without one.
        engine: draftwell, vllm, or the address of an engine.
        launcher: of an engine at an address: the command that starts it, or its file.
        device: cpu or cuda; None: that of this machine.
        fresh: begin again.
        settings: any other setting of the loop, such as `bench_prompts=32`.
    Returns:
        The card. `bundle` is what `load` takes; `verdict` says whether the gate passed it.
    Raises:
        DraftwellError: what has to be fixed, before any work where it can be known then; the
            packages of the extra `pipeline` are missing (`missing_package`).
    """
    if find_spec("prefect") is None or find_spec("mlflow") is None:
        raise missing_package("draftwell.tune needs", "prefect", "pipeline")
    return tune_as_asked(
        target=named(target),
        draft=named(draft),
        pair=named(pair),
        prompts=None if prompts is None else Path(prompts),
        engine=engine,
        launcher=launcher,
        minutes=minutes,
        distil=distil,
        device=device,
        fresh=fresh,
        more=settings,
    )


def named(source: str | Path | None) -> str | None:
    """A folder, a hub id or a name, as settings take it."""
    return None if source is None else str(source)


def tune_as_asked(**asked: Any) -> Card:
    """The card of fields of `TuneRequest`."""
    # what the base install lacks is imported with it
    from draftwell.flows.loading import forget_loaded
    from draftwell.flows.orchestration.whole import (
        TuneRequest,
        refuse_mistakes,
        tune_models,
    )

    wanted = TuneRequest(**asked)
    refuse_mistakes(wanted)
    try:
        return tune_models(wanted, log.info)
    finally:
        forget_loaded()  # its models: the next call counts the memory that is free


def prompt_rows(prompts: str | Path | Sequence[str], limit: int | None) -> list[Prompt]:
    """The prompts of a source, or those that are given as texts.

    >>> [row.turns for row in prompt_rows(["Hello", "Why?"], 1)]
    [['Hello']]
    """
    if isinstance(prompts, str | Path):
        return load_prompts(prompts, limit=limit)
    return [Prompt(f"prompt-{i}", None, [text]) for i, text in enumerate(prompts[:limit], 1)]


def choices_of(strategies: Strategies) -> list[StrategyChoice]:
    """What strategies are measured, checked before any model is loaded."""
    named = [(one, {}) if isinstance(one, str) else one for one in strategies]
    choices = [StrategyChoice(name, dict(parameters)) for name, parameters in named]
    for choice in choices:
        build_strategy(choice.name, dict(choice.parameters))
    return choices


def open_bundle_to_bench(
    folder: Path, strategies: Strategies | None
) -> tuple[LoadedPair, StrategyResources, list[StrategyChoice]]:
    """A bundle's models and artifacts, and what is measured of it."""
    wanted = None if strategies is None else choices_of(strategies)
    folder = folder.resolve()
    served = from_bundle(ServerSettings(bundle=folder, slots=1))
    pair = replace(served.pair, chat=read_bundle_manifest(folder).chat)
    fits = profile_fits(served.artifacts, pair)
    artifacts = {
        kind: artifact
        for kind, artifact in served.artifacts.items()
        if fits or kind != HardwareProfile.kind
    }
    tuned = StrategyChoice(served.strategy.name, served.strategy.config.model_dump())
    resources = StrategyResources(artifacts, pair.special_tokens)
    return pair, resources, [tuned] if wanted is None else wanted


def open_pair_to_bench(
    name: str, strategies: Strategies | None, device: str | None
) -> tuple[LoadedPair, StrategyResources, list[StrategyChoice]]:
    """A pair's models and artifacts, and what is measured of it."""
    wanted = choices_of(("vanilla_sd",) if strategies is None else strategies)
    on = default_device() if device is None else checked_device(device, "device")
    space, names = Workspace(name, device=on), [choice.name for choice in wanted]
    pair = space.load(device=on, strategies=wanted)
    profile = find_or_measure_profile(space, pair, names)
    return pair, space.resources(pair, names, profile=profile), wanted
