"""Commands that decode: pairs, strategies, generate, serve (`bench` has a file of its own)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from draftwell.components.engines.port import CAPABILITIES
from draftwell.components.engines.remote.address import is_address
from draftwell.flows.cli.options import (
    Artifacts,
    DeviceOption,
    DraftDevice,
    DtypeOption,
    EngineOption,
    PadTarget,
    Pair,
    Seed,
    Threads,
    check_artifacts,
    pick_device,
    pick_draft_device,
    say,
    set_threads,
    wide_console,
)
from draftwell.flows.cli.settings_option import OtherKeys, add_command
from draftwell.flows.workspace import Workspace
from draftwell.registry.bundles.vllm.build import bundles_of
from draftwell.registry.pairs import find_pair, list_pairs
from draftwell.registry.pairs.fitting import device_gigabytes, export_only
from draftwell.serving.errors import DraftwellError
from draftwell.serving.server.main import app as server, refuse_removed

if TYPE_CHECKING:
    from draftwell.serving.runtime.session.stats import Stats

SHOWN_STATS = (
    "emitted",
    "drafted",
    "judged",
    "accepted",
    "rescued",
    "target_calls",
    "draft_calls",
    "qualifier_calls",
    "inner_acceptance_rate",
    "acceptance_rate",
    "mat",
    "wall_seconds",
)
"""Counters of an answer that `generate --json` prints."""


def add_to(app: typer.Typer) -> None:
    """Register this file's commands."""
    for command in (pairs, strategies, generate):
        add_command(app, command)
    # all other options of `serve` go to the server's own parser
    passed_on = {"allow_extra_args": True, "ignore_unknown_options": True}
    add_command(app, serve, context_settings=passed_on)


def pairs(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """List the pairs of the catalogue and your own; those that fit no device of this machine are
    for export only.

    Example: draftwell list pairs
    """

    found, memory = list_pairs(), device_gigabytes()
    if as_json:
        typer.echo(
            json.dumps(
                [
                    {**spec.model_dump(mode="json"), "export_only": export_only(spec, memory)}
                    for spec in found
                ],
                indent=2,
            )
        )
        return
    from rich.table import Column, Table

    table = Table(
        Column("pair", no_wrap=True),
        "also called",
        "target",
        "draft",
        "qualifier",
        "dtype",
        "here",
        "description",
        title="Pairs",
    )
    for spec in found:
        models = {
            role: s.hub or (s.package and s.package.package) or s.artifact or s.path or "near copy"
            for role, s in spec.sources().items()
        }
        table.add_row(
            spec.name,
            ", ".join(spec.aliases),
            models["target"],
            models.get("draft", "-"),
            models.get("qualifier", "-"),
            spec.number_format,
            "export only" if export_only(spec, memory) else "runs",
            spec.description,
        )
    wide_console().print(table)


def strategies(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the decoding strategies with their parameters.

    Example: draftwell list strategies --json
    """
    from draftwell.serving.runtime.strategies import STRATEGIES, describe

    found = [describe(cls) for cls in STRATEGIES.values()]
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    from rich.table import Column, Table

    name = Column("strategy", no_wrap=True)
    table = Table(
        name,
        "lossless",
        Column("parameters (default, bounds)", no_wrap=True),
        "needs",
        "paper",
        title="Strategies",
    )
    for row in found:
        lines = [parameter_line(name, p) for name, p in row["parameters"].items()]
        needs = [
            *row["artifacts"],
            *(["a qualifier model"] if "qualifier" in row["models"] else []),
        ]
        table.add_row(
            row["name"],
            "yes" if row["lossless"] else "no",
            "\n".join(lines) or "-",
            "\n".join(needs) or "-",
            row["paper"],
        )
    wide_console().print(table)


def parameter_line(name: str, parameter: dict[str, Any]) -> str:
    """A parameter's name, default and bounds or choices; brackets are escaped, Rich would read them
    as markup."""
    low, high = parameter["minimum"], parameter["maximum"]
    bounds = (
        f"  \\[{'' if low is None else low} … {'' if high is None else high}]"
        if (low, high) != (None, None)
        else ""
    )
    bounds = (
        f"  \\[{', '.join(map(str, parameter['choices']))}]" if parameter["choices"] else bounds
    )
    return f"{name} = {'(required)' if parameter['required'] else parameter['default']}{bounds}"


Prompt = Annotated[str, typer.Option("--prompt", help="The user's message.")]
Strategy = Annotated[str, typer.Option("--strategy", help="See `draftwell list strategies`.")]
Parameters = Annotated[dict[str, str], OtherKeys()]
MaxTokens = Annotated[int, typer.Option("--max-tokens", min=1, help="Tokens of the answer.")]
Temperature = Annotated[float, typer.Option("--temperature", min=0.0, help="0 is greedy.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the text.")]


def generate(
    prompt: Prompt,
    pair: Pair = "default",
    strategy: Strategy = "vanilla_sd",
    parameters: Parameters = {},  # noqa: B006 (never changed)
    max_tokens: MaxTokens = 128,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    draft_device: DraftDevice = None,
    threads: Threads = None,
    pad_target: PadTarget = None,
    artifacts: Artifacts = None,
    as_json: AsJson = False,
) -> None:
    """Generate one answer and report acceptance, speed and model calls.

    Example: draftwell generate --pair default --strategy spide --set spide.tau=0.6 --prompt
    "What is a prime number?"
    """
    from draftwell.flows.steps.profile import find_or_measure_profile
    from draftwell.serving.runtime.engine.thread_governor import governor_for
    from draftwell.serving.runtime.strategies import StrategyChoice, build_strategy

    chosen_parameters = parameters_of(strategy, parameters)
    if not prompt.strip():
        raise DraftwellError("--prompt is empty: give the model something to answer")
    build_strategy(strategy, chosen_parameters)
    check_artifacts(artifacts)
    on = pick_device(device)
    workspace = Workspace(pair, dtype, say, on)
    set_threads(threads)
    loaded = workspace.load(
        device=on,
        draft_device=pick_draft_device(draft_device, on),
        pad_target=pad_target,
        strategies=[StrategyChoice(strategy, chosen_parameters)],
    )
    profile = find_or_measure_profile(workspace, loaded, [strategy], artifacts)
    wanted = [(strategy, chosen_parameters)]
    [chosen] = workspace.strategies(loaded, wanted, folder=artifacts, profile=profile)
    sampling = loaded.sampling(max_tokens=max_tokens, temperature=temperature, seed=seed)
    engine = loaded.engine(governor=governor_for(threads, on))
    job = engine.generate(loaded.encode_prompt(prompt), sampling, chosen)
    text, stats = loaded.decode(job.output), job.session.stats
    if not as_json:
        typer.echo(text)
        say(told(stats, loaded.padded_to))
        return
    answer = {"prompt": prompt, "text": text, "token_ids": job.output, "strategy": strategy}
    made_by = {
        "pair": workspace.spec.name,
        "parameters": chosen.config.model_dump(),
        "dtype": workspace.dtype,
        "padded_to": loaded.padded_to,
        "finish_reason": job.session.text.finish_reason,
    }
    typer.echo(json.dumps({**answer, **made_by, "stats": shown(stats)}))


def parameters_of(strategy: str, given: Mapping[str, str]) -> dict[str, str]:
    """The parameters of the strategy, of keys as `--set STRATEGY.PARAMETER=VALUE` has them.

    Raises:
        DraftwellError: a key names another strategy (`set_names_no_strategy`).
    """
    split = {key: key.partition(".") for key in given}
    if others := [key for key, (name, _, _) in split.items() if name != strategy]:
        raise DraftwellError(
            f"--set {others[0]}: the strategy is {strategy}: write {strategy}.PARAMETER=VALUE",
            code="set_names_no_strategy",
        )
    return {parameter: given[key] for key, (_, _, parameter) in split.items()}


def shown(stats: Stats) -> dict[str, Any]:
    """Statistics of a request as JSON."""
    return {
        **{name: getattr(stats, name) for name in SHOWN_STATS},
        "ttft_seconds": stats.first_token_seconds,
        "tokens_per_second": stats.emitted / stats.wall_seconds,
    }


def told(stats: Stats, padded_to: int | None) -> str:
    """What came of a request, in a line."""
    rate = (
        f"{stats.acceptance_rate:.0%} of judged draft tokens accepted, "
        if stats.acceptance_rate is not None
        else ""
    )
    padded = "" if padded_to is None else f"; the target is padded to {padded_to:,} parameters"
    return (
        f"{stats.emitted} tokens in {stats.wall_seconds:.2f} s "
        f"({stats.emitted / stats.wall_seconds:.1f} tokens/s), "
        f"{rate}{stats.target_calls} target calls after the prompt{padded}"
    )


def serve(
    context: typer.Context,
    pair: Pair = "default",
    bundle: Annotated[
        Path | None,
        typer.Option(
            "--bundle",
            help="Bundle folder. Default: dist/<pair>/current, for vLLM dist/vllm/<pair>/current.",
        ),
    ] = None,
    engine: EngineOption = "draftwell",
    port: Annotated[
        int | None, typer.Option("--port", min=1, max=65535, help="Port to listen on.")
    ] = None,
) -> None:
    """Serve a deployed bundle over the OpenAI API. All other options are those of draftwell-serve
    (see `draftwell-serve --help`): --host, --slots, --threads, --queue, --allow-parameters,
    --state, --state-dir, --api-key-file, --feedback-dir and others.

    With --engine vllm, vLLM serves the bundle that `draftwell deploy --engine vllm` built, and all
    other options are vLLM's.

    Example: draftwell serve --pair default --port 8000 --allow-parameters
    """

    if is_address(engine):
        raise DraftwellError(
            f"draftwell serve starts an engine: name {' or '.join(CAPABILITIES)} with --engine",
            code="engine_option",
        )
    # the port first: an option of theirs at the end then still lacks its value
    passed_on = [*([] if port is None else ["--port", str(port)]), *context.args]
    if engine == "vllm":
        from draftwell.flows.cli.engine import serve_elsewhere

        name = find_pair(pair).name
        found = bundle or bundles_of(Path("dist"), name) / "current"
        if not (found / "serve.sh").is_file():
            raise DraftwellError(
                (
                    f"no bundle at {found}: build one with `draftwell deploy --engine vllm "
                    f"--pair {pair}`"
                ),
                code="no_bundle",
            )
        serve_elsewhere(found, name, passed_on)
    refuse_removed(passed_on)
    folder = bundle or Path("dist") / find_pair(pair).name / "current"
    if not folder.is_dir():
        raise DraftwellError(
            f"no bundle at {folder}: build one with `draftwell deploy --pair {pair} --device "
            "DEVICE`",
            code="no_bundle",
        )

    code = server(
        ["--bundle", str(folder), *passed_on], prog_name="draftwell serve", standalone_mode=False
    )
    raise typer.Exit(code or 0)
