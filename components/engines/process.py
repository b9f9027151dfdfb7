"""An engine in a process of its own, which decodes when asked and is stopped at all other times.

This process and the driver exchange one JSON object per line over the driver's stdin and stdout
(`drivers/peer_protocol.py` is the other side): first the settings and what the engine says about
itself, then one request and one answer per group of prompts. Between requests the driver's
processes are stopped (SIGSTOP), because threads of OpenMP and of vLLM keep a core busy for a while
after they have computed.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from draftwell.components.engines.failures import one_line, why_ended
from draftwell.components.engines.port import About, Decoded, EngineSettings
from draftwell.serving.errors import DraftwellError
from draftwell.serving.runtime.requests import Sampling

START_SECONDS = 1800.0
"""vLLM compiles for minutes when it starts for the first time."""
ANSWER_SECONDS = 600.0
END_SECONDS = 10.0
FOREIGN = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "LD_PRELOAD", "TORCHINDUCTOR_CACHE_DIR")
"""Variables of this process's environment that another interpreter must not see; PyTorch sets the
last one in this process."""

M = TypeVar("M", bound=BaseModel)


class EngineProcess:
    """A driver, started in the interpreter of an engine's environment (an `Engine`).

    Args:
        label: names it in errors, such as `vllm/ngram`.
        command: interpreter and script.
        log: file for all that it prints besides its answers; each start begins a new one.
        threads: how many it computes with (`OMP_NUM_THREADS`, and in the settings).
        fixed: settings of the driver that are the same at every start, such as the model.
        start_seconds, answer_seconds: within which it must be ready, and answer.
    Raises:
        DraftwellError: (of every method) it ended (`engine_failed`, `engine_killed`, or what
            `failures.KNOWN` makes of its log), gave no answer in time (`engine_timeout`), answered
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
        start_seconds: float = START_SECONDS,
        answer_seconds: float = ANSWER_SECONDS,
    ):
        self.label, self.command, self.log, self.threads = label, list(command), log, threads
        self.fixed, self.start_seconds, self.answer_seconds = (
            dict(fixed or {}),
            start_seconds,
            answer_seconds,
        )
        self._process: subprocess.Popen[bytes] | None = None
        self.variables: dict[str, str] = {}
        """Of the driver's environment, besides those of `engine_environment`."""
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._reader: threading.Thread | None = None
        self._writer: threading.Thread | None = None

    @property
    def pid(self) -> int:
        """Process id of the driver, which leads a process group of its own."""
        return self._running().pid

    def start(self, settings: EngineSettings) -> About:
        """Let the driver load its model; afterwards it is stopped. One that runs is ended first."""
        self.stop()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        # A group, which can be stopped, but no session: Linux shares a busy machine among sessions,
        # so its own would favour it.
        with self.log.open("wb") as errors:
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**engine_environment(self.threads), **self.variables},
                process_group=0,
            )
        self._lines = queue.SimpleQueue()
        self._reader = threading.Thread(
            target=self._read, args=(self._process, self._lines), daemon=True
        )
        self._reader.start()
        try:
            return self._ask(
                {**self.fixed, **settings.model_dump(), "threads": self.threads},
                About,
                self.start_seconds,
            )
        except BaseException:
            self.stop()
            raise

    def decode(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> Decoded:
        """Decode prompts that are sent at once; at the end of text the stop token is the last
        one."""
        found = self._ask(request_of(prompts, sampling), Decoded, self.answer_seconds)
        if len(found.answers) != len(prompts):
            raise DraftwellError(
                f"{self.label} gave {len(found.answers)} answers to {len(prompts)} "
                "prompts: run `make peers` to have the "
                "library of this version",
                code="engine_bad_answer",
            )
        return found

    def stop(self) -> None:
        """End the driver: by the end of its input, else by force, with all processes that it has
        started."""
        if self._process is None:
            return
        process, self._process = self._process, None
        assert process.stdin is not None
        assert process.stdout is not None
        # it reads no more: to close its input would wait for what is being written
        if self._writes():
            signal_group(process, signal.SIGKILL)
            assert self._writer is not None
            self._writer.join(END_SECONDS)
        signal_group(process, signal.SIGCONT)
        if not self._writes():
            with contextlib.suppress(OSError):
                process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)
        signal_group(process, signal.SIGKILL)
        process.wait()
        if self._reader is not None:
            # a process that left the group may still hold the other end
            self._reader.join(END_SECONDS)
        process.stdout.close()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise DraftwellError(
                f"{self.label} does not run: start it first", code="engine_not_started"
            )
        return self._process

    def _ask(self, request: Mapping[str, Any], kind: type[M], seconds: float) -> M:
        process, deadline = self._running(), time.monotonic() + seconds
        signal_group(process, signal.SIGCONT)
        try:
            self._write(process, json.dumps(request).encode() + b"\n", seconds)
            line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
        except OSError as error:
            raise self._ended(process) from error
        except queue.Empty as error:
            signal_group(process, signal.SIGKILL)
            raise DraftwellError(
                (
                    f"{self.label} gave no answer within {seconds:g} s: see {self.log}, or "
                    "leave it out"
                ),
                code="engine_timeout",
            ) from error
        if line is None:
            raise self._ended(process)
        signal_group(process, signal.SIGSTOP)
        return self._read_answer(line, kind)

    def _write(self, process: subprocess.Popen[bytes], data: bytes, seconds: float) -> None:
        """Write a request in a thread: a driver that hangs reads nothing, and a pipe takes 64 KiB
        only.

        Raises:
            queue.Empty: it has not read all of it in time.
            OSError: it has ended.
        """
        failed: queue.SimpleQueue[OSError | None] = queue.SimpleQueue()

        def write() -> None:
            assert process.stdin is not None
            try:
                process.stdin.write(data)
                process.stdin.flush()
                failed.put(None)
            except OSError as error:
                failed.put(error)

        self._writer = threading.Thread(target=write, daemon=True)
        self._writer.start()
        error = failed.get(timeout=seconds)
        if error is not None:
            raise error
        self._writer.join()

    def _writes(self) -> bool:
        return self._writer is not None and self._writer.is_alive()

    def _read_answer(self, line: bytes, kind: type[M]) -> M:
        try:
            return kind.model_validate_json(line)
        except ValidationError as error:
            first = error.errors()[0]
            what = f"{'.'.join(map(str, first['loc'])) or 'the whole'}: {first['msg']}"
        what = "not JSON" if "JSON" in what else what
        shown = one_line(line.decode(errors="replace"))
        raise DraftwellError(
            (
                f"{self.label} answered {shown!r} ({what}): run `make peers` to have the "
                "library of this version"
            ),
            code="engine_bad_answer",
        )

    def _ended(self, process: subprocess.Popen[bytes]) -> DraftwellError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)
        return why_ended(self.label, self.log, process.poll())

    @staticmethod
    def _read(process: subprocess.Popen[bytes], lines: queue.SimpleQueue[bytes | None]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line)
        lines.put(None)


def request_of(prompts: Sequence[Sequence[int]], sampling: Sampling) -> dict[str, Any]:
    """A request as drivers read it.

    Raises:
        DraftwellError: what drivers do not know: banned tokens, penalties, biases
            (`engine_sampling`).
    """
    if sampling.banned_token_ids or sampling.penalises or sampling.biases:
        raise DraftwellError(
            (
                "engines in processes of their own know no banned tokens, penalties or biases "
                "here: leave them out"
            ),
            code="engine_sampling",
        )
    return {
        "prompts": [list(ids) for ids in prompts],
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "seed": sampling.seed,
        "logprobs": sampling.logprobs,
        "stop_token_ids": sorted(sampling.stop_token_ids),
    }


def signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Send a signal to a process and to all in its group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def engine_environment(threads: int) -> dict[str, str]:
    """Variables of a process in another interpreter: nothing of this one's Python, no network, so
    many threads."""
    kept = {name: value for name, value in os.environ.items() if name not in FOREIGN}
    return {
        **kept,
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "DO_NOT_TRACK": "1",
        "OMP_NUM_THREADS": str(threads),
    }
