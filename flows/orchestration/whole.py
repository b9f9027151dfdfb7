"""Everything that `draftwell tune` does: from two models, or a pair, and prompts to a release that
is served, and a card that says what it gains."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from draftwell.components.card.card import Card
from draftwell.flows.failures import reaching_prefect
from draftwell.flows.loading import prompts_of
from draftwell.flows.progress import announce, settle_prefect
from draftwell.flows.settings import PipelineSettings
from draftwell.flows.steps.fits import said_to_fit
from draftwell.flows.steps.own_pair import pair_of_models
from draftwell.flows.workspace import Workspace
from draftwell.registry.pairs import find_pair
from draftwell.serving.device import checked_device, default_device
from draftwell.serving.errors import DraftwellError
from draftwell.serving.settings import Settings

Say = Callable[[str], None]
MINUTES = 10.0
"""For our own engine, where none are named."""


class TuneModelsSettings(Settings):
    """What is tuned, on which prompts, and how long it may take."""

    called, error_code = "tuning setting", "bad_tune_setting"

    target: str | None = Field(None, description="folder or hub id of the target")
    draft: str | None = Field(None, description="folder or hub id of the draft")
    pair: str | None = Field(
        None,
        description="name, alias or YAML file of a pair, in place of target and draft; None of all "
        "three takes the shipped pair",
    )
    prompts: Path | None = Field(
        None, description="file or folder of prompts; None takes the shipped ones"
    )
    engine: str = Field("draftwell", description="draftwell, vllm, or the address of an engine")
    minutes: float | None = Field(
        None, gt=0, description="for everything but distilling; None: 10, with vllm 45"
    )
    distil: float | None = Field(
        None, gt=0, description="minutes to train a draft for a target that has none"
    )
    launcher: str | None = Field(
        None, description="of an engine at an address: the command that starts it, or its file"
    )
    device: str | None = Field(None, description="cpu or cuda; None takes the machine's default")
    fresh: bool = Field(False, description="begin again, instead of where a run was stopped")
    more: Mapping[str, Any] = Field(
        default_factory=dict, description="any other setting of the loop (`PipelineSettings`)"
    )

    @model_validator(mode="after")
    def _models_or_pair(self) -> TuneModelsSettings:
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


def tune_models(settings: TuneModelsSettings, say: Say = announce) -> Card:
    """Collect, train, calibrate, tune, judge, register and deploy; a run that was stopped continues
    where it was.

    Returns:
        the card, which is kept with the release, too.
    Raises:
        DraftwellError: what a user must mend, before any work where it can be known then.
    """
    loop = loop_settings(settings, say)
    space = Workspace(loop.pair, loop.dtype, say, loop.device)
    say(f"{space.spec.name}: {said_to_fit(space, refuse=not loop.restarts)}")
    result = run_loop(loop)
    made = Card.model_validate(result["card"])
    return made.model_copy(update={"bundle": result["bundle"]})


def loop_settings(settings: TuneModelsSettings, say: Say) -> PipelineSettings:
    """The settings of the flow, with the pair that the models are."""
    device = checked_device(settings.device) if settings.device else default_device()
    pair = settings.pair or "default"
    if settings.target is not None:
        pair = pair_of_models(settings.target, settings.draft, device, say).name
    given = {
        "pair": pair,
        "prompts": settings.prompts,
        "engine": settings.engine,
        "minutes": settings.minutes or (MINUTES if settings.engine == "draftwell" else None),
        "device": device,
        "fresh": settings.fresh,
        **settings.more,
    }
    return PipelineSettings.model_validate(
        {name: value for name, value in given.items() if value is not None}
    )


def run_loop(settings: PipelineSettings) -> dict[str, Any]:
    """The outcome of the flow with these settings."""
    settle_prefect()  # before Prefect is imported
    # a user's mistake is reported here, in one line
    find_pair(settings.pair)
    prompts_of(settings)
    announce("starting Prefect (about 10 s)")
    from draftwell.flows.orchestration.loop_flow import draftwell

    with reaching_prefect():
        return draftwell(settings)
