"""Calls of compiled libraries beside other models.

Torch's runner of a library holds Python's lock (the GIL) while the library computes (pytorch issue
197516): two models of one process would take turns, layer by layer, whatever cores they have. On
the threads of models that run at once (`engine.workers`), libraries are called by their C
interface, which leaves the lock to the others. Elsewhere torch's runner is called, which takes 11
µs less a layer.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor
from torch._C import _aoti

from draftwell.serving.runtime.models.compiled_library import Runner

_thread = threading.local()
_pointer_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_capsule_of = ctypes.PYFUNCTYPE(
    ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p
)(("PyCapsule_New", ctypes.pythonapi))


def computes_beside_others() -> None:
    """From here on the calling thread leaves Python's lock to others while a library computes."""
    _thread.beside = True


@contextmanager
def beside_others() -> Iterator[None]:
    """The same for a block."""
    before = getattr(_thread, "beside", False)
    _thread.beside = True
    try:
        yield
    finally:
        _thread.beside = before


class LibraryRunner:
    """A loaded library, for one thread at a time.

    Args:
        runner: torch's runner of it.
        file: the library.
    """

    def __init__(self, runner: Runner, file: Path):
        self._runner, self._file = runner, file
        self._shared: Runner | None = None

    def run(self, inputs: list[Tensor]) -> list[Tensor]:
        """Outputs of a call; inputs are the flattened arguments."""
        if not getattr(_thread, "beside", False):
            return self._runner.run(inputs)
        if self._shared is None:
            try:
                self._shared = SharedRunner(self._file)
            except OSError:  # the file was deleted after it was loaded: then models take turns
                self._shared = self._runner
        return self._shared.run(inputs)


class SharedRunner:
    """A library by its C interface (torch/csrc/inductor/aoti_runtime/interface.h), for one thread
    at a time."""

    def __init__(self, file: Path):
        self._file, self._library = file, ctypes.CDLL(str(file))
        self._container = ctypes.c_void_p()
        self._call(
            "AOTInductorModelContainerCreateWithDevice",
            ctypes.byref(self._container),
            ctypes.c_size_t(1),
            b"cpu",
            None,
        )
        # a process frees it all
        weakref.finalize(
            self, self._library.AOTInductorModelContainerDelete, self._container
        ).atexit = False
        self._inputs, self._outputs = (self._number_of(what) for what in ("Inputs", "Outputs"))

    def run(self, inputs: list[Tensor]) -> list[Tensor]:
        """As `LibraryRunner.run`: the library owns the handles of its inputs, and whoever calls it
        those of its outputs.

        Raises:
            RuntimeError: the library failed, or takes another number of inputs.
        """
        if len(inputs) != self._inputs:  # the library would end the process
            raise RuntimeError(
                f"the compiled layer {self._file} takes {self._inputs} inputs, not {len(inputs)}"
            )
        handles = [
            _pointer_of(capsule, None)
            for capsule in _aoti.unsafe_alloc_void_ptrs_from_tensors(inputs)
        ]
        given, made = (
            (ctypes.c_void_p * self._inputs)(*handles),
            (ctypes.c_void_p * self._outputs)(),
        )
        self._call(
            "AOTInductorModelContainerRun",
            self._container,
            given,
            ctypes.c_size_t(self._inputs),
            made,
            ctypes.c_size_t(self._outputs),
            None,
            None,
        )
        capsules = [_capsule_of(handle, None, None) for handle in made]
        # Not the function for a single tensor, which copies the handle and leaves it to nobody.
        outputs: list[Tensor] = _aoti.alloc_tensors_by_stealing_from_void_ptrs(capsules)
        return outputs

    def _number_of(self, what: str) -> int:
        count = ctypes.c_size_t()
        self._call(f"AOTInductorModelContainerGetNum{what}", self._container, ctypes.byref(count))
        return count.value

    def _call(self, function: str, *arguments: object) -> None:
        if getattr(self._library, function)(*arguments):
            reason = ctypes.c_char_p()
            self._library.AOTInductorGetLastError(ctypes.byref(reason))
            raise RuntimeError(
                f"the compiled layer {self._file} failed: "
                f"{(reason.value or b'no reason given').decode(errors='replace')}"
            )
