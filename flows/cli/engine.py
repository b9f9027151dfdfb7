"""What collect, tune, gate, bench, deploy and serve do with `--engine vllm`: each a few lines over
`draftwell.flows.steps.engine`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from draftwell.flows.cli.options import (
    EngineName,
    check_output,
    pick_device,
    progress,
    say,
    wide_console,
    write_json,
)
from draftwell.flows.cli.signals import ends_what_it_started
from draftwell.serving.errors import DraftwellError

if TYPE_CHECKING:
    from draftwell.components.drift.acceptance import AcceptanceReport
    from draftwell.components.engines.vllm_methods import Method
    from draftwell.components.gate.verdict import GateVerdict
    from draftwell.components.prompts.overlap import TrainingPrompts
    from draftwell.components.prompts.prompt import Prompt
    from draftwell.flows.steps.engine.space import EngineSpace

ALWAYS = ("pair", "dtype", "device", "threads", "engine")


def named(context: typer.Context, option: str) -> bool:
    """Whether an option was named on the command line."""
    source = context.get_parameter_source(option)
    return source is not None and source.name == "COMMANDLINE"


def refuse_options(
    context: typer.Context,
    engine: EngineName,
    elsewhere: Sequence[str],
    *,
    only_elsewhere: Sequence[str] = (),
) -> bool:
    """Refuse, before any work, options that the engine does not know.

    Args:
        elsewhere: options that mean something on another engine, besides those that always do.
        only_elsewhere: those that mean nothing on ours.
    Returns:
        whether another engine than ours is asked for.
    Raises:
        DraftwellError: an option does not go with the engine (`engine_option`).
    """
    other = engine is not EngineName.draftwell
    known = (
        {*ALWAYS, *elsewhere}
        if other
        else {str(one.name) for one in context.command.params} - set(only_elsewhere)
    )
    wrong = [
        one
        for one in context.command.params
        if one.name not in known and named(context, str(one.name))
    ]
    if wrong:
        raise DraftwellError(
            f"{wrong[0].opts[0]} means nothing with --engine {engine.value}: leave it out",
            code="engine_option",
        )
    return other


@contextmanager
def open_engine(
    title: str, pair: str, dtype: str | None, device: str | None, threads: int | None
) -> Iterator[EngineSpace]:
    """The pair on the engine, with a progress bar; a missing or wrong engine is refused before
    models are looked for."""
    from draftwell.components.engines.vllm import command, device_for
    from draftwell.flows.steps.engine.space import engine_space

    command()
    space = engine_space(pair, dtype, pick_device(device_for(device)), threads, say)
    with progress(title) as bar:
        yield replace(space, bar=bar)


def tune_elsewhere(
    pair: str,
    dtype: str | None,
    device: str | None,
    threads: int | None,
    *,
    rows: Callable[[TrainingPrompts], list[Prompt]],
    limit: int | None,
    methods: str | None,
    levels: str,
    fresh: bool,
    **settings: Any,
) -> None:
    """`draftwell tune --engine vllm`.

    Args:
        rows: prompts of which `limit` remain without those that the draft and the head were made
            from.
        settings: of `EngineTuneSettings`, by its names.
    """
    from draftwell.components.bench.engines.table import figure_table
    from draftwell.components.tune.engines.settings import EngineTuneSettings
    from draftwell.flows.context import training_prompts
    from draftwell.flows.steps.engine.space import CHOICE
    from draftwell.flows.steps.engine.tune import refuse_if_nothing_is_left, tune_on_engine

    if methods is not None:
        settings["methods"] = tuple(part.strip() for part in methods.split(",") if part.strip())
    chosen = EngineTuneSettings(levels=numbers(levels), **settings)
    with open_engine("tune", pair, dtype, device, threads) as space:
        if methods is not None:
            refuse_if_nothing_is_left(space, chosen)
        used = training_prompts(space.workspace, kinds=("eagle3_head",))
        prompts, lines = used.untouched(rows(used), limit)
        for line in lines:
            say(line)
        document = tune_on_engine(space, prompts, chosen, fresh=fresh)
        choice = space.choice(chosen.temperature)
    assert choice is not None
    figures = [*choice.explored, *choice.confirmed, *choice.loads, *choice.scheduled]
    wide_console().print(
        figure_table(
            figures, f"explored, then confirmed: beside plain decoding, {document['version']}"
        )
    )
    for final in choice.finals:
        typer.echo(f"final: {final}")
    typer.echo(f"chosen: {choice.chosen.label}")
    typer.echo(choice.reason)
    for name, why in choice.left_out.items():
        say(f"left out: {name}, {why}")
    typer.echo(json.dumps(document["exports"]["vllm"]))
    typer.echo(str(space.file_of(CHOICE, chosen.temperature)))


def gate_elsewhere(
    pair: str,
    dtype: str | None,
    device: str | None,
    threads: int | None,
    *,
    prompts: Path | None,
    limit: int | None,
    max_tokens: int,
    keep: bool,
) -> list[tuple[str, GateVerdict]]:
    """`draftwell gate --engine vllm`: a title and the verdict of every choice, each at the
    temperature that it was tuned for."""
    from draftwell.components.gate.verdict import Thresholds
    from draftwell.components.prompts.prompt import demo_prompts, read_prompts
    from draftwell.flows.steps.engine.gate import gate_on_engine
    from draftwell.flows.steps.engine.space import tuned_choice, untouched
    from draftwell.registry.gates import load_gates

    with open_engine("gate", pair, dtype, device, threads) as space:
        found = []
        for temperature in space.temperatures() or [0.0]:
            label = tuned_choice(space, temperature).chosen.label + (
                f" at temperature {temperature:g}" if temperature else ""
            )
            rows = untouched(
                space,
                read_prompts(prompts) if prompts else demo_prompts()[::-1],
                limit,
                temperature,
            )
            verdict, record = gate_on_engine(
                space,
                rows,
                Thresholds.of(load_gates().model_dump()),
                max_tokens,
                temperature=temperature,
                keep=keep,
            )
            found.append((f"{record.engine} {record.version}, {label}", verdict))
    return found


def bench_elsewhere(
    pair: str,
    dtype: str | None,
    device: str | None,
    threads: int | None,
    *,
    rows: tuple[list[Prompt], bool, int | None],
    methods: str | None,
    max_tokens: int,
    temperature: float,
    seed: int,
    at_once: int,
    out: Path | None,
) -> None:
    """`draftwell bench --engine vllm`."""
    from draftwell.components.bench.engines.table import figure_table
    from draftwell.components.prompts.prompt import mixed
    from draftwell.flows.steps.engine.collect import bench_on_engine
    from draftwell.flows.steps.engine.space import about

    if out is not None:
        check_output(out)
    prompts, mix, limit = rows
    chosen = (mixed(prompts) if mix else prompts)[:limit]
    with open_engine("bench", pair, dtype, device, threads) as space:
        sampling = space.pair.sampling(max_tokens=max_tokens, temperature=temperature, seed=seed)
        figures = bench_on_engine(
            space, chosen, methods_of(space, methods, temperature), sampling, at_once
        )
        document = {
            **about(space),
            "prompts": [prompt.id for prompt in chosen],
            "max_tokens": max_tokens,
            "temperature": temperature,
            "figures": [figure.model_dump(mode="json") for figure in figures],
        }
    if out is not None:
        write_json(out, document)
    wide_console().print(
        figure_table(
            figures,
            f"{space.workspace.spec.name}, {len(chosen)} prompts of up to {max_tokens} "
            "tokens, beside "
            f"plain decoding of {document['engine']} {document['version']}",
        )
    )


def collect_elsewhere(
    pair: str,
    dtype: str | None,
    device: str | None,
    threads: int | None,
    *,
    rows: Sequence[Prompt],
    method: str | None,
    out: Path | None,
    fresh: bool,
    logprobs: int,
    **sampling: Any,
) -> None:
    """`draftwell collect --engine vllm`."""
    from draftwell.components.engines.vllm_methods import Method, parse_method
    from draftwell.flows.steps.engine.collect import collect_on_engine

    with open_engine("collect", pair, dtype, device, threads) as space:
        choice = space.choice(sampling.get("temperature", 0.0))
        way = (
            parse_method(method)
            if method is not None
            else choice.chosen
            if choice is not None
            else Method()
        )
        file = out or space.folder / "texts.jsonl"
        made = collect_on_engine(
            space,
            rows,
            way,
            space.pair.sampling(logprobs=logprobs or None, **sampling),
            file,
            fresh=fresh,
        )
    acceptance = made["acceptance"]
    drafts = (
        ""
        if acceptance.rate is None
        else f", {acceptance.rate:.2f} of drafts accepted, {acceptance.length:.2f} tokens a round"
    )
    speed = (
        "" if made["tokens_per_second"] is None else f", {made['tokens_per_second']:.0f} tokens/s"
    )
    typer.echo(
        f"{file}  {made['rows']} texts, {made['tokens']} tokens by {way.label}{speed}{drafts}"
    )


def deploy_elsewhere(
    pair: str,
    dtype: str | None,
    device: str | None,
    *,
    out: Path,
    temperature: float,
    ungated: str | None,
    with_weights: bool,
    options: Sequence[str],
) -> Path:
    """`draftwell deploy --engine vllm`: the bundle's folder, after remarks."""
    from draftwell.flows.steps.engine.deploy import deploy_on_engine, remarks
    from draftwell.flows.workspace import parse_settings
    from draftwell.registry.bundles.signing import signature_remark

    with open_engine("deploy", pair, dtype, device, None) as space:
        bundle = deploy_on_engine(
            space,
            out,
            temperature=temperature,
            ungated=ungated,
            with_weights=with_weights,
            options=parse_settings(options),
        )
        for remark in filter(
            None, (*remarks(space, bundle, temperature), signature_remark(bundle))
        ):
            say(remark)
    return bundle


def monitor_elsewhere(
    pair: str,
    dtype: str | None,
    device: str | None,
    *,
    spool: Path | None,
    limits: Path | None,
    out: Path,
) -> AcceptanceReport:
    """`draftwell monitor --engine vllm`; vLLM need not be installed here, and where it is, its
    device is the one that is looked at."""
    from draftwell.components.engines.vllm import device_for
    from draftwell.flows.steps.engine.monitor import check_engine
    from draftwell.flows.steps.engine.space import EngineSpace
    from draftwell.flows.steps.monitor import load_limits, spool_of
    from draftwell.flows.workspace import Workspace

    space = EngineSpace(Workspace(pair, dtype, say, pick_device(device_for(device))), 1)
    found = check_engine(
        space, spool=spool_of(space.workspace, spool), out=out, limits=load_limits(limits)
    )
    for note in found.notes:
        say(note)
    return found


def serve_elsewhere(
    bundle: Path, pair: str, options: Sequence[str], replica: int | None = None
) -> NoReturn:
    """`draftwell serve --engine vllm`: this process becomes the bundle's `serve.sh`, in vLLM's
    environment.

    Acceptance is counted in the folder that `draftwell monitor` reads, unless `DRAFTWELL_SPOOL`
    names another or is empty.

    Args:
        replica: number of a process that shares the port with others, from 1; None shares it with
            none that listen there already.
    Raises:
        DraftwellError: the port is taken (`engine_port_taken`).
    """
    from draftwell.components.engines.ports import refuse_taken
    from draftwell.flows.steps.engine.processes import option_of
    from draftwell.flows.steps.engine.serve import server_environment

    variables = server_environment(pair)
    if replica is not None:
        variables["DRAFTWELL_REPLICA"] = str(replica)
    if "DRAFTWELL_REPLICA" not in variables and (port := port_of(bundle, options)) is not None:
        refuse_taken(port, option_of(options, "--host") or "127.0.0.1")
    script = str(bundle / "serve.sh")
    os.execve(script, [script, *options], variables)


def restart_elsewhere(bundle: Path | None, pair: str, options: Sequence[str]) -> None:
    """`draftwell serve --engine vllm --restart`.

    Args:
        bundle: None, or the link `current` in its folder.
        options: further ones, of which there must be none: every process keeps its own.
    Raises:
        DraftwellError: there are some, or another bundle is named (`engine_option`), and what
            `rolling_restart` raises.
    """
    from draftwell.flows.steps.engine.replicas import rolling_restart

    if options:
        raise DraftwellError(
            f"{options[0]} means nothing with --restart, which starts each process with "
            "the options of the one before: "
            "leave it out",
            code="engine_option",
        )
    if bundle is not None and (bundle.name != "current" or bundle.parent.name != pair):
        raise DraftwellError(
            f"--restart follows a link `current`, as in dist/vllm/{pair}/current, not {bundle}",
            code="engine_option",
        )
    with ends_what_it_started():
        rolling_restart(Path("dist") if bundle is None else bundle.absolute().parents[2], pair, say)


def port_of(bundle: Path, options: Sequence[str]) -> int | None:
    """The port that `serve.sh` will listen on; None where it cannot be read: vLLM itself says then
    what is wrong."""
    from draftwell.flows.steps.engine.processes import option_of

    try:
        named = option_of(options, "--port") or os.environ.get("PORT")
        return int(named or json.loads((bundle / "manifest.json").read_text())["settings"]["port"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def methods_of(space: EngineSpace, text: str | None, temperature: float = 0.0) -> list[Method]:
    """Those that were named; otherwise what was tuned and every method of which the pair has what
    it needs."""
    from draftwell.components.engines.vllm_methods import (
        METHODS,
        NEEDS,
        Method,
        parse_method,
        parse_methods,
    )

    if text is not None:
        return parse_methods(text)
    choice = space.choice(temperature)
    tuned = [] if choice is None else [choice.chosen]
    possible = [
        parse_method(name)
        for name in METHODS
        if name != "suffix" and getattr(space.files, NEEDS.get(name, "target")) is not None
    ]
    return list(dict.fromkeys([Method(), *tuned, *possible]))


def numbers(text: str) -> tuple[int, ...]:
    """Numbers that are written with commas.

    >>> numbers("1,4,16")
    (1, 4, 16)
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise DraftwellError(
            f"--levels {text!r}: write numbers above 0 with commas, such as 1,4,16",
            code="bad_levels",
        )
    return tuple(map(int, parts))
