"""Everything that `draftwell tune` does: from two models, or a pair, and prompts to a release that
is served, and a card that says what it gains."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, model_validator

from draftwell.components.card.card import Card
from draftwell.components.engines.launch_template import launcher_text
from draftwell.components.engines.remote.address import is_address
from draftwell.flows.failures import reaching_prefect
from draftwell.flows.loading import prompts_of
from draftwell.flows.progress import announce, settle_prefect
from draftwell.flows.settings import OF_TRAFFIC, AskedSettings, PipelineSettings
from draftwell.flows.steps.distil import DistilRequest, keep_report, run_distil
from draftwell.flows.steps.engine.at_address import AddressSettings, tune_at_address
from draftwell.flows.steps.engine.launched import is_local
from draftwell.flows.steps.engine.space import space_of
from draftwell.flows.steps.engine.tune import engine_settings
from draftwell.flows.steps.fits import said_to_fit
from draftwell.flows.steps.outcome_card import Asked
from draftwell.flows.steps.own_pair import pair_of_models
from draftwell.flows.workspace import Workspace
from draftwell.registry.pairs import PairSpec, find_pair, list_pairs
from draftwell.serving.device import checked_device, default_device, known_device
from draftwell.serving.errors import DraftwellError
from draftwell.serving.settings import Settings

Say = Callable[[str], None]
OF_ANY_ENGINE = ("methods", "levels", "max_tokens")
"""Settings of the loop that an engine at an address has, too."""
NEED_A_LAUNCHER = (
    *("levels", "methods", "stop_command", "start_minutes", "engine_draft", "engine_head"),
)
"""Settings of an engine that a command starts."""
MINUTES = 10.0
"""For our own engine, where none are named."""
INVENTED, FEWEST_INVENTED, MOST_INVENTED = 30, 64, 2000
"""Instructions that a target invents for each minute of training a draft, so that answering them
takes about as long again; and their bounds."""


class TuneRequest(Settings, AskedSettings):
    """What is tuned, on which prompts, and how long it may take: `minutes` for everything but
    distilling; None: 10, with vLLM 45."""

    called, error_code = "tuning setting", "bad_tune_setting"

    target: str | None = Field(None, description="folder or hub id of the target")
    draft: str | None = Field(None, description="folder or hub id of the draft")
    pair: str | None = Field(
        None,
        description="name, alias or YAML file of a pair, in place of target and draft; None of all "
        "three takes the shipped pair, but for a launcher or an engine of another machine",
    )
    engine: str = Field("draftwell", description="draftwell, vllm, or the address of an engine")
    distil: float | None = Field(
        None, gt=0, description="minutes to train a draft for a target that has none"
    )
    launcher: str | None = Field(
        None, description="of an engine at an address: the command that starts it, or its file"
    )
    device: str | None = Field(None, description="cpu or cuda; None takes the machine's default")
    more: Mapping[str, Any] = Field(
        default_factory=dict, description="any other setting of the loop (`PipelineSettings`)"
    )

    @model_validator(mode="after")
    def _models_or_pair(self) -> TuneRequest:
        if self.pair is not None and (self.target is not None or self.draft is not None):
            raise DraftwellError(
                "--pair names both models already: leave --target and --draft out, or --pair",
                code="bad_tune_setting",
            )
        if self.draft is not None and self.target is None:
            raise DraftwellError(
                "--draft drafts for a target: name that with --target", code="bad_tune_setting"
            )
        return self

    @model_validator(mode="after")
    def _refuse_what_has_no_effect(self) -> TuneRequest:
        at_address = is_address(self.engine)
        if self.launcher is not None and not at_address:
            raise DraftwellError(
                "--launcher starts an engine at a URL: name that with --engine http://HOST:PORT, "
                "or leave --launcher out",
                code="bad_tune_setting",
            )
        loop, address = set(PipelineSettings.model_fields), set(AddressSettings.model_fields)
        address |= set(OF_ANY_ENGINE)
        others = loop - address if at_address else address - loop
        whom = "--engine draftwell or vllm" if at_address else "--engine URL"
        for name in self.more:
            if name in OF_TRAFFIC:
                whom = "flows on served traffic (`draftwell schedule`)"
            if name in others or name in OF_TRAFFIC:
                raise DraftwellError(
                    f"--set {name} is for {whom}: leave it out", code="bad_tune_setting"
                )
        if at_address:
            self._refuse_at_address()
        return self

    def _refuse_at_address(self) -> None:
        """Refuse what would change nothing of an engine at an address."""
        if self.launcher is not None:
            idle, why = ["plain"], "--launcher starts plain decoding itself: leave it out"
        else:
            idle = list(NEED_A_LAUNCHER)
            why = "leave it out, or name the command that starts the engine with --launcher"
        named = [f"--set {name}" for name in self.more if name in idle]
        if self.launcher is None:
            named += ["--minutes"] if self.minutes is not None else []
            named += ["--fresh"] if self.fresh else []
        if named:
            raise DraftwellError(f"{named[0]} has no effect here: {why}", code="bad_tune_setting")


def tune_models(settings: TuneRequest, say: Say = announce) -> Card:
    """Collect, train, calibrate, tune, judge, register and deploy; a run that was stopped continues
    where it was. `refuse_mistakes` is asked before.

    Returns:
        the card, which is kept with the release, too.
    Raises:
        DraftwellError: what a user must fix, before any work where it can be known then.
    """
    device = device_of(settings)
    pair = pair_for(settings, device, say)
    if is_address(settings.engine):
        return tune_there(settings, Workspace(pair, None, say, device))
    loop = loop_settings(settings, pair, device)
    if loop.restarts:
        check_elsewhere(loop)
    space = Workspace(pair, loop.dtype, say, loop.device)
    say(f"{space.spec.name}: {said_to_fit(space, refuse=not loop.restarts)}")
    result = run_loop(loop)
    made = Card.model_validate(result["card"])
    return with_bundle(made, result["bundle"], loop)


def with_bundle(card: Card, bundle: str | None, loop: PipelineSettings) -> Card:
    """The card with the bundle that was deployed, and the command that finds it."""
    changes = {"bundle": bundle}
    if bundle is not None and loop.out != PipelineSettings.model_fields["out"].default:
        engine = f" --engine {loop.engine}" if loop.restarts else ""
        current = shlex.quote(str(Path(bundle).parent / "current"))
        changes["next_command"] = f"draftwell serve{engine} --bundle {current}"
    return card.model_copy(update=changes)


def refuse_mistakes(settings: TuneRequest) -> None:
    """Refuse settings and prompts that nothing could be tuned with; nothing is written.

    Raises:
        DraftwellError: what is wrong.
    """
    if is_address(settings.engine):
        given, loop = address_of(settings), loop_at_address(settings)
        for url in (settings.engine, given.plain):
            if url is not None:
                given.address(url)
        unnamed = settings.pair is None and settings.target is None
        if unnamed and (settings.launcher is not None or not is_local(settings.engine)):
            raise DraftwellError(
                f"name the model at {settings.engine} with --target or --pair; the shipped one is "
                "--pair default",
                code="bad_tune_setting",
            )
        if settings.launcher is not None:
            given.templates(launcher_text(settings.launcher))
            engine_settings(loop)
        prompts_of(loop)
    else:
        prompts_of(loop_settings(settings, settings.pair or "default", device_of(settings)))


def device_of(settings: TuneRequest) -> str:
    """The device that is tuned on; that of an engine at an address need not be here."""
    if settings.device is None:
        return default_device()
    at_address = is_address(settings.engine)
    return known_device(settings.device) if at_address else checked_device(settings.device)


def pair_for(settings: TuneRequest, device: str, say: Say) -> str:
    """The pair that the models are, after a draft was distilled where that is asked for."""
    if settings.target is None:
        pair = settings.pair or "default"
        if settings.distil is None:
            return pair
        target = pair
    else:
        spec = pair_of_models(settings.target, settings.draft, device, say)
        if settings.distil is None:
            return spec.name
        target = spec.name
    spec = find_pair(target)
    if spec.draft is not None:
        raise DraftwellError(
            f"{spec.name} has a draft: leave --distil out, or --draft", code="bad_tune_setting"
        )
    return distilled(spec, settings, device, say)


def distilled(spec: PairSpec, settings: TuneRequest, device: str, say: Say) -> str:
    """The pair of a target and a draft that is distilled from it, by an earlier run or now."""
    name = f"{spec.name}-distilled"
    known = [one.name for one in list_pairs() if one.name == name]
    if known and not settings.fresh:
        say(f"the draft of an earlier run is taken, pair {name}: --fresh makes another")
        return name
    minutes = settings.distil or 0.0
    wanted = DistilRequest(
        settings.target or settings.pair or spec.name,
        minutes=minutes,
        invented=min(MOST_INVENTED, max(FEWEST_INVENTED, round(INVENTED * minutes))),
        name=name,
        dtype=spec.number_format,
        device=device,
    )
    made = run_distil(wanted, say=say)
    keep_report(made)
    return made.pair.name


def tune_there(settings: TuneRequest, workspace: Workspace) -> Card:
    """The card of an engine at an address."""
    launcher = None if settings.launcher is None else launcher_text(settings.launcher)
    loop = loop_at_address(settings)
    fits = (
        said_to_fit(workspace, refuse=False)
        if is_local(settings.engine)
        else "not looked at, because the engine runs elsewhere"
    )
    shown = None if settings.prompts is None else settings.prompts.name
    asked = Asked(fits, 0.0, loop.engine_minutes, shown)
    return tune_at_address(workspace, settings.engine, launcher, address_of(settings), loop, asked)


def address_of(settings: TuneRequest) -> AddressSettings:
    """How an engine at an address is reached."""
    own = {key: value for key, value in settings.more.items() if key not in OF_ANY_ENGINE}
    return AddressSettings.model_validate(own)


def loop_at_address(settings: TuneRequest) -> PipelineSettings:
    """What is tried of an engine at an address, one request at a time unless `levels` says
    otherwise, and on which prompts."""
    named = {key: settings.more[key] for key in OF_ANY_ENGINE if key in settings.more}
    fixed = {"engine": "vllm", "collect_prompts": 1, "device": device_of(settings), "levels": (1,)}
    return checked_loop(
        {
            **fixed,
            "prompts": settings.prompts,
            "minutes": settings.minutes,
            "fresh": settings.fresh,
            **named,
        }
    )


def loop_settings(settings: TuneRequest, pair: str, device: str) -> PipelineSettings:
    """The settings of the flow.

    Raises:
        DraftwellError: one of `more` is no setting, or has no such value (`bad_setting`).
    """
    given = {
        "pair": pair,
        "prompts": settings.prompts,
        "engine": settings.engine,
        "minutes": settings.minutes or (MINUTES if settings.engine == "draftwell" else None),
        # vLLM's environment may see another device than this one
        "device": settings.device if settings.engine == "vllm" else device,
        "fresh": settings.fresh,
        **settings.more,
    }
    return checked_loop(given)


def checked_loop(given: Mapping[str, Any]) -> PipelineSettings:
    """The settings of the loop, of which those that are None have their defaults.

    Raises:
        DraftwellError: one is no setting, or has no such value (`bad_setting`).
    """
    try:
        return PipelineSettings.model_validate(
            {name: value for name, value in given.items() if value is not None}
        )
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        said = first["msg"].removeprefix("Value error, ")
        if first["type"] == "extra_forbidden":  # its value may be a secret
            line = f"there is no setting {name}"
        else:
            line = f"--set {name}: {said}, not {first['input']!r}" if name else said
        raise DraftwellError(line, code="bad_setting") from error


def check_elsewhere(settings: PipelineSettings) -> None:
    """Refuse now what would be noticed after half an hour."""
    engine_settings(settings)
    if settings.out.is_file() or not settings.out.absolute().parent.is_dir():
        raise DraftwellError(
            f"{settings.out} is not a folder and cannot be created: name another folder",
            code="no_output_folder",
        )
    space_of(settings)


def run_loop(settings: PipelineSettings) -> dict[str, Any]:
    """The outcome of the flow with these settings."""
    settle_prefect()  # before Prefect is imported
    # a mistake is reported here, in one line
    find_pair(settings.pair)
    prompts_of(settings)
    announce("starting Prefect (about 10 s)")
    from draftwell.flows.orchestration.loop_flow import draftwell

    with reaching_prefect():
        return draftwell(settings)
