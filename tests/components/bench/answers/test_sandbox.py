"""The sandbox, by programs that try to get out of it; what they try is first seen to work
outside."""

from __future__ import annotations

import os
import platform
import resource
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from draftwell.components.bench.answers import sandbox, seccomp
from draftwell.components.bench.answers.sandbox import (
    CHILD,
    PRELUDE,
    Outcome,
    SandboxUnavailable,
    run_python,
)

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="programs are held by seccomp, which only Linux has"
)
x86 = pytest.mark.skipif(
    platform.machine() != "x86_64", reason="numbers of system calls, or machine code, of x86_64"
)

TOOLS = "import ctypes, mmap, os, resource, signal, socket, subprocess, threading, time\n"
ATTACKS = {
    "write a file": 'open("{folder}/new", "w").write("x")',
    "append to a file": 'open("{folder}/kept", "a").write("x")',
    "truncate a file": 'os.truncate("{folder}/kept", 0)',
    "delete a file": 'os.remove("{folder}/kept")',
    "rename a file": 'os.rename("{folder}/kept", "{folder}/new")',
    "delete a folder": 'os.rmdir("{folder}/empty")',
    "make a folder": 'os.mkdir("{folder}/new")',
    "change permissions": 'os.chmod("{folder}/kept", 0o777)',
    "change times": 'os.utime("{folder}/kept", (1, 1))',
    "link": 'os.link("{folder}/kept", "{folder}/new")',
    "symbolic link": 'os.symlink("{folder}/kept", "{folder}/new")',
    "make a pipe in the file system": 'os.mkfifo("{folder}/new")',
    "leave its folder": 'os.chdir("{folder}")',
    "read a secret": 'open("{folder}/.netrc").read()',
    "list a folder": 'os.listdir("{folder}")',
    "look at a file": 'os.stat("{folder}/kept")',
    "a file in memory": 'os.memfd_create("x")',
    "copy a descriptor": "os.dup(1)",
    "TCP": 'socket.create_connection(("127.0.0.1", {tcp}), timeout=5).send(b"x")',
    "listen": 'socket.create_server(("127.0.0.1", 0))',
    "UDP": 'socket.socket(type=socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", {udp}))',
    "a unix socket": 'socket.socket(socket.AF_UNIX).bind("{folder}/new")',
    "names of hosts": 'socket.getaddrinfo("localhost", 80)',
    "fork": "if os.fork() == 0: os._exit(0)",
    "spawn": 'os.posix_spawn("{python}", ["{python}", "-c", ""], {{}})',
    "a subprocess": 'subprocess.run(["{python}", "-c", ""], check=True)',
    "a shell": 'assert os.system(":") == 0, "no shell"',
    "become another program": 'os.execv("{python}", ["{python}", "-c", ""])',
    "a thread": "thread = threading.Thread(target=int)\nthread.start()\nthread.join()",
    "kill": "os.kill({victim}, signal.SIGKILL)",
    "be nice": "os.nice(1)",
    "set a limit": "resource.setrlimit(resource.RLIMIT_CORE, (0, 0))",
}
REASONS = {
    "names of hosts": "gaierror",
    "a shell": "no shell",
    "a thread": "RuntimeError",
    "set a limit": "ValueError",
}
EXITS = [
    "raise SystemExit(0)",
    "import sys; sys.exit()",
    "import os; os._exit(0)",
    "import os; os.abort()",
    "import ctypes; ctypes.string_at(0)",
    "import sys; sys.setrecursionlimit(10**9)\ndef f(): f()\nf()",
]
ENDLESS = {
    "a loop": "while True: pass",
    "a loop that catches everything": (
        "while True:\n    try:\n        while True: pass\n    except BaseException: pass"
    ),
    "a loop that ignores signals": (
        "for n in range(1, 32):\n    if n not in (9, 19): signal.signal(n, "
        "signal.SIG_IGN)\nwhile True: pass"
    ),
    "sleep": "time.sleep(600)",
    "a loop in C": "sum(range(10**15))",
    "forks": "while True:\n    try: os.fork()\n    except OSError: pass",
    "threads": (
        "while True:\n    try: threading.Thread(target=time.sleep, args=(600,)).start()\n    "
        "except RuntimeError: pass"
    ),
    "writing to every descriptor": (
        "while True:\n    for fd in range(64):\n        try: os.write(fd, b'x' * 4096)\n       "
        " except OSError: pass"
    ),
}
CALLS = {  # of x86_64
    "open": 2,
    "openat": 257,
    "openat2": 437,
    "creat": 85,
    "dup": 32,
    "pipe": 22,
    "ioctl": 16,
    "fcntl": 72,
    "sendfile": 40,
    "fork": 57,
    "vfork": 58,
    "clone": 56,
    "clone3": 435,
    "execve": 59,
    "execveat": 322,
    "socket": 41,
    "socketpair": 53,
    "connect": 42,
    "sendto": 44,
    "ptrace": 101,
    "kill": 62,
    "tkill": 200,
    "tgkill": 234,
    "rt_sigqueueinfo": 129,
    "pidfd_open": 434,
    "unlink": 87,
    "unlinkat": 263,
    "rename": 82,
    "mkdir": 83,
    "truncate": 76,
    "chmod": 90,
    "link": 86,
    "mknod": 133,
    "mount": 165,
    "umount2": 166,
    "chroot": 161,
    "unshare": 272,
    "setns": 308,
    "io_uring_setup": 425,
    "memfd_create": 319,
    "shmget": 29,
    "madvise": 28,
    "process_vm_readv": 310,
    "process_vm_writev": 311,
    "prctl": 157,
    "seccomp": 317,
    "prlimit64": 302,
    "setrlimit": 160,
    "setuid": 105,
    "capset": 126,
    "bpf": 321,
    "perf_event_open": 298,
    "userfaultfd": 323,
    "keyctl": 250,
    "init_module": 175,
    "reboot": 169,
    "setpriority": 141,
    "setsid": 112,
    "x32 fork": 0x4000_0000 + 57,
    "of a later kernel": 9999,
}


@pytest.fixture
def world(tmp_path: Path) -> Iterator[SimpleNamespace]:
    """Things to attack: files, two sockets that listen, a process."""
    (tmp_path / "kept").write_text("kept")
    (tmp_path / ".netrc").write_text("secret")
    (tmp_path / "empty").mkdir()
    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(type=socket.SOCK_DGRAM) as udp,
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as victim,
    ):
        udp.bind(("127.0.0.1", 0))
        tcp.setblocking(False)
        udp.setblocking(False)
        yield SimpleNamespace(folder=tmp_path, tcp=tcp, udp=udp, victim=victim)
        victim.kill()


def attempt(code: str, **limits: float) -> Outcome:
    """Run an attack, whose modules are imported before the lock: it shall fail at what it does, not
    for want of a module."""
    return run_python(TOOLS + code, prelude=PRELUDE + TOOLS, **limits)  # type: ignore[arg-type]


def aimed(code: str, world: SimpleNamespace) -> str:
    """An attack on a world."""
    return code.format(
        folder=world.folder,
        tcp=world.tcp.getsockname()[1],
        udp=world.udp.getsockname()[1],
        python=sys.executable,
        victim=world.victim.pid,
    )


def files(folder: Path) -> dict[str, tuple[int, int, float]]:
    """What lies in a folder, and its size, mode and time."""
    return {
        path.name: (path.stat().st_size, path.stat().st_mode, path.stat().st_mtime)
        for path in folder.iterdir()
    }


@pytest.fixture
def child(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the sandbox's own program, so that its processes are told from those of tests in
    other processes."""
    copy = tmp_path_factory.mktemp("child") / CHILD.name
    copy.write_bytes(CHILD.read_bytes())
    monkeypatch.setattr(sandbox, "CHILD", copy)
    return copy


def running(child: Path) -> list[int]:
    """Processes of this sandbox that run, and copies of them."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and str(child).encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue  # it ended meanwhile
    return found


@pytest.mark.parametrize("name", ATTACKS)
def test_what_works_outside_is_refused_inside(
    name: str, world: SimpleNamespace, child: Path
) -> None:
    code, before = aimed(ATTACKS[name], world), files(world.folder)
    inside = attempt(code)
    assert not inside.passed
    assert REASONS.get(name, "PermissionError") in inside.reason
    assert files(world.folder) == before
    with pytest.raises(BlockingIOError):
        world.tcp.accept()
    with pytest.raises(BlockingIOError):
        world.udp.recv(1)
    assert world.victim.poll() is None
    assert running(child) == []
    outside = subprocess.run(
        [sys.executable, "-S", "-c", TOOLS + code],
        cwd=world.folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert outside.returncode == 0, f"this attack shows nothing: {outside.stderr}"


@x86
def test_system_calls_that_are_not_named_fail_whatever_they_are(child: Path) -> None:
    code = f"""
libc = ctypes.CDLL(None, use_errno=True)
assert libc.syscall(39) == os.getpid(), "the test cannot make system calls"
open_ = []
for name, number in {CALLS!r}.items():
    ctypes.set_errno(0)
    if libc.syscall(number, 0, 0, 0, 0, 0, 0) != -1 or ctypes.get_errno() != {seccomp.EPERM}:
        open_.append(name)
assert not open_, open_
"""
    assert attempt(code) == Outcome(True, "passed")
    assert running(child) == []


@x86
def test_numbers_of_another_architecture_end_the_program() -> None:
    code = r"""
page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
page.write(b"\xb8\x14\x00\x00\x00\xcd\x80\xc3")  # mov eax, 20 (getpid of i386); int 0x80; ret
ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()
"""
    outcome = attempt(code)
    assert not outcome.passed
    assert outcome.reason in (
        "it ended by SIGSYS before its last line",
        "it ended by SIGSEGV before its last line",
    )


def test_a_program_that_runs_is_seen_to_run(child: Path) -> None:
    with ThreadPoolExecutor() as threads:
        outcome, seen = threads.submit(attempt, "time.sleep(600)", seconds=3), False
        while not outcome.done():
            seen = seen or bool(running(child))
    assert seen
    assert running(child) == []


@pytest.mark.parametrize("name", ENDLESS)
def test_what_never_ends_is_ended(name: str, child: Path) -> None:
    started, memory = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    outcome = attempt(ENDLESS[name], seconds=1)
    assert not outcome.passed
    assert any(words in outcome.reason for words in ("longer than 1 s", "SIGKILL", "SIGXCPU"))
    assert time.monotonic() - started < 60
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 50_000  # kB
    assert running(child) == []


def test_ten_gigabytes_are_not_to_be_had() -> None:
    for code in (
        "bytearray(10 * 2**30)",
        "x = []\nwhile True: x.append(bytearray(2**24))",
        "'x' * (10 * 2**30)",
    ):
        assert run_python(code).reason.startswith("MemoryError")
    assert "allocate memory" in attempt("mmap.mmap(-1, 10 * 2**30)").reason


def test_the_limit_of_memory_is_the_one_that_was_given() -> None:
    code = "x = bytearray(300 * 2**20)"
    assert run_python(code, memory=2**30) == Outcome(True, "passed")
    assert not run_python(code, memory=256 * 2**20).passed


def test_a_gigabyte_of_prints_goes_nowhere() -> None:
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    outcome = run_python(
        "import sys\nfor _ in range(1024): print('x' * 2**20); print('x', file=sys.stderr)",
        seconds=30,
    )
    assert outcome == Outcome(True, "passed")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 50_000


@pytest.mark.slow
@pytest.mark.parametrize("code", EXITS)
def test_a_program_that_leaves_before_its_tests_does_not_pass(code: str) -> None:
    outcome = run_python(f"{code}\nassert False, 'never reached'")
    assert not outcome.passed
    assert "never reached" not in outcome.reason


def test_a_program_cannot_report_for_itself() -> None:
    code = (
        "import os\nfor fd in range(4096):\n    try: os.write(fd, b'passed')\n    except "
        "OSError: pass\n"
    )
    assert not run_python(code + "os._exit(0)").passed
    assert not run_python(code).passed, "not even what does pass, when it has spoken out of turn"


def test_errors_that_are_caught_change_nothing(world: SimpleNamespace) -> None:
    before = files(world.folder)
    tries = "".join(
        f"try:\n    {aimed(code, world)}\nexcept BaseException: pass\n"
        for code in ATTACKS.values()
        if "\n" not in code
    )
    assert attempt(tries).passed
    assert files(world.folder) == before
    assert world.victim.poll() is None


def test_nothing_is_inherited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "x")
    assert run_python(
        "import os\nassert 'SECRET_TOKEN' not in os.environ\nassert 'HOME' not in os.environ"
    ) == Outcome(True, "passed")
    with (tmp_path / "secret").open("w+") as secret:
        secret.write("secret")
        secret.flush()
        secret.seek(0)
        os.set_inheritable(secret.fileno(), True)
        code = (
            "import os\nfor fd in range(256):\n    try: assert not os.read(fd, 1), fd\n    "
            "except OSError: pass"
        )
        assert run_python(code) == Outcome(True, "passed")
        assert secret.read() == "secret"


HONEST = {
    "modules": (
        "import math, heapq\nfrom typing import List\nfrom collections import Counter\nassert "
        "heapq.nlargest(1, [1, 2]) == [2]"
    ),
    "dates": (
        "from datetime import datetime\nassert datetime.strptime('2026-11-21', '%Y-%m-%d').day "
        "== 21"
    ),
    "hashes": (
        "import hashlib\nassert hashlib.md5(b'a').hexdigest() == "
        "'0cc175b9c0f1b6a831c399e269772661'\nhashlib.sha256(b'').digest()"
    ),
    "chance": "import random\nassert 0 <= random.Random().random() < 1\nrandom.seed()",
    "clocks": "import time\nstart = time.perf_counter()\ntime.sleep(.01)\nassert "
    "time.perf_counter() "
    "- start >= .01\n"
    "time.time()\ntime.process_time()",
    "classes": "from dataclasses import dataclass\nfrom typing import "
    "NamedTuple\n@dataclass\nclass "
    "A:\n    x: 'int' = 1\n"
    "class B(NamedTuple):\n    y: int\nassert (A().x, B(2).y) == (1, 2)",
    "texts and numbers": "import copy, decimal, fractions, re, statistics\nassert "
    "'é'.encode('latin-1') == "
    "b'\\xe9'\n"
    "assert re.findall('[a-z]+', 'ab1')\nassert statistics.mean([1, 2]) == 1.5\n"
    "assert decimal.Decimal('0.1') * 3 == decimal.Decimal('0.3')",
    "memory": (
        "x = [bytearray(2**20) for _ in range(100)]\ndel x\ny = sorted(range(10**5), "
        "reverse=True)\nassert y[0] == 99999"
    ),
    "not the main module": "if __name__ == '__main__':\n    raise ValueError('a script')",
    "recursion": (
        "import sys\nsys.setrecursionlimit(5000)\ndef f(n): return n and f(n - 1)\nassert "
        "f(3000) == 0"
    ),
    "nobody answers": (
        "try: input()\nexcept EOFError: pass\nelse: raise ValueError('who answered?')"
    ),
    "the standard library only": (
        "try: import numpy\nexcept ImportError: pass\nelse: raise ValueError('from where?')"
    ),
}


@pytest.mark.parametrize("code", HONEST.values(), ids=HONEST)
def test_honest_programs_run(code: str) -> None:
    assert run_python(code) == Outcome(True, "passed")


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("assert 1 == 2, 'one\\nis   two'", "AssertionError: one is two"),
        ("def f(:", "SyntaxError"),
        ("x = '\0'", "SyntaxError|ValueError"),
        ("raise ValueError('x' * 10**6)", "ValueError: xxx"),
        ("raise ValueError('é' * 10**6)", "ValueError: é"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("class passed(Exception): pass\nraise passed", "passed:"),
        ("x = '\udcff'", "UnicodeEncodeError"),
    ],
)
def test_failures_say_why_in_a_line(code: str, reason: str) -> None:
    outcome = run_python(code)
    assert not outcome.passed
    assert any(outcome.reason.startswith(words) for words in reason.split("|"))
    assert len(outcome.reason) <= sandbox.REASON_LETTERS
    assert "\n" not in outcome.reason


def test_runs_are_alike() -> None:
    first, second = (run_python("raise ValueError(hash('a'))") for _ in range(2))
    assert first == second


def test_an_unknown_machine_is_refused_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(
        SandboxUnavailable, match=r"^[^\n]*needs Linux on x86_64 or aarch64, not linux on riscv64$"
    ):
        run_python("pass")


@pytest.mark.parametrize(
    ("instructions", "words"),
    [
        (struct.pack("=HBBI", 0xFFFF, 0, 0, 0), "Invalid argument"),
        (struct.pack("=HBBI", seccomp.RETURN, 0, 0, seccomp.ALLOW), "lets files be opened"),
    ],
)
def test_without_a_filter_that_holds_nothing_is_run(
    instructions: bytes, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seccomp, "filter_program", lambda machine: instructions)
    (tmp_path / "kept").write_text("kept")
    with pytest.raises(SandboxUnavailable, match=words):
        run_python(f"import os\nos.remove('{tmp_path}/kept')")
    assert (tmp_path / "kept").is_file()


def answer_of(program: bytes, arch: int, number: int) -> int:
    """What the kernel would answer: the filter's instructions, interpreted."""
    instructions = list(struct.iter_unpack("=HBBI", program))
    data, at, value = {seccomp.ARCHITECTURE: arch, seccomp.NUMBER: number}, 0, 0
    while True:
        code, yes, no, operand = instructions[at]
        at += 1
        if code == seccomp.RETURN:
            return operand
        if code == seccomp.LOAD:
            value = data[operand]
        else:
            assert code == seccomp.JUMP_IF_EQUAL
            at += yes if value == operand else no


@pytest.mark.parametrize("machine", seccomp.SYSTEM_CALLS)
def test_the_filter_allows_what_is_named_and_nothing_else(machine: str) -> None:
    program, arch = seccomp.filter_program(machine), seccomp.AUDIT_ARCH[machine]
    allowed = {
        number for number in range(2048) if answer_of(program, arch, number) == seccomp.ALLOW
    }
    assert allowed == set(seccomp.SYSTEM_CALLS[machine].values())
    refused = seccomp.FAIL | seccomp.EPERM
    assert all(
        answer_of(program, arch, number) == refused
        for number in range(2048)
        if number not in allowed
    )
    assert all(answer_of(program, arch, 0x4000_0000 + number) == refused for number in allowed)
    assert answer_of(program, arch ^ 1, min(allowed)) == seccomp.KILL_PROCESS
    # old, and not of later machines
    assert set(seccomp.SYSTEM_CALLS["x86_64"]) - set(seccomp.SYSTEM_CALLS[machine]) <= {"time"}
