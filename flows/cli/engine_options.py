"""Which options mean something on which engine, by what an engine declares that it can do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import typer
from pydantic import BaseModel

from draftwell.components.engines.port import CAPABILITIES
from draftwell.serving.errors import DraftwellError

Model = TypeVar("Model", bound=BaseModel)

NEEDED: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "traces": {
        "collect": ("turns", "rollout", "kinds", "runner", "workers"),
        "tune": ("traces",),
        "gate": ("baseline", "record", "unmeasured"),
        "demo": ("sampled_temperature",),
        "monitor": ("reference", "report"),
    },
    "replay": {
        "tune": (
            "trials",
            "lossless_only",
            "max_quality_loss",
            "max_cost_ratio",
            "study",
            "pad_target",
            "runner",
            "workers",
        ),
        "bench": (
            "max_prompt_tokens",
            "runs",
            "draft_device",
            "pad_target",
            "peer",
            "settings",
            "artifacts",
            "check_cpu",
            "markdown",
            "plots",
        ),
    },
    "restart": {
        "collect": ("method", "logprobs"),
        "tune": ("methods", "levels", "fresh"),
        "demo": (
            "minutes",
            "methods",
            "levels",
            "max_tokens",
            "tune_prompts",
            "train_minutes",
            "serve_seconds",
            "port",
            "out",
            "grid",
            "fresh",
        ),
        "deploy": ("dtype", "temperature", "options", "swap", "swap_prompts"),
        "monitor": (
            "recalibrate",
            "prompts",
            "restart",
            "minutes",
            "methods",
            "levels",
            "threads",
            "fresh",
        ),
        "gate": ("sampled",),
        "promote": ("sampled",),
        "rollback": ("sampled",),
    },
}
"""Capability of an engine → command → options that mean nothing without it."""


def named(context: typer.Context, option: str) -> bool:
    """Whether an option was named on the command line."""
    source = context.get_parameter_source(option)
    return source is not None and source.name == "COMMANDLINE"


def on_other_engine(context: typer.Context) -> bool:
    """Whether another engine than ours is asked for.

    Raises:
        DraftwellError: an option was named that the engine lacks what it needs for
            (`engine_option`).
    """
    engine, command = str(context.params["engine"]), str(context.command.name)
    able = CAPABILITIES[engine]
    lacking = {
        option
        for capability, commands in NEEDED.items()
        if not getattr(able, capability)
        for option in commands.get(command, ())
    }
    for option in context.command.params:
        if option.name in lacking and named(context, option.name):
            raise DraftwellError(
                f"{option.opts[0]} means nothing with --engine {engine}: leave it out",
                code="engine_option",
            )
    return engine != "draftwell"


def settings_of(context: typer.Context, model: type[Model], **more: Any) -> Model:
    """The options that were named as settings, by the names of the settings; all others keep the
    settings' defaults."""
    given = {
        name: value
        for name, value in context.params.items()
        if name in model.model_fields and named(context, name)
    }
    return model.model_validate({**given, **more})
