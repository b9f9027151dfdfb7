"""Which options mean something on which engine, by what an engine declares that it can do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import typer
from pydantic import BaseModel

from draftwell.components.engines.port import capabilities
from draftwell.components.engines.remote.address import is_address
from draftwell.flows.cli.settings_option import FILE, WORDS, named, names_of, spelled
from draftwell.serving.errors import DraftwellError

Model = TypeVar("Model", bound=BaseModel)

NEEDED: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "traces": {
        "step collect": ("turns", "rollout", "prefix_kinds", "runner", "workers"),
        "step choose": ("traces",),
        "gate": ("counts_only", "record_counts", "unmeasured"),
        "monitor": ("reference", "out"),
    },
    "replay": {
        "step choose": (
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
            "exactness",
            "max_prompt_tokens",
            "runs",
            "draft_device",
            "pad_target",
            "peers",
            "parameters",
            "artifacts",
            "check_cpu",
        ),
    },
    "restart": {
        "step collect": ("method", "logprobs"),
        "step choose": ("methods", "levels", "fresh", "schedule"),
        "deploy": ("dtype", "temperature", "serving", "swap", "swap_prompts"),
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
        "release promote": ("sampled",),
        "release rollback": ("sampled",),
    },
}
"""Capability of an engine → command → options that mean nothing without it."""
AT_ADDRESS: Mapping[str, tuple[str, ...]] = {
    "bench": ("limit", "mix", "max_tokens", "temperature", "seed", "concurrency", "out", "as_json"),
    "step collect": (
        *("limit", "max_tokens", "split", "column", "redact", "temperature", "top_p", "seed"),
        *("out", "fresh", "logprobs", "concurrency"),
    ),
    "step choose": (
        *("limit", "max_tokens", "split", "column", "redact", "temperature", "publish"),
        *("methods", "levels", "fresh"),
    ),
    "gate": (*("limit", "max_tokens", "dry_run", "report", "release", "sampled"),),
    "monitor": ("limits", "as_json"),
}
"""Command → its options that mean something with an engine at an address."""
FEWEST_AT_ONCE = 2
REMOTE = ("engine_key_file", "engine_header", "engine_ca", "engine_model", "plain")
"""Options that mean something with an engine at an address alone."""
ADDRESS_ALONE: Mapping[str, tuple[str, ...]] = {
    "step collect": ("concurrency",),
    "step choose": (
        *("launcher", "stop_command", "start_minutes", "engine_draft", "engine_head"),
        *("minutes", "grid"),
    ),
    "gate": (
        *("launcher", "stop_command", "start_minutes", "engine_draft", "engine_head"),
        "levels",
    ),
    "monitor": ("every", "baseline", "probes_per_hour", "metrics_file"),
}
"""Command → options that mean something with an engine at an address alone, besides `REMOTE`."""
ALWAYS = ("engine", "pair", "prompts", "dtype", "device", WORDS, FILE, *REMOTE)


def on_other_engine(context: typer.Context) -> bool:
    """Whether another engine than ours is asked for.

    Raises:
        DraftwellError: an option was named that the engine lacks what it needs for
            (`engine_option`).
    """
    engine, command = str(context.params["engine"]), str(context.command.name)
    names = names_of(context.command)
    means = set(names) - options_lacking(engine, command, names)
    refuse_beside(context, f"--engine {engine}", tuple(means), "engine_option")
    return engine != "draftwell"


def refuse_beside(context: typer.Context, main: str, beside: Sequence[str], code: str) -> None:
    """Refuse, with a code, every option that was named and is none of those that mean something
    beside the `main` one."""
    for name in names_of(context.command):
        if name not in beside and named(context, name):
            raise DraftwellError(
                f"{spelled(context, name)} means nothing with {main}: leave it out", code=code
            )


def at_address(context: typer.Context) -> bool:
    """Whether the engine that is asked for is at an address."""
    return is_address(str(context.params["engine"]))


def take_one_level(context: typer.Context) -> None:
    """Read concurrency as one number from 2, as engines that this project starts take it.

    Raises:
        DraftwellError: it names several, or 1 (`engine_option`).
    """
    levels = context.params["concurrency"]
    if levels is None:
        return
    if len(levels) != 1 or levels[0] < FEWEST_AT_ONCE:
        raise DraftwellError(
            "--set concurrency takes one number from 2 here, beside one request at a time; several "
            "numbers are for our own engine and for one at an address",
            code="engine_option",
        )
    [context.params["concurrency"]] = levels


def options_lacking(engine: str, command: str, options: Sequence[str]) -> set[str]:
    """Options of a command that mean nothing with an engine.

    Raises:
        DraftwellError: the command asks no engine at an address (`engine_option`).
    """
    if not is_address(engine):
        able = capabilities(engine)
        return {*REMOTE, *ADDRESS_ALONE.get(command, ())}.union(
            *(
                commands.get(command, ())
                for capability, commands in NEEDED.items()
                if not getattr(able, capability)
            )
        )
    if command not in AT_ADDRESS:
        raise DraftwellError(
            f"draftwell {command} asks no engine at an address: name draftwell or vllm with "
            f"--engine; {', '.join(AT_ADDRESS)} take a URL",
            code="engine_option",
        )
    return set(options) - {*AT_ADDRESS[command], *ADDRESS_ALONE.get(command, ()), *ALWAYS}


def settings_of(
    context: typer.Context, model: type[Model], *, but: Sequence[str] = (), **more: Any
) -> Model:
    """The options and settings that were named, by the names of the model's fields; all others keep
    its defaults.

    Args:
        but: fields that mean something else in the command.
    """
    given = {
        name: value
        for name, value in context.params.items()
        if name in model.model_fields and name not in but and named(context, name)
    }
    return model.model_validate({**given, **more})
