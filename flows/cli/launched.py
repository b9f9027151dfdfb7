"""What tune and gate do with `--engine URL --launcher COMMAND`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from draftwell.components.engines.launch_template import LaunchTemplate
from draftwell.components.engines.launcher import Launcher
from draftwell.components.tune.engines.budget import Budget
from draftwell.components.tune.engines.regret import grid_regret
from draftwell.components.tune.engines.settings import EngineTuneSettings
from draftwell.flows.cli.demo import ends_what_it_started
from draftwell.flows.cli.demo_engine import regret_line
from draftwell.flows.cli.engine import gate_candidates, show_choice
from draftwell.flows.cli.engine_options import settings_of
from draftwell.flows.cli.options import progress, release_device, say
from draftwell.flows.context import take_untouched, training_prompts
from draftwell.flows.steps.engine.launched import LaunchedSpace, place_of
from draftwell.flows.steps.engine.release import publish_on_engine
from draftwell.flows.steps.engine.tune import lab_of, tune_on_engine
from draftwell.flows.workspace import Workspace
from draftwell.serving.errors import DraftwellError
from draftwell.serving.files import write_json

if TYPE_CHECKING:
    from draftwell.components.engines.remote.address import EngineAddress
    from draftwell.components.prompts.overlap import TrainingPrompts
    from draftwell.components.prompts.prompt import Prompt
    from draftwell.components.tune.engines.choice import EngineChoice
    from draftwell.serving.bundle.verdict import GateVerdict


@contextmanager
def open_launched(
    title: str, context: typer.Context, address: EngineAddress
) -> Iterator[LaunchedSpace]:
    """The command's pair on engines that a launcher starts; they end with the block, also where
    this process is asked to end."""
    given = context.params
    command = LaunchTemplate(given["launcher"])
    stop = given["stop_command"]
    workspace = Workspace(given["pair"], given["dtype"], say, release_device(given["device"]))
    launcher = Launcher(
        command,
        address,
        place_of(workspace, address.url),
        stop=None if stop is None else LaunchTemplate(stop, stops=True),
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
    address: EngineAddress,
    rows: Callable[[TrainingPrompts], list[Prompt]],
) -> None:
    """`draftwell tune --engine URL --launcher COMMAND`.

    Args:
        rows: as for `tune_elsewhere`.
    """
    given = context.params
    asked = settings_of(context, EngineTuneSettings)
    with open_launched("tune", context, address) as space:
        prompts = rows(training_prompts(space.workspace, kinds=("eagle3_head",)))
        if len(asked.levels) > 1 and space.name != "vllm":
            raise DraftwellError(
                f"{space.name} has one draft length for all loads: leave --levels out",
                code="engine_option",
            )
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
                f"--launcher … --pair {given['pair']}` judges it"
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


def gate_launched(context: typer.Context, address: EngineAddress) -> list[tuple[str, GateVerdict]]:
    """`draftwell gate --engine URL --launcher COMMAND`: titles and verdicts of the release that was
    named, or of both candidates."""
    with open_launched("gate", context, address) as space:
        return gate_candidates(context, space)
