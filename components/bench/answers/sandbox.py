"""Runs Python that nobody has read, such as a model's answer, with limits on everything it could do
to the machine.

The program runs in a process of its own that has given up, before the program's first line, every
way out: it cannot open, change or remove a file, reach a network, start a process or a thread,
signal anybody, or raise its limits of time and memory (`seccomp`, `sandbox_child`). It has no
environment and prints into nothing. What it needs is imported before (`PRELUDE`); other modules are
not found.

The machine is safe from the program; the score is safe from a program that ends early, not from one
written to deceive its own tests, with which it shares a process.
"""

from __future__ import annotations

import json
import os
import platform
import secrets
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from draftwell.components.bench.answers import seccomp
from draftwell.serving.errors import DraftwellError

CHILD = Path(__file__).with_name("sandbox_child.py")
PRELUDE = """
import abc, array, ast, base64, bisect, calendar, cmath, codecs, collections, collections.abc, contextlib, copy, csv, dataclasses
import datetime, decimal, difflib, enum, fractions, functools, gc, graphlib, hashlib, heapq, html, inspect, io, itertools, json
import keyword, linecache, math, numbers, operator, os, pprint, queue, random, re, secrets, statistics, string, struct, sys
import textwrap, threading, time, timeit, tokenize, traceback, types, typing, unicodedata, unittest, uuid, warnings, weakref, zlib
import _strptime, encodings.ascii, encodings.idna, encodings.latin_1, encodings.utf_16, encodings.utf_32
hashlib.md5(b"").hexdigest()
"""  # noqa: E501
"""Trusted code that runs before the lock: the modules that a program may import, and what these
would open later."""
REPORT_BYTES = 4096
REASON_LETTERS = 200


class SandboxUnavailable(DraftwellError):
    """This machine cannot hold a program; none was run."""

    code = "sandbox_unavailable"


@dataclass(frozen=True)
class Outcome:
    """How a program ended.

    Args:
        passed: whether it ran to its last line.
        reason: one line: "passed", the exception, or the limit that ended it.
    """

    passed: bool
    reason: str


def run_python(
    code: str, *, seconds: float = 5.0, memory: int = 512 * 2**20, prelude: str = PRELUDE
) -> Outcome:
    """Run a program to its end or to its first exception.

    Args:
        code: the program; `__name__` is not `__main__` in it.
        seconds: of the clock and of the processor; the start of Python (a tenth of a second) counts
            too.
        memory: bytes of address space, Python's own (about 60 MB) among them.
        prelude: trusted code that runs before the limits hold; what it imports, the program can
            import.
    Raises:
        SandboxUnavailable: not Linux on x86_64 or aarch64, or a kernel without seccomp.

    >>> run_python("assert 1 + 1 == 3, 'wrong'")
    Outcome(passed=False, reason='AssertionError: wrong')
    """
    machine = platform.machine()
    if sys.platform != "linux" or machine not in seccomp.SYSTEM_CALLS:
        known = " or ".join(seccomp.SYSTEM_CALLS)
        raise SandboxUnavailable(
            f"programs run only in a sandbox, which needs Linux on {known}, not "
            f"{sys.platform} on {machine}"
        )
    nonce = secrets.token_hex(16)
    reading, writing = os.pipe()
    job = {
        "report": writing,
        "nonce": nonce,
        "prelude": prelude,
        "code": code,
        "seconds": seconds,
        "memory": memory,
        "filter": seccomp.filter_program(machine).hex(),
    }
    with os.fdopen(reading, "rb") as report:
        with os.fdopen(writing, "wb"):  # ours is closed once the child has its own
            process = start(writing)
        try:
            send(process, json.dumps(job).encode())
            answer = read_report(report.fileno(), seconds)
        finally:
            process.kill()
            process.wait()
    return outcome(answer, nonce, process.returncode, seconds)


def start(report: int) -> subprocess.Popen[bytes]:
    """The child, with three descriptors in addition to its `report`, and hash values that are the
    same in every run."""
    libraries = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
    return subprocess.Popen(
        [sys.executable, "-P", "-s", "-S", "-B", str(CHILD)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=[report],
        cwd="/",
        env={"PYTHONHASHSEED": "0", **libraries},
        start_new_session=True,
    )


def send(process: subprocess.Popen[bytes], job: bytes) -> None:
    """Hand the job over; a child that could not start is seen by its missing report."""
    assert process.stdin is not None
    with suppress(BrokenPipeError), process.stdin as stdin:
        stdin.write(job)


def read_report(pipe: int, seconds: float) -> bytes | None:
    """What the child wrote by its end; None if that did not come within `seconds`, or was no report
    by its size."""
    deadline = time.monotonic() + seconds
    waiting = select.poll()
    waiting.register(pipe, select.POLLIN)
    answer = b""
    while len(answer) <= REPORT_BYTES:
        left = deadline - time.monotonic()
        if left <= 0 or not waiting.poll(left * 1e3):
            return None
        piece = os.read(pipe, REPORT_BYTES)
        if not piece:
            return answer
        answer += piece
    return None


def outcome(answer: bytes | None, nonce: str, code: int, seconds: float) -> Outcome:
    """Of a report; what does not begin with the nonce did not come from the last line of the
    child's own code.

    Raises:
        SandboxUnavailable: the child could not lock itself in.
    """
    if answer is None:
        return Outcome(
            False, f"it ran longer than {seconds:g} s, or wrote where only its report may be"
        )
    mark, _, text = answer.decode(errors="replace").partition(" ")
    if mark != nonce:
        how = f"by {signal.Signals(-code).name}" if code < 0 else "by itself"
        return Outcome(False, f"it ended {how} before its last line")
    if text.startswith("unlocked: "):
        raise SandboxUnavailable(
            "programs run only in a sandbox, which needs seccomp in the kernel: "
            f"{text.partition(': ')[2]}"
        )
    return Outcome(text == "passed", " ".join(text.split())[:REASON_LETTERS])
