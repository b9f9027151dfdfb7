"""Starts engines by a command that the user names, and ends them with all that they started.

What only a restart can change, such as the method, is told to an engine by its command. An engine
that runs on another machine is started and ended by commands, too, and answers at an address.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

from draftwell.components.engines.failures import last_line, one_line, tail_of
from draftwell.components.engines.launch_template import (
    LaunchTemplate,
    Options,
    option_words,
)
from draftwell.components.engines.process_group import END_SECONDS, FOREIGN, ProcessGroup
from draftwell.components.engines.remote.address import EngineAddress
from draftwell.components.engines.remote.client import EngineClient
from draftwell.components.engines.vllm import file_name
from draftwell.serving.errors import DraftwellError
from draftwell.serving.files import json_digest, write_json

ASK_SECONDS = 0.5
"""Between two questions whether an engine answers."""
TELL_SECONDS = 30.0
"""Between two lines of progress."""
STOP_SECONDS = 300.0
"""For the command that ends an engine, and until its address is silent."""
JUST_ENDED = 2.0
"""Seconds for which a command that breaks off an answer may still be there."""
FOR_GOOD = ("engine_key", "engine_tls", "engine_redirect", "bad_engine_address")
"""Codes of answers for which it makes no sense to wait."""
CAUSE = re.compile(r"\b(?!RuntimeError: Engine core init)[A-Za-z]*(?:Error|Exception|error): .+")
"""An error in a log, but for vLLM's that one stands above."""


@dataclass
class Running:
    """An engine that was started."""

    address: EngineAddress
    label: str
    options: Options
    group: ProcessGroup
    used: int = 0
    """Ascending: when it was last asked for."""


class Launcher:
    """Starts engines, as many at once as there are addresses; for a further one the one that was
    used least recently ends. Leaving it as a context ends all.

    Where the command names {port} or {url} there are two addresses, the given one and the next
    port of the same host; else there is only the given one.

    Args:
        command: starts an engine that runs as long as the command does; with `stop` it may also end
            when the engine was started elsewhere.
        address: where an engine answers.
        folder: for logs, and for files that commands read.
        stop: ends what `command` started; None: the end of the command's process group does.
        rests: engines compute with this machine's cores, so that one that nobody asks is stopped
            (`rest`): vLLM's workers keep a core busy for a second after each answer.
        start_seconds: bound for an engine to answer.
        say: takes lines of progress.
    Raises:
        DraftwellError: (of `start`) the command ended (`engine_failed`, or what
            `failures.why_ended` finds), the engine did not answer in time (`engine_timeout`) or
            refuses the key (`engine_key`), something else answers there (`engine_port_taken`); (of
            all) it could not be ended (`engine_not_stopped`).
    """

    def __init__(
        self,
        command: LaunchTemplate,
        address: EngineAddress,
        folder: Path,
        *,
        stop: LaunchTemplate | None = None,
        rests: bool = False,
        start_seconds: float = 1800.0,
        say: Callable[[str], None] = lambda line: None,
    ):
        self.command, self.stop, self.folder = command, stop, folder
        self._rests = rests and stop is None
        self.start_seconds, self._say = start_seconds, say
        self.addresses = [address]
        if command.takes_address:
            self.addresses.append(replace(address, url=next_port(address.url)))
        self._running: dict[str, Running] = {}
        self._count = 0

    @property
    def alternates(self) -> bool:
        """Whether only one engine runs at a time."""
        return len(self.addresses) == 1

    def __enter__(self) -> Launcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all engines, also where one of them cannot be ended."""
        try:
            for url in [*self._running]:
                self._end(url)
        finally:
            if self._running:
                self.close()

    def running(self, options: Options) -> Running | None:
        """The engine with these options that was started and was not ended."""
        found = (one for one in self._running.values() if one.options == options)
        return next(found, None)

    def start(self, label: str, options: Options) -> Running:
        """The engine with these options, started where none runs.

        Args:
            label: names it in errors and its log.
        """
        self._count += 1
        if (found := self.running(options)) is None:
            found = self._start(label, options, self._free())
        found.group.signal(signal.SIGCONT)
        found.used = self._count
        return found

    def rest(self, one: Running) -> None:
        """Let an engine rest until it is asked for again."""
        if self._rests:
            one.group.signal(signal.SIGSTOP)

    def end(self, options: Options) -> None:
        """End the engine with these options; harmless where none runs."""
        if (found := self.running(options)) is not None:
            self._end(found.address.url)

    def why_ended(self, options: Options) -> DraftwellError | None:
        """Why the command of an engine has ended, where it runs as long as the engine does; None
        while it runs."""
        found = self.running(options)
        if found is None or self.stop is not None or found.group.exit_code(JUST_ENDED) is None:
            return None
        return found.group.why_ended("engine_failed")

    def _free(self) -> EngineAddress:
        """An address without an engine of ours."""
        for address in self.addresses:
            if address.url not in self._running:
                return address
        oldest = min(self._running.values(), key=lambda one: one.used)
        self._end(oldest.address.url)
        return oldest.address

    def _start(self, label: str, options: Options, address: EngineAddress) -> Running:
        self._make_silent(label, options, address)
        command = self.command.render(self._values(options, address))
        log = self.folder / "logs" / f"{file_name(label)}.log"
        group = ProcessGroup(label, ["/bin/sh", "-c", command], log, env=environment())
        self._running[address.url] = Running(address, label, options, group)
        try:
            self._wait(self._running[address.url])
        except BaseException:
            self._end(address.url)
            raise
        return self._running[address.url]

    def _make_silent(self, label: str, options: Options, address: EngineAddress) -> None:
        """What answers before our engine was started would be measured in its place."""
        if self.stop is None:
            if listens(address.url):
                raise DraftwellError(
                    f"something answers at {address.url} already: end it, name another address "
                    "with --engine, or how to end it with --set stop_command=…",
                    code="engine_port_taken",
                )
        elif self._answer(address) is None:
            self._say(f"ending what runs at {address.url}")
            self._stop(label, options, address)

    def _wait(self, one: Running) -> None:
        """Until the engine answers."""
        begun = told = time.monotonic()
        while (why := self._answer(one.address)) is not None:
            now = time.monotonic()
            self._check_command(one)
            if now - begun > self.start_seconds:
                raise DraftwellError(
                    f"{one.label} did not answer at {one.address.url} within "
                    f"{self.start_seconds / 60:g} minutes ({why}; its log ends with: "
                    f"{last_line(one.group.log)}): see {one.group.log}, or name more "
                    "start_minutes",
                    code="engine_timeout",
                )
            if now - told > TELL_SECONDS:
                told = now
                seconds = f"{now - begun:.0f} s"
                self._say(f"{one.label} is starting, {seconds}: {last_line(one.group.log)}")
            time.sleep(ASK_SECONDS)
        self._check_command(one)

    def _check_command(self, one: Running) -> None:
        """Refuse a command that failed, or that has ended and nobody could end what it started."""
        code = one.group.exit_code()
        if code == 0 and self.stop is None:
            raise DraftwellError(
                f"the command of {one.label} has ended, and what it started cannot be ended: let "
                "it run as long as the engine does, or name --set stop_command=…; see "
                f"{one.group.log}",
                code="engine_failed",
            )
        if code:
            error = one.group.why_ended("engine_failed")
            cause = cause_of(one.group.log)
            if error.code == "engine_failed" and cause is not None:
                raise DraftwellError(f"{cause} ({error})", code=error.code)
            raise error

    def _answer(self, address: EngineAddress) -> str | None:
        """Why no engine answers yet; None where one does."""
        if not listens(address.url):
            return "nothing listens there"
        client = EngineClient(address)
        try:
            client.find_text("/health")  # llama.cpp and SGLang say there that they load
            if client.find_text("/v1/models") is None:
                return "it has no /v1/models"
        except DraftwellError as error:
            if error.code in FOR_GOOD:
                raise
            return str(error)
        finally:
            client.close()
        return None

    def _end(self, url: str) -> None:
        one = self._running.pop(url)
        try:
            if self.stop is not None:
                self._stop(one.label, one.options, one.address)
        finally:
            end_gently(one)
        self._wait_for_silence(one.label, one.address)

    def _stop(self, label: str, options: Options, address: EngineAddress) -> None:
        """Run the command that ends an engine, and wait until nothing answers."""
        assert self.stop is not None
        command = self.stop.render(self._values(options, address))
        log = self.folder / "logs" / f"{file_name(label)}-stop.log"
        group = ProcessGroup(
            f"stop_command for {label}", ["/bin/sh", "-c", command], log, env=environment()
        )
        try:
            code = group.exit_code(STOP_SECONDS)
            if code is None:
                raise DraftwellError(
                    f"stop_command did not end within {STOP_SECONDS:g} s: see {log}",
                    code="engine_not_stopped",
                )
        finally:
            group.end()
        self._wait_for_silence(label, address)
        if code:  # where nothing had started there was nothing to end
            self._say(f"stop_command ended with exit code {code}, and nothing answers: see {log}")

    def _wait_for_silence(self, label: str, address: EngineAddress) -> None:
        begun = time.monotonic()
        while self._answer(address) is None:
            if time.monotonic() - begun > (END_SECONDS if self.stop is None else STOP_SECONDS):
                raise DraftwellError(
                    f"{label} still answers at {address.url} after its command was ended: name "
                    "what ends it with --set stop_command=…",
                    code="engine_not_stopped",
                )
            time.sleep(ASK_SECONDS)

    def _values(self, options: Options, address: EngineAddress) -> dict[str, Sequence[str]]:
        """Placeholder → words."""
        content = dict(options)
        file = self.folder / f"speculation-{json_digest(content)[:12]}.yaml"
        write_json(file, content)  # JSON is YAML, which engines read by --config
        return {
            "speculation_options": option_words(options),
            "speculation_file": [str(file.absolute())],
            "port": [str(port_of(address.url))],
            "url": [address.url],
        }


def environment() -> Mapping[str, str]:
    """Variables of a command: ours, without those of this Python."""
    return {name: value for name, value in os.environ.items() if name not in FOREIGN}


def port_of(url: str) -> int:
    """The port of a URL, also where it is the scheme's own.

    >>> port_of("http://gpu:8000/prefix"), port_of("https://gpu")
    (8000, 443)
    """
    parts = urlsplit(url)
    return parts.port or (443 if parts.scheme == "https" else 80)


def next_port(url: str) -> str:
    """The same URL with the port after its own.

    >>> next_port("http://[::1]:8000/prefix")
    'http://[::1]:8001/prefix'
    """
    parts = urlsplit(url)
    if port_of(url) == 65_535:
        raise DraftwellError(
            f"{url} has the last port, and {{port}} of --launcher takes the next one, too: name a "
            "lower one",
            code="bad_engine_address",
        )
    host = parts.netloc.removesuffix(f":{parts.port}")
    return parts._replace(netloc=f"{host}:{port_of(url) + 1}").geturl()


def listens(url: str) -> bool:
    """Whether a port can be connected to."""
    host = urlsplit(url).hostname or ""
    try:
        socket.create_connection((host, port_of(url)), timeout=ASK_SECONDS).close()
    except OSError:
        return False
    return True


def cause_of(log: Path) -> str | None:
    """The first error that the end of a log names: servers say last that something failed above."""
    found = CAUSE.search(tail_of(log))
    return None if found is None else one_line(found[0])


def end_gently(one: Running) -> None:
    """Ask all of a group to end, because a shell that waits for its command does not pass a signal
    on, and wait until it serves no more."""
    for number in (signal.SIGTERM, signal.SIGCONT):
        one.group.signal(number)
    end = time.monotonic() + END_SECONDS
    while one.group.exit_code(0.1) is None or listens(one.address.url):
        if time.monotonic() > end:
            break
        time.sleep(0.1)
    one.group.end()
