"""The system calls that a sandboxed program may make, as a filter that the Linux kernel runs
(seccomp, classic BPF).

Few are named, all others fail with EPERM: what is not on the list (opening, sockets, forking,
executing, signals, renaming, limits, and whatever a later kernel brings) needs no thought of its
own. A call under another architecture's numbers ends the process. Limits on processes do not bind
root; this does. Source: Linux, Documentation/userspace-api/seccomp_filter.rst.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""Machine, as `platform.machine()` says it → the kernel's number of its architecture."""
SYSTEM_CALLS: Mapping[str, Mapping[str, int]] = {
    # no madvise: root may poison pages of the machine's memory with it
    "x86_64": {
        "read": 0,
        "write": 1,
        "mmap": 9,
        "mprotect": 10,
        "munmap": 11,
        "brk": 12,
        "rt_sigaction": 13,
        "rt_sigprocmask": 14,
        "rt_sigreturn": 15,
        "sched_yield": 24,
        "mremap": 25,
        "nanosleep": 35,
        "getpid": 39,
        "exit": 60,
        "gettimeofday": 96,
        "getppid": 110,
        "sigaltstack": 131,
        "gettid": 186,
        "time": 201,
        "futex": 202,
        "restart_syscall": 219,
        "clock_gettime": 228,
        "clock_getres": 229,
        "clock_nanosleep": 230,
        "exit_group": 231,
        "getrandom": 318,
    },
    "aarch64": {
        "read": 63,
        "write": 64,
        "exit": 93,
        "exit_group": 94,
        "futex": 98,
        "nanosleep": 101,
        "clock_gettime": 113,
        "clock_getres": 114,
        "clock_nanosleep": 115,
        "sched_yield": 124,
        "restart_syscall": 128,
        "sigaltstack": 132,
        "rt_sigaction": 134,
        "rt_sigprocmask": 135,
        "rt_sigreturn": 139,
        "gettimeofday": 169,
        "getpid": 172,
        "getppid": 173,
        "gettid": 178,
        "brk": 214,
        "munmap": 215,
        "mremap": 216,
        "mmap": 222,
        "mprotect": 226,
        "getrandom": 278,
    },
}
"""Reading and writing stay, because nothing can be opened: the program has the descriptors that it
was born with."""

LOAD, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06
NUMBER, ARCHITECTURE = 0, 4  # offsets in struct seccomp_data
KILL_PROCESS, FAIL, ALLOW = 0x8000_0000, 0x0005_0000, 0x7FFF_0000
EPERM = 1


def filter_program(machine: str) -> bytes:
    """Instructions of the filter for a machine of `SYSTEM_CALLS`, 8 bytes each.

    >>> len(filter_program("x86_64")) // 8
    57
    """
    program = [
        (LOAD, 0, 0, ARCHITECTURE),
        (JUMP_IF_EQUAL, 1, 0, AUDIT_ARCH[machine]),
        (RETURN, 0, 0, KILL_PROCESS),
        (LOAD, 0, 0, NUMBER),
    ]
    for number in SYSTEM_CALLS[machine].values():
        program += [(JUMP_IF_EQUAL, 0, 1, number), (RETURN, 0, 0, ALLOW)]
    program.append((RETURN, 0, 0, FAIL | EPERM))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
