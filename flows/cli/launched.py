"""What tune and gate do with `--engine URL`, with and without `--launcher COMMAND`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

from draftwell.components.engines.launch_template import LaunchTemplate, launcher_text
from draftwell.components.engines.launcher import Launcher
from draftwell.components.prompts.prompt import demo_prompts
from draftwell.components.tune.engines.budget import Budget
from draftwell.components.tune.engines.regret import grid_regret
from draftwell.components.tune.engines.settings import EngineTuneSettings
from draftwell.flows.cli.engine import gate_candidates, path_of, show_choice
from draftwell.flows.cli.engine_options import settings_of
from draftwell.flows.cli.options import (
    progress,
    prompts_from,
    release_device,
    say,
)
from draftwell.flows.cli.remote import address_of, open_at_address
from draftwell.flows.cli.settings_option import named, spelled
from draftwell.flows.cli.signals import ends_what_it_started
from draftwell.flows.context import take_untouched, training_prompts
from draftwell.flows.steps.engine.launched import LaunchedSpace, is_local, place_of
from draftwell.flows.steps.engine.release import publish_on_engine
from draftwell.flows.steps.engine.tune import lab_of, tune_on_engine
from draftwell.flows.steps.remote.gate import gate_as_it_runs
from draftwell.flows.workspace import Workspace
from draftwell.serving.errors import DraftwellError
from draftwell.serving.files import write_json

if TYPE_CHECKING:
    from draftwell.components.prompts.overlap import TrainingPrompts
    from draftwell.components.prompts.prompt import Prompt
    from draftwell.components.tune.engines.choice import EngineChoice
    from draftwell.serving.bundle.verdict import GateVerdict

NEED_A_LAUNCHER = (
    *("release", "sampled", "stop_command", "start_minutes", "engine_draft", "engine_head"),
)
"""Options of gate."""


@contextmanager
def open_launched(title: str, context: typer.Context) -> Iterator[LaunchedSpace]:
    """The command's pair on engines that a launcher starts; they end with the block, also where
    this process is asked to end."""
    given, address = context.params, address_of(context)
    assert address is not None
    command = LaunchTemplate(launcher_text(given["launcher"]))
    stop = given["stop_command"]
    workspace = Workspace(given["pair"], given["dtype"], say, release_device(given["device"]))
    launcher = Launcher(
        command,
        address,
        place_of(workspace, address),
        stop=None if stop is None else LaunchTemplate(stop, stops=True),
        rests=workspace.device == "cpu" and is_local(address.url),
        start_seconds=given["start_minutes"] * 60,
        say=say,
    )
    with ends_what_it_started(), launcher, progress(title) as bar:
        if launcher.alternates:
            say(
                "one engine runs at a time, because the command names no {port}: it is started "
                "again for every turn, and intervals are wider"
            )
        yield LaunchedSpace(
            workspace,
            0,
            bar,
            launcher=launcher,
            draft=given["engine_draft"],
            head=given["engine_head"],
        )


def tune_launched(
    context: typer.Context,
    rows: Callable[[TrainingPrompts], list[Prompt]],
) -> None:
    """`draftwell step choose --engine URL --launcher COMMAND`.

    Args:
        rows: as for `tune_elsewhere`.
    """
    given = context.params
    asked = settings_of(context, EngineTuneSettings)
    if given["launcher"] is None:
        raise DraftwellError(
            "what only a restart can change is tuned through a command that starts the engine: "
            "name it with --launcher 'vllm serve MODEL --port {port} {speculation_options}'",
            code="no_launcher",
        )
    with open_launched("tune", context) as space:
        prompts = rows(training_prompts(space.workspace, kinds=("eagle3_head",)))
        space.check_levels(asked.levels)
        settings = asked.model_copy(update={"methods": space.methods(given["methods"])})
        minutes = given["minutes"]
        choice = tune_on_engine(
            space,
            prompts,
            settings,
            limit=given["limit"],
            fresh=given["fresh"],
            budget=None if minutes is None else Budget(minutes * 60),
        )
        made = publish_on_engine(space, settings.temperature).release if given["publish"] else None
        show_choice(space, choice, settings.temperature)
        if made is not None:
            say(
                f"registered {made.name}, the candidate: `draftwell gate --engine {space.option} "
                f"--set launcher=… --pair {given['pair']}` judges it"
            )
        if given["grid"]:
            show_grid(space, settings, choice, prompts, given["limit"])


def show_grid(
    space: LaunchedSpace,
    settings: EngineTuneSettings,
    choice: EngineChoice,
    prompts: list[Prompt],
    limit: int | None,
) -> None:
    """Measure all settings again, and say what the choice lost."""
    used = training_prompts(space.workspace, kinds=("eagle3_head",))
    rows = take_untouched(space.workspace, used, prompts, limit)
    found = grid_regret(lab_of(space, rows, settings, fresh=False), settings, choice, None)
    file = write_json(space.folder / "grid.json", found)
    for name, why in found["left_out"].items():
        say(f"left out of the grid: {name}, {why}")
    typer.echo(regret_line(found))
    typer.echo(str(file))


def regret_line(grid: Mapping[str, Any]) -> str:
    """How far the choice is behind the best of a grid that was measured again."""
    regret = grid["regret"]
    if regret is None:
        return "regret: unknown, because the choice could not be measured again"
    low, mid, high = (100 * regret[name] for name in ("low", "regret", "high"))
    return (
        f"regret {mid:.1f} % ({low:.1f} to {high:.1f}): the choice beside {regret['best']}, the "
        f"best of the others of {len(grid['figures'])} settings, on all prompts of the tuning"
    )


def gate_remote(context: typer.Context) -> list[tuple[str, GateVerdict]]:
    """`draftwell gate --engine URL`: titles and verdicts, with a launcher of the release that was
    named, or of both candidates, else of the engine as it runs."""
    given = context.params
    if given["launcher"] is not None:
        if named(context, "plain") or named(context, "levels"):
            raise DraftwellError(
                "launcher= starts plain decoding itself, at the loads that were tuned: leave "
                "plain and levels out",
                code="engine_option",
            )
        with open_launched("gate", context) as launched:
            return gate_candidates(context, launched)
    for option in NEED_A_LAUNCHER:
        if named(context, option):
            raise DraftwellError(
                f"{spelled(context, option)} means nothing for an engine that runs already: "
                "leave it out, or name the command that starts one with --set launcher=",
                code="engine_option",
            )
    with open_at_address("gate", context) as space:
        prompts = path_of(context, "prompts")
        everything = prompts_from(prompts) if prompts else demo_prompts()[::-1]
        used = training_prompts(space.workspace, kinds=("eagle3_head",))
        rows = take_untouched(space.workspace, used, everything, given["limit"])
        verdict = gate_as_it_runs(space, rows, given["max_tokens"], given["levels"])
        said = space.described()
        title = f"{said['pair']}, {said['version']} at {said['address']}, as it runs"
    say("no release was judged: with launcher= the candidate is, and can be promoted")
    return [(title, verdict)]
