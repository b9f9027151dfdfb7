"""The sandbox from inside: started by its path in a Python of its own, it locks itself in and then
runs a program.

It sees the standard library and nothing of the project. The order matters: imports, which read
files, come before the lock; the untrusted program follows it. `sandbox.run_python` is the other
side.
"""

import ctypes
import json
import math
import os
import resource
import signal
import sys
import types

REPORT_LETTERS = 1000  # of four bytes at most: less than the reader takes, and than a pipe holds
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 22, 38
SECCOMP_MODE_FILTER = 2


class Filter(ctypes.Structure):
    """The kernel's struct sock_fprog."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))


def main() -> None:
    """Read the job from stdin, lock, run, and write `nonce` and what happened to the report's
    descriptor."""
    job = json.load(sys.stdin.buffer)
    report, nonce = job["report"], job["nonce"]
    exec(job["prelude"], {})
    problem = lock(bytes.fromhex(job["filter"]), job["seconds"], job["memory"])
    result = f"unlocked: {problem}" if problem else run(job["code"])
    os.write(report, f"{nonce} {result[:REPORT_LETTERS]}".encode(errors="replace"))
    os._exit(0)  # not through the program's exit handlers


def lock(instructions: bytes, seconds: float, memory: int) -> str | None:
    """Give up, for good, all that the program must not have. Returns what failed, None if nothing
    did."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    cpu = math.ceil(used.ru_utime + used.ru_stime + seconds)
    limits = {
        resource.RLIMIT_CPU: cpu,
        resource.RLIMIT_AS: memory,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_NPROC: 0,
        resource.RLIMIT_NOFILE: 0,
    }
    buffer = ctypes.create_string_buffer(instructions)
    program = Filter(len(instructions) // 8, ctypes.addressof(buffer))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl.argtypes = (ctypes.c_int, *[ctypes.c_ulong] * 4)
    try:
        for limit, value in limits.items():
            resource.setrlimit(limit, (value, value))
        for command in (
            (PR_SET_PDEATHSIG, signal.SIGKILL, 0),
            (PR_SET_NO_NEW_PRIVS, 1, 0),
            (PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.addressof(program)),
        ):
            if prctl(*command, 0, 0):
                return os.strerror(ctypes.get_errno())
    except (OSError, ValueError) as error:
        return str(error)
    try:
        os.open("/", os.O_RDONLY)
    # the filter's answer; the limit on descriptors alone would give another
    except PermissionError:
        return None
    except OSError:
        pass
    return "the filter lets files be opened"


def run(code: str) -> str:
    """`passed`, or the exception that ended the program."""
    module = types.ModuleType("program")  # dataclasses and the like look their module up
    sys.modules[module.__name__] = module
    try:
        exec(compile(code, "program.py", "exec"), module.__dict__)
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "passed"


if __name__ == "__main__":
    main()
