"""A tuning at an address, from prompts to a card: of an engine that a command starts, or of one as
it runs."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from draftwell.components.engines.launch_template import LaunchTemplate
from draftwell.components.engines.launcher import Launcher
from draftwell.components.engines.remote.address import EngineAddress, ReachSettings, bad
from draftwell.components.tune.engines.budget import Budget
from draftwell.flows.context import take_untouched, training_prompts
from draftwell.flows.loading import prompts_of
from draftwell.flows.progress import counting
from draftwell.flows.steps.engine.card import EngineOutcome, engine_card
from draftwell.flows.steps.engine.gate import gate_on_engine
from draftwell.flows.steps.engine.launched import LaunchedSpace, is_local, place_of
from draftwell.flows.steps.engine.release import publish_on_engine
from draftwell.flows.steps.engine.space import untouched
from draftwell.flows.steps.engine.tune import engine_settings, tune_on_engine
from draftwell.flows.steps.keep_card import keep_with_release
from draftwell.flows.steps.outcome_card import Asked
from draftwell.flows.steps.remote.gate import judged_as_it_runs
from draftwell.flows.steps.remote.space import open_remote
from draftwell.flows.steps.verdict import verdict_of
from draftwell.flows.workspace import Workspace
from draftwell.serving.settings import Settings

if TYPE_CHECKING:
    from draftwell.components.card.card import Card
    from draftwell.components.prompts.prompt import Prompt
    from draftwell.flows.settings import PipelineSettings
    from draftwell.serving.bundle.verdict import GateVerdict

TUNING = 0.6
"""Share of the minutes that the tuning may take; the gate's comes after it."""
AT_ONCE = (1, 4)
"""Requests, of an engine that is judged as it runs."""


class AddressSettings(Settings, ReachSettings):
    """How an engine at an address is reached, and started."""

    called, error_code = "setting", "bad_tune_setting"

    engine_header: tuple[str, ...] = Field((), strict=False, description="headers, NAME:VALUE")
    stop_command: str | None = Field(None, description="ends an engine that a launcher started")
    start_minutes: float = Field(30.0, gt=0, description="that it may take until it answers")
    engine_draft: str | None = Field(None, description="the draft model, as the engine reads it")
    engine_head: str | None = Field(None, description="the EAGLE-3 head, as the engine reads it")

    @field_validator("engine_header", mode="before")
    @classmethod
    def _hide_header(cls, given: Any) -> Any:
        """Headers are texts; the error shows none, because it may be a secret."""
        headers = (given,) if isinstance(given, str) else given
        if not isinstance(headers, list | tuple) or not all(
            isinstance(one, str) for one in headers
        ):
            raise bad("a header of the engine is a text NAME:VALUE, in a YAML file in quotes")
        return headers

    def address(self, url: str, headers: Sequence[str] = ()) -> EngineAddress:
        """A URL with key, headers, certificates and model."""
        return super().address(url, (*self.engine_header, *headers))

    def templates(self, launcher: str) -> tuple[LaunchTemplate, LaunchTemplate | None]:
        """The commands that start and end an engine."""
        stop = self.stop_command
        return LaunchTemplate(launcher), None if stop is None else LaunchTemplate(stop, stops=True)


def tune_at_address(
    workspace: Workspace,
    url: str,
    launcher: str | None,
    given: AddressSettings,
    loop: PipelineSettings,
    asked: Asked,
) -> Card:
    """Tune, judge and register what a launcher starts; without one, judge what runs.

    Args:
        launcher: the command that starts the engine; None: it runs already.
        loop: on which prompts, and what is tried.
        asked: its seconds are counted from now on.
    """
    begun, rows = time.monotonic(), prompts_of(loop)
    if launcher is None:
        found = judged_at(workspace, url, given, rows["bench"], loop.max_tokens)
        device = None
    else:
        found, device = launched_at(workspace, url, launcher, given, loop, asked, rows)
    done = Asked(asked.fits, time.monotonic() - begun, asked.minutes, asked.prompts)
    card = engine_card(workspace, found, done)
    if not is_local(url):
        card = card.model_copy(update={"machine": f"that of {urlsplit(url).hostname}"})
    keep_with_release(workspace, card, device)
    return card


def launched_at(
    workspace: Workspace,
    url: str,
    launcher: str,
    given: AddressSettings,
    loop: PipelineSettings,
    asked: Asked,
    rows: Mapping[str, Sequence[Prompt]],
) -> tuple[EngineOutcome, str]:
    """What came of a tuning with a launcher, and the device that its release is for."""
    address = given.address(url)
    command, stop = given.templates(launcher)
    started = Launcher(
        command,
        address,
        place_of(workspace, address),
        stop=stop,
        rests=workspace.device == "cpu" and is_local(address.url),
        start_seconds=given.start_minutes * 60,
        say=workspace.say,
    )
    with started:
        space = LaunchedSpace(
            workspace,
            0,
            counting("done"),
            launcher=started,
            draft=given.engine_draft,
            head=given.engine_head,
        )
        settings = engine_settings(loop).model_copy(update={"methods": space.methods(loop.methods)})
        space.check_levels(loop.levels)
        budget = Budget(60 * asked.minutes * TUNING)
        choice = tune_on_engine(space, rows["tune"], settings, fresh=loop.fresh, budget=budget)
        released = publish_on_engine(space)
        judging = untouched(space, rows["bench"], None, released.config)
        verdict, figures = gate_on_engine(space, released, judging, settings.max_tokens)
        made = released.release
        workspace.say(space.shown(choice.chosen))
        outcome = EngineOutcome(
            engine=f"{space.name} {space.version} at {space.option}",
            choice=choice,
            figures=figures,
            verdict=word_of(verdict),
            checks=checks_of(verdict),
            release=made.version,
            next_command=next_step(space, made.version, passed=verdict.passed),
        )
        return outcome, made.device


def next_step(space: LaunchedSpace, release: int, *, passed: bool) -> str:
    """What a user types after a tuning with a launcher."""
    pair, device = space.workspace.on_command_lines, space.workspace.device
    if not passed:
        return f"draftwell tune --engine {space.option} --pair {pair} --launcher FILE"
    named = f"--set engine={space.name} --set device={device}"
    return f"draftwell release promote --pair {pair} {named} --release {release}"


def judged_at(
    workspace: Workspace,
    url: str,
    given: AddressSettings,
    prompts: Sequence[Prompt],
    max_tokens: int,
) -> EngineOutcome:
    """What an engine gains as it runs."""
    plain = None if given.plain is None else given.address(given.plain)
    used = training_prompts(workspace, kinds=("eagle3_head",))
    rows = take_untouched(workspace, used, prompts)
    with ExitStack() as stack:
        space = stack.enter_context(
            open_remote(workspace, given.address(url), plain, bar=counting("done"))
        )
        verdict, figures = judged_as_it_runs(space, rows, max_tokens, AT_ONCE)
        for remark in space.remarks:
            workspace.say(remark)
        return EngineOutcome(
            engine=f"{space.about.version} at {space.address.url}",
            choice=None,
            figures=figures,
            verdict=word_of(verdict),
            checks=checks_of(verdict),
            next_command=(
                f"draftwell tune --engine {url} --pair {workspace.on_command_lines} --launcher FILE"
            ),
        )


def word_of(verdict: GateVerdict) -> Any:
    """A verdict as one of three."""
    return verdict_of({"passed": verdict.passed, "checks": checks_of(verdict)})


def checks_of(verdict: GateVerdict) -> list[dict[str, Any]]:
    """Its checks as data."""
    return [vars(check) for check in verdict.checks]
