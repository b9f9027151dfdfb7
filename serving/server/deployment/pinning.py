"""Tying an HTTP request to one deployment, so that one version gives its whole answer."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar, Token
from typing import Any

_pin: ContextVar[RequestPin | None] = ContextVar("pin", default=None)


class RequestPin:
    """Ties one HTTP request to a deployment, from its first use of it until its tickets are with
    the scheduler.

    Args:
        take: gives the newest deployment and counts the request as one of its users.
        give_back: ends that.
    """

    def __init__(self, take: Callable[[], Any], give_back: Callable[[Any], None]):
        self._take, self._give_back = take, give_back
        self._deployment: Any = None
        self._held = False

    @property
    def deployment(self) -> Any:
        """The deployment that was the newest at the first call; the same at every later one."""
        if self._deployment is None:
            self._deployment, self._held = self._take(), True
        return self._deployment

    def release(self) -> None:
        """The request submits nothing more; what it has submitted is finished without the pin."""
        if self._held:
            self._held = False
            self._give_back(self._deployment)

    def enter(self) -> Token[RequestPin | None]:
        """Make this the pin of the running request."""
        return _pin.set(self)

    def leave(self, token: Token[RequestPin | None]) -> None:
        """End that, and release the deployment."""
        _pin.reset(token)
        self.release()


def current_pin() -> RequestPin | None:
    """The pin of the HTTP request that is being handled; None elsewhere."""
    return _pin.get()
