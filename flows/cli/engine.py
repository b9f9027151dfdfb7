"""What collect, tune, gate, bench, deploy and serve do with `--engine vllm`: each a few lines over
`draftwell.flows.steps.engine`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from draftwell.components.bench.engines.figures import figure_table
from draftwell.components.bench.report.tables import category_table
from draftwell.components.engines.remote.address import parse_address
from draftwell.components.engines.vllm import device_for
from draftwell.components.engines.vllm_methods import (
    METHODS,
    NEEDS,
    Method,
    parse_method,
    parse_methods,
)
from draftwell.components.export.expected import Kept, expected_table
from draftwell.components.export.profile import read_profile
from draftwell.components.prompts.prompt import demo_prompts, mixed
from draftwell.components.report.machine import cpu_model
from draftwell.components.tune.engines.settings import EngineTuneSettings
from draftwell.flows.cli.bench_run import outputs_of, teller
from draftwell.flows.cli.engine_options import named, settings_of
from draftwell.flows.cli.options import (
    check_folder,
    pick_device,
    progress,
    prompts_from,
    say,
    wide_console,
)
from draftwell.flows.cli.signals import ends_what_it_started
from draftwell.flows.context import training_prompts
from draftwell.flows.orchestration.whole import run_loop
from draftwell.flows.settings import PipelineSettings
from draftwell.flows.steps.engine.collect import bench_on_engine, collect_on_engine
from draftwell.flows.steps.engine.deploy import deploy_on_engine, judged, remarks
from draftwell.flows.steps.engine.gate import gate_on_engine
from draftwell.flows.steps.engine.monitor import check_engine
from draftwell.flows.steps.engine.recalibrate import recalibrate
from draftwell.flows.steps.engine.release import (
    EngineRelease,
    candidates,
    choice_of,
    find_engine_release,
    publish_on_engine,
)
from draftwell.flows.steps.engine.serve import server_environment
from draftwell.flows.steps.engine.space import (
    EngineSpace,
    about,
    space_of,
    untouched,
)
from draftwell.flows.steps.engine.swap import swap_on_engine
from draftwell.flows.steps.engine.tune import engine_settings, tune_on_engine
from draftwell.flows.steps.monitor import load_limits, spool_of
from draftwell.flows.workspace import Workspace
from draftwell.registry.bundles.signing import signature_remark
from draftwell.registry.bundles.vllm.build import bundles_of
from draftwell.registry.bundles.vllm.render import OWN_FILES
from draftwell.serving.bundle.bundle import check_signed_files
from draftwell.serving.bundle.signature import signature_check
from draftwell.serving.errors import DraftwellError

if TYPE_CHECKING:
    from draftwell.components.drift.schema import DriftReport
    from draftwell.components.prompts.overlap import TrainingPrompts
    from draftwell.components.prompts.prompt import Prompt
    from draftwell.components.tune.engines.choice import EngineChoice
    from draftwell.serving.bundle.verdict import GateVerdict


@contextmanager
def open_engine(title: str, context: typer.Context) -> Iterator[EngineSpace]:
    """The command's pair on the engine, with a progress bar."""
    space = space_of(settings_of(context, PipelineSettings, but=("out",)))
    with progress(title) as bar:
        yield replace(space, bar=bar)


def path_of(context: typer.Context, option: str) -> Path | None:
    """An option that names a file or a folder."""
    value = context.params.get(option)
    return None if value is None else Path(value)


def tune_elsewhere(context: typer.Context, rows: Callable[[TrainingPrompts], list[Prompt]]) -> None:
    """`draftwell step choose --engine vllm`.

    Args:
        rows: prompts of which `limit` remain without those that the draft and the head were made
            from.
    """

    given = context.params
    chosen = settings_of(context, EngineTuneSettings)
    with open_engine("tune", context) as space:
        prompts = rows(training_prompts(space.workspace, kinds=("eagle3_head",)))
        choice = tune_on_engine(space, prompts, chosen, limit=given["limit"], fresh=given["fresh"])
        made = publish_on_engine(space, chosen.temperature).release if given["publish"] else None
    show_choice(space, choice, chosen.temperature)
    if made is not None:
        say(
            f"registered {made.name}, the candidate: `draftwell gate --engine vllm --pair "
            f"{given['pair']}` judges it"
        )


def show_choice(space: EngineSpace, choice: EngineChoice, temperature: float) -> None:
    """What was measured, what was chosen and why, and where it is."""

    figures = [*choice.explored, *choice.confirmed, *choice.loads, *choice.scheduled]
    title = f"explored, then confirmed: beside plain decoding, {space.version}"
    wide_console().print(figure_table(figures, title))
    typer.echo(f"chosen: {choice.chosen.label}")
    typer.echo(choice.reason)
    for name, why in choice.left_out.items():
        say(f"left out: {name}, {why}")
    typer.echo(space.shown(choice.chosen))
    typer.echo(str(space.config_folder(temperature)))


def gate_elsewhere(context: typer.Context) -> list[tuple[str, GateVerdict]]:
    """`draftwell gate --engine vllm`: a title and the verdict of the release that was named, or of
    both candidates, for greedy and for sampled requests."""

    with open_engine("gate", context) as space:
        return gate_candidates(context, space)


def gate_candidates(context: typer.Context, space: EngineSpace) -> list[tuple[str, GateVerdict]]:
    """A title and the verdict of each release that is to be judged."""
    given, found = context.params, []
    prompts = path_of(context, "prompts")
    alias, of_class = given["release"], float(given["sampled"])
    named = [] if alias is None else [find_engine_release(space, alias, of_class)]
    for one in named or candidates(space):
        everything = prompts_from(prompts) if prompts else demo_prompts()[::-1]
        rows = untouched(space, everything, given["limit"], one.config)
        verdict, _ = gate_on_engine(
            space,
            one,
            rows,
            given["max_tokens"],
            keep=not given["dry_run"],
            file=prompts.name if prompts else None,
        )
        of = one.config.contents
        at = f" at temperature {of.temperature:g}" if of.temperature else ""
        title = f"{one.release.name}, {of.engine} {of.version}, {of.label}{at}"
        found.append((title, verdict))
    return found


def bench_elsewhere(context: typer.Context, prompts: list[Prompt]) -> None:
    """`draftwell bench --engine vllm`."""

    given, file = context.params, path_of(context, "prompts")
    tell = teller(outputs_of(given["out"], report_alone=True).report, as_json=given["as_json"])
    profile = None if given["profile"] is None else read_profile(Path(given["profile"]))
    if profile is not None:
        _ = profile.expected  # refused before an engine is started
    chosen = (mixed(prompts) if given["mix"] else prompts)[: given["limit"]]
    asked = {name: given[name] for name in ("max_tokens", "temperature", "seed")}
    methods = given["strategies"] if named(context, "strategies") else None
    with open_engine("bench", context) as space:
        figures = bench_on_engine(
            space,
            chosen,
            methods_of(space, methods, given["temperature"]),
            space.pair.sampling(**asked),
            given["concurrency"] or 1,
        )
        document = {
            **about(space),
            "machine": cpu_model(),
            "models": {
                role: folder.name
                for role in ("draft", "head")
                if (folder := getattr(space.files, role)) is not None
            },
            "prompts": [prompt.id for prompt in chosen],
            "prompts_file": "demo" if file is None else file.name,
            "max_tokens": given["max_tokens"],
            "temperature": given["temperature"],
            "figures": [figure.model_dump(mode="json") for figure in figures],
        }
    title = (
        f"{space.workspace.spec.name}, {len(chosen)} prompts of up to {given['max_tokens']} "
        f"tokens, beside plain decoding of {document['engine']} {document['version']}"
    )
    tables: list[object] = [figure_table(figures, title)]
    if file is not None:
        tables.append(category_table([(figure.label, figure) for figure in figures]))
    if profile is not None:
        counts = [(one.label, one.acceptance) for one in figures]
        kept = [Kept(label, counted.rounds, counted.accepted_at) for label, counted in counts]
        tables.append(expected_table(profile, kept))
    tell(document, *tables)


def collect_elsewhere(context: typer.Context, rows: Sequence[Prompt]) -> None:
    """`draftwell step collect --engine vllm`."""

    given = context.params
    asked = {name: given[name] for name in ("max_tokens", "temperature", "top_p", "seed")}
    with open_engine("collect", context) as space:
        config = space.config(given["temperature"])
        tuned = Method() if config is None else choice_of(config).chosen
        way = tuned if given["method"] is None else parse_method(given["method"])
        file = path_of(context, "out") or space.folder / "texts.jsonl"
        sampling = space.pair.sampling(logprobs=given["logprobs"] or None, **asked)
        made = collect_on_engine(space, rows, way, sampling, file, fresh=given["fresh"])
    acceptance, speed = made["acceptance"], made["tokens_per_second"]
    typer.echo(
        f"{file}  {made['rows']} texts, {made['tokens']} tokens by {way.label}"
        + ("" if speed is None else f", {speed:.0f} tokens/s")
        + (
            ""
            if acceptance.rate is None
            else f", {acceptance.rate:.2f} of drafts accepted, {acceptance.length:.2f} tokens a "
            "round"
        )
    )


def deploy_elsewhere(context: typer.Context) -> Path:
    """`draftwell deploy --engine vllm`: the bundle's folder, after remarks."""

    given = context.params
    with open_engine("deploy", context) as space:
        released = find_engine_release(space, given["release"], given["temperature"])
        if (tuned_for := released.config.contents.temperature) != given["temperature"]:
            raise DraftwellError(
                f"{released.release.name} was tuned for temperature {tuned_for:g}: name it with "
                f"--set temperature={tuned_for:g}",
                code="tuned_elsewhere",
            )
        if given["dry_run"]:
            judged(space, released, given["ungated"])
            return bundles_of(Path(given["out"]), space.workspace.spec.name)
        if given["swap"] is not None:
            return swap_elsewhere(space, released, given)
        bundle = deploy_on_engine(
            space,
            released,
            Path(given["out"]),
            ungated=given["ungated"],
            with_weights=given["with_weights"],
            options=given["serving"],
        )
    for remark in filter(None, (*remarks(released.choice, bundle), signature_remark(bundle))):
        say(remark)
    return bundle


def swap_elsewhere(space: EngineSpace, released: EngineRelease, given: Mapping[str, Any]) -> Path:
    """`draftwell deploy --engine vllm --set swap=URL`: the bundle's folder, after what was
    checked."""
    others = [*(name for name in ("ungated", "with_weights") if given[name]), *given["serving"]]
    if others:
        raise DraftwellError(
            f"swap keeps what is served as it is: leave {others[0]} out", code="bad_setting"
        )
    rows = prompts_from(Path(given["swap_prompts"])) if given["swap_prompts"] else demo_prompts()
    done = swap_on_engine(space, released, Path(given["out"]), parse_address(given["swap"]), rows)
    for check in done.checks:
        say(check.detail)
    return done.bundle


def monitor_elsewhere(context: typer.Context) -> DriftReport:
    """`draftwell monitor --engine vllm`; vLLM need not be installed here, and where it is, its
    device is the one that is looked at."""

    given = context.params
    device = pick_device(device_for(given["device"]))
    space = EngineSpace(Workspace(given["pair"], given["dtype"], say, device), 1)
    return check_engine(
        space,
        spool=spool_of(space.workspace, path_of(context, "spool")),
        out=given["bundles"],
        limits=load_limits(path_of(context, "limits")),
    )


def recalibrate_elsewhere(context: typer.Context) -> dict[str, Any]:
    """`draftwell monitor --engine vllm --set recalibrate=true`: the outcome."""

    wanted = settings_of(
        context, PipelineSettings, but=("out",), source="drift", out=context.params["bundles"]
    )
    engine_settings(wanted)  # a mistake in methods or levels is refused now, too
    check_folder(wanted.out)
    with ends_what_it_started():
        limits = load_limits(path_of(context, "limits"))
        return recalibrate(space_of(wanted), wanted, say, run_loop, limits)


def serve_elsewhere(bundle: Path, pair: str, options: Sequence[str]) -> NoReturn:
    """`draftwell serve --engine vllm`: this process becomes the bundle's `serve.sh`, in vLLM's
    environment.

    Acceptance is counted in the folder that `draftwell monitor` reads, unless `DRAFTWELL_SPOOL`
    names another or is empty. `--signature-key` and `--signature-flags` are ours, as for our own
    bundles: nothing of the bundle runs before it is known to be what was signed.
    """

    key, options = take_option(options, "--signature-key")
    flags, options = take_option(options, "--signature-flags")
    if key is not None:
        bundle = check_signed_files(bundle, signature_check(key, flags or ""), OWN_FILES)
    script = str(bundle / "serve.sh")
    os.execve(script, [script, *options], server_environment(pair))


def take_option(words: Sequence[str], name: str) -> tuple[str | None, list[str]]:
    """The value of an option in a command line, the last one where there are several, and the words
    without it."""
    value, others, named_last = None, [], False
    for word in words:
        if named_last:
            value, named_last = word, False
        elif word == name:
            named_last = True
        elif word.startswith(f"{name}="):
            value = word.removeprefix(f"{name}=")
        else:
            others.append(word)
    if named_last:
        raise DraftwellError(f"{name} has no value: give it one", code="bad_value")
    return value, others


def methods_of(space: EngineSpace, text: str | None, temperature: float = 0.0) -> list[Method]:
    """Those that were named; otherwise what was tuned and every method of which the pair has what
    it needs."""

    if text is not None:
        return parse_methods(text)
    config = space.config(temperature)
    tuned = [] if config is None else [choice_of(config).chosen]
    possible = [
        parse_method(name)
        for name in METHODS
        if name != "suffix" and getattr(space.files, NEEDS.get(name, "target")) is not None
    ]
    return list(dict.fromkeys([Method(), *tuned, *possible]))
