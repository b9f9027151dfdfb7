"""Calls of compiled libraries beside other models.

Torch's runner of a library holds Python's lock (the GIL) while the library computes (pytorch issue 197516): two models of one process would
take turns, layer by layer, whatever cores they have. On the threads of models that run at once (`engine.workers`), libraries are called by
their C interface, which leaves the lock to the others. Elsewhere torch's runner is called, which takes 11 µs less a layer.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from pathlib import Path

from torch import Tensor
from torch._C import _aoti

from serving.runtime.models.compiled_library import Runner

_thread = threading.local()
_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype, _pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
_capsule_of = ctypes.pythonapi.PyCapsule_New
_capsule_of.restype, _capsule_of.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


def computes_beside_others() -> None:
    """From here on the calling thread leaves Python's lock to others while a library computes."""
    _thread.beside = True


class LibraryRunner:
    """A loaded library.

    Args:
        runner: torch's runner of it.
        file: the library.
    """

    def __init__(self, runner: Runner, file: Path):
        self._runner, self._file = runner, file
        self._shared: SharedRunner | None = None

    def run(self, inputs: list[Tensor]) -> list[Tensor]:
        """Outputs of a call; inputs are the flattened arguments."""
        if not getattr(_thread, "beside", False):
            return self._runner.run(inputs)
        if self._shared is None:
            self._shared = SharedRunner(self._file)
        return self._shared.run(inputs)


class SharedRunner:
    """A library by its C interface (torch/csrc/inductor/aoti_runtime/interface.h), for one thread at a time."""

    def __init__(self, file: Path):
        library, self._file = ctypes.CDLL(str(file)), file
        self._container = ctypes.c_void_p()
        self._check(library.AOTInductorModelContainerCreateWithDevice(ctypes.byref(self._container), ctypes.c_size_t(1), b"cpu", None))
        weakref.finalize(self, library.AOTInductorModelContainerDelete, self._container)
        outputs = ctypes.c_size_t()
        self._check(library.AOTInductorModelContainerGetNumOutputs(self._container, ctypes.byref(outputs)))
        self._outputs, self._run = outputs.value, library.AOTInductorModelContainerRun
        array, size = ctypes.c_void_p, ctypes.c_size_t
        self._run.argtypes = [ctypes.c_void_p, array, size, array, size, ctypes.c_void_p, ctypes.c_void_p]

    def run(self, inputs: list[Tensor]) -> list[Tensor]:
        """As `LibraryRunner.run`: the library owns the handles of its inputs, and whoever calls it those of its outputs.

        Raises:
            RuntimeError: the library failed; it has said why on standard error.
        """
        handles = [_pointer_of(capsule, None) for capsule in _aoti.unsafe_alloc_void_ptrs_from_tensors(inputs)]
        given, made = (ctypes.c_void_p * len(handles))(*handles), (ctypes.c_void_p * self._outputs)()
        self._check(self._run(self._container, given, len(handles), made, self._outputs, None, None))
        return [_aoti.alloc_tensor_by_stealing_from_void_ptr(_capsule_of(handle, None, None)) for handle in made]

    def _check(self, error: int) -> None:
        if error:
            raise RuntimeError(f"the compiled layer {self._file} failed (error {error})")
