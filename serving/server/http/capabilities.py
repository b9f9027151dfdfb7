"""What a request may choose: a strategy that the server offers and, with --allow-parameters, the
strategy's parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from fastapi import APIRouter, Request

from draftwell.serving.errors import DraftwellError
from draftwell.serving.runtime.strategies import Strategy, build_strategy, describe
from draftwell.serving.server.http.errors import APIError
from draftwell.serving.server.http.security import tenant_of
from draftwell.serving.server.model.served_model import ServedModel


def with_parameters(
    strategy: Strategy, parameters: Mapping[str, Any], *, allowed: bool
) -> Strategy:
    """A strategy with some of its parameters changed, over the same artifacts and online state.

    Raises:
        APIError: 403 if the server does not allow it, 400 for an unknown parameter or a value out
            of bounds.
    """
    if not allowed:
        raise APIError(
            403,
            (
                "this server does not let requests change parameters: leave them out, or start "
                "it with --allow-parameters"
            ),
            param="speculation.parameters",
            code="parameters_not_allowed",
        )
    if refused := [name for name in strategy.bench_only if name in parameters]:
        raise APIError(
            400,
            f"{refused[0]} is for benches, whose state nobody keeps: leave it out",
            param="speculation.parameters",
            code="invalid_parameters",
        )
    try:
        return build_strategy(
            strategy.name, {**strategy.config.model_dump(), **parameters}, strategy.resources
        )
    except DraftwellError as error:
        raise APIError(
            400, str(error), param="speculation.parameters", code="invalid_parameters"
        ) from error


def offer_of(
    served: ServedModel, tenant: str | None = None, *, allow_parameters: bool = False
) -> dict[str, Any]:
    """Model, longest context, and every strategy with its parameters: their bounds, and the values
    that it runs with at temperature 0.

    `tuned` names the strategies that requests get which name none, by class of temperature;
    `default` is that of greedy ones.
    """
    strategies = [
        described(served.strategies.get(name, tenant)) for name in served.strategies.names()
    ]
    return {
        "model": served.name,
        "default": served.strategy.name,
        "tuned": served.tuned,
        "max_context": served.max_context,
        "allow_parameters": allow_parameters,
        "strategies": strategies,
    }


def described(strategy: Strategy) -> dict[str, Any]:
    """A strategy as plain JSON; an infinite value (no bound) is null."""
    facts = describe(type(strategy))
    for name, parameter in facts["parameters"].items():
        value = getattr(strategy.config, name)
        parameter["value"] = (
            None if isinstance(value, float) and not math.isfinite(value) else value
        )
    return {key: facts[key] for key in ("name", "lossless", "paper", "parameters")}


def offers_router(current: Callable[[], ServedModel], *, allow_parameters: bool) -> APIRouter:
    """`GET /v1/speculation`.

    Args:
        current: gives the model that serves now.
    """
    router = APIRouter()

    @router.get("/v1/speculation")
    def speculation(request: Request) -> dict[str, Any]:
        """The strategies that a request may ask for in `speculation.strategy`, with their
        parameters."""
        return offer_of(current(), tenant_of(request), allow_parameters=allow_parameters)

    return router
