"""An engine in a process of its own, which decodes when asked and is stopped at all other times.

This process and the driver exchange one JSON object per line over the driver's stdin and stdout
(`drivers/peer_protocol.py` is the other side): first the settings and what the engine says about
itself, then one request and one answer per group of prompts. Between requests the driver's
processes are stopped (SIGSTOP), because threads of OpenMP and of vLLM keep a core busy for a while
after they have computed.
"""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from draftwell.components.engines.failures import one_line
from draftwell.components.engines.port import About, Decoded, EngineSettings
from draftwell.components.engines.process_group import (
    START_SECONDS,
    ProcessGroup,
    engine_environment,
)
from draftwell.serving.errors import DraftwellError
from draftwell.serving.runtime.requests import Sampling

ANSWER_SECONDS = 600.0
SAMPLED = ("max_tokens", "temperature", "top_k", "top_p", "seed", "logprobs")
"""Fields of `Sampling` that drivers read as they are."""

M = TypeVar("M", bound=BaseModel)


class EngineProcess:
    """A driver, started in the interpreter of an engine's environment (an `Engine`).

    Args:
        label: names it in errors, such as `vllm/ngram`.
        command: interpreter and script.
        log: file for all that it prints besides its answers; each start begins a new one.
        threads: how many it computes with (`OMP_NUM_THREADS`, and in the settings).
        fixed: settings of the driver that are the same at every start, such as the model.
    Raises:
        DraftwellError: (of every method) it ended (`engine_failed`, `engine_killed`, or what
            `failures.why_ended` finds), gave no answer in time (`engine_timeout`), answered
            with something else than the protocol's JSON (`engine_bad_answer`), or does not run
            (`engine_not_started`).
    """

    def __init__(
        self,
        label: str,
        command: Sequence[str],
        log: Path,
        *,
        threads: int,
        fixed: Mapping[str, Any] | None = None,
    ):
        self.label, self.command, self.log, self.threads = label, list(command), log, threads
        self.fixed = dict(fixed or {})
        self.variables: dict[str, str] = {}
        """Of the driver's environment, besides those of `engine_environment`."""
        self._group: ProcessGroup | None = None

    @property
    def pid(self) -> int:
        """Process id of the driver, which leads a process group of its own."""
        return self._running().pid

    def start(self, settings: EngineSettings) -> About:
        """Let the driver load its model; afterwards it is stopped. One that runs is ended first."""
        self.stop()
        env = {**engine_environment(self.threads), **self.variables}
        self._group = ProcessGroup(self.label, self.command, self.log, env=env, piped=True)
        request = {**self.fixed, **settings.model_dump(), "threads": self.threads}
        try:
            return self._ask(request, About, START_SECONDS)
        except BaseException:
            self.stop()
            raise

    def decode(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> Decoded:
        """Decode prompts that are sent at once; at the end of text the stop token is the last
        one."""
        found = self._ask(request_of(prompts, sampling), Decoded, ANSWER_SECONDS)
        if len(found.answers) != len(prompts):
            raise DraftwellError(
                f"{self.label} gave {len(found.answers)} answers to {len(prompts)} prompts: run "
                "`make peers` to have the library of this version",
                code="engine_bad_answer",
            )
        return found

    def stop(self) -> None:
        """End the driver with all processes that it has started."""
        group, self._group = self._group, None
        if group is not None:
            group.end()

    def _running(self) -> ProcessGroup:
        if self._group is None:
            raise DraftwellError(
                f"{self.label} does not run: start it first", code="engine_not_started"
            )
        return self._group

    def _ask(self, request: Mapping[str, Any], kind: type[M], seconds: float) -> M:
        group, late = self._running(), threading.Event()

        def give_up() -> None:
            late.set()
            group.signal(signal.SIGKILL)  # which ends writing and reading below

        timer = threading.Timer(seconds, give_up)
        timer.start()
        group.signal(signal.SIGCONT)
        try:
            line = group.exchange(json.dumps(request).encode() + b"\n")
        finally:
            timer.cancel()
        if late.is_set():
            raise DraftwellError(
                f"{self.label} gave no answer within {seconds:g} s: see {self.log}",
                code="engine_timeout",
            )
        if not line.endswith(b"\n"):
            raise group.why_ended("engine_failed")
        group.signal(signal.SIGSTOP)
        return self._answer(line, kind)

    def _answer(self, line: bytes, kind: type[M]) -> M:
        try:
            return kind.model_validate_json(line)
        except ValidationError as error:
            what = one_line(str(error))
        raise DraftwellError(
            f"{self.label} answered {one_line(line.decode(errors='replace'))!r} ({what}): run "
            "`make peers` to have the library of this version",
            code="engine_bad_answer",
        )


def request_of(prompts: Sequence[Sequence[int]], sampling: Sampling) -> dict[str, Any]:
    """A request as drivers read it.

    Raises:
        DraftwellError: what drivers do not know: banned tokens, penalties, biases
            (`engine_sampling`).
    """
    if sampling.banned_token_ids or sampling.penalises or sampling.biases:
        raise DraftwellError(
            "engines in processes of their own know no banned tokens, penalties or biases here: "
            "leave them out",
            code="engine_sampling",
        )
    return {
        "prompts": [list(ids) for ids in prompts],
        "stop_token_ids": sorted(sampling.stop_token_ids),
        **{name: getattr(sampling, name) for name in SAMPLED},
    }
