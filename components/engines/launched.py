"""An engine that a launcher starts, behind the port."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from draftwell.components.engines.launch_template import Options
from draftwell.components.engines.launcher import Launcher, Running
from draftwell.components.engines.port import About, Decoded, EngineSettings
from draftwell.components.engines.remote.remote import RemoteEngine
from draftwell.serving.errors import DraftwellError
from draftwell.serving.runtime.requests import Sampling

WARMUP_TOKENS = 8
"""That an engine decodes, unmeasured, after it had to be started in the middle of a measurement."""


class LaunchedEngine:
    """An engine by a launcher (an `Engine`). Slots and context are those of its command.

    Where another one had to end for it and it is asked again, it is started again.

    Args:
        label: names it in errors and its log.
        options_of: `EngineSettings.speculation` → the engine's options.
    Raises:
        DraftwellError: (of every method) what `Launcher` and `RemoteEngine` raise; where its
            command has ended, why.
    """

    def __init__(
        self,
        label: str,
        launcher: Launcher,
        options_of: Callable[[Mapping[str, Any] | None], Options],
    ):
        self.label, self.launcher, self.options_of = label, launcher, options_of
        self._settings: EngineSettings | None = None
        self._options: Options = {}
        self._running: Running | None = None
        self._remote: RemoteEngine | None = None

    @property
    def remote(self) -> RemoteEngine:
        """What asks it, once it was started."""
        if self._remote is None:
            raise DraftwellError(
                f"{self.label} does not run: start it first", code="engine_not_started"
            )
        return self._remote

    def start(self, settings: EngineSettings) -> About:
        """Start it, unless one with these options runs; afterwards it rests."""
        self._options, self._settings = self.options_of(settings.speculation), settings
        running = self.launcher.start(self.label, self._options)
        about = self._connect(running)
        self.launcher.rest(running)
        return about

    def decode(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> Decoded:
        """Decode prompts that are sent at once."""
        _ = self.remote
        running = self.launcher.start(self.label, self._options)
        if running is not self._running:  # it had ended for another one
            self._connect(running)
            self._asked(prompts, replace(sampling, max_tokens=WARMUP_TOKENS, logprobs=None))
        found = self._asked(prompts, sampling)
        self.launcher.rest(running)
        return found

    def _asked(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> Decoded:
        try:
            return self.remote.decode(prompts, sampling)
        except DraftwellError as error:
            if (ended := self.launcher.why_ended(self._options)) is not None:
                raise ended from error
            raise

    def _connect(self, running: Running) -> About:
        assert self._settings is not None
        self.disconnect()
        self._running = running
        self._remote = RemoteEngine(self.label, running.address, launched=True)
        return self._remote.start(self._settings)

    def disconnect(self) -> None:
        """Close the connections; it runs on."""
        remote, self._remote, self._running = self._remote, None, None
        if remote is not None:
            remote.stop()

    def stop(self) -> None:
        """End it."""
        if self._remote is not None:
            self.disconnect()
            self.launcher.end(self._options)
