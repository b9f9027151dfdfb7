"""A peer in a process of its own, which decodes when asked and is stopped at all other times.

Bench and driver exchange one JSON object per line over the driver's stdin and stdout (`drivers/peer_protocol.py` is the other side):
first the settings and what the peer says about itself, then one request and one answer per prompt. Between requests the driver's
processes are stopped (SIGSTOP), because threads of OpenMP and of vLLM keep a core busy for a while after they have computed.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from serving.errors import DraftwellError

START_SECONDS = 1800.0
"""vLLM compiles for minutes when it starts for the first time."""
ANSWER_SECONDS = 600.0
END_SECONDS = 10.0
FOREIGN = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "LD_PRELOAD")
"""Variables of this process's environment that another interpreter must not see."""

M = TypeVar("M", bound=BaseModel)


class Message(BaseModel):
    """An answer of a driver."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class About(Message):
    """What a peer says about itself when it is ready."""

    version: str = Field(description="of the library, and of what it computes with")
    notes: tuple[str, ...] = Field((), strict=False, description="how it was run, for readers of its row")


class Answer(Message):
    """One decoded prompt; the clock is the driver's, so that the pipe is not measured."""

    tokens: list[int]
    seconds: float = Field(gt=0, description="the whole request, the prompt's forward pass included")
    first_token_seconds: float = Field(ge=0)


class PeerProcess:
    """A driver, started in a peer's interpreter.

    Args:
        label: of the contender, such as `vllm/ngram`.
        command: interpreter and script.
        log: file for all that it prints besides its answers.
        threads: how many it computes with (`OMP_NUM_THREADS`, and in the settings).
        answer_seconds: within which an answer must come.
    Raises:
        DraftwellError: (of every method) it ended (`peer_failed`), gave no answer in time (`peer_timeout`), or
            answered with something else than the protocol's JSON (`peer_bad_answer`).
    """

    def __init__(self, label: str, command: Sequence[str], log: Path, *, threads: int, answer_seconds: float = ANSWER_SECONDS):
        self.label, self.log, self.threads, self.answer_seconds = label, log, threads, answer_seconds
        log.parent.mkdir(parents=True, exist_ok=True)
        # A group, which can be stopped, but no session: Linux shares a busy machine among sessions, so its own would favour the peer.
        with log.open("wb") as errors:
            self._process = subprocess.Popen(list(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
                                             env=peer_environment(threads), process_group=0)
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """Process id of the driver, which leads a process group of its own."""
        return self._process.pid

    def start(self, settings: Mapping[str, Any], seconds: float = START_SECONDS) -> About:
        """Let the driver load its model; afterwards it is stopped."""
        return self._ask({**settings, "threads": self.threads}, About, seconds)

    def decode(self, ids: Sequence[int], max_tokens: int, stop_token_ids: Sequence[int]) -> Answer:
        """Decode one prompt greedily; at the end of text the stop token is the last one."""
        request = {"prompt_ids": list(ids), "max_tokens": max_tokens, "stop_token_ids": list(stop_token_ids)}
        return self._ask(request, Answer, self.answer_seconds)

    def close(self) -> None:
        """End the driver: by the end of its input, else by force, with all processes that it has started."""
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._reader.join(END_SECONDS)  # a process that left the group may still hold the other end
        self._process.stdout.close()

    def _ask(self, request: Mapping[str, Any], kind: type[M], seconds: float) -> M:
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise self._ended() from error
        try:
            line = self._lines.get(timeout=seconds)
        except queue.Empty as error:
            self._signal(signal.SIGKILL)
            raise DraftwellError(f"the peer {self.label} gave no answer within {seconds:g} s: see {self.log}, or leave it out",
                                 code="peer_timeout") from error
        if line is None:
            raise self._ended()
        self._signal(signal.SIGSTOP)
        return self._read_answer(line, kind)

    def _read_answer(self, line: bytes, kind: type[M]) -> M:
        try:
            return kind.model_validate(json.loads(line))
        except ValidationError as error:
            first = error.errors()[0]
            what = f"{'.'.join(map(str, first['loc'])) or 'the whole'}: {first['msg']}"
        except ValueError:
            what = "not JSON"
        shown = one_line(line.decode(errors="replace"))
        raise DraftwellError(f"the peer {self.label} answered {shown!r} ({what}): run `make peers` to have the library of this version",
                             code="peer_bad_answer")

    def _ended(self) -> DraftwellError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)
        return DraftwellError(f"the peer {self.label} ended with exit code {self._process.poll()} ({last_line(self.log)}): "
                              f"see {self.log}, or leave it out", code="peer_failed")

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


def peer_environment(threads: int) -> dict[str, str]:
    """Variables of a process in a peer's interpreter: nothing of this one's Python, no network, so many threads."""
    kept = {name: value for name, value in os.environ.items() if name not in FOREIGN}
    return {**kept, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "DO_NOT_TRACK": "1", "OMP_NUM_THREADS": str(threads)}


def last_line(log: Path) -> str:
    """What a log says last: of a traceback the error."""
    lines = log.read_text(errors="replace").splitlines()
    return one_line(next((line for line in reversed(lines) if line.strip()), "nothing was printed"))


def one_line(text: str, letters: int = 160) -> str:
    """The beginning of a text, as one line."""
    words = " ".join(text.split())
    return words if len(words) <= letters else words[: letters - 1] + "…"
