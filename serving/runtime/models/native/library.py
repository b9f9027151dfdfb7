"""The library of the layers: compiled once for a kind of machine, kept in the user's cache under
its digest, verified and loaded without a compiler.

It knows no model: sizes, weights and slots are arguments of its calls.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Literal

from draftwell.serving.artifacts.compiled_libraries import COMPILED, check_own, own_folder
from draftwell.serving.device import cpu_flags
from draftwell.serving.errors import DraftwellError
from draftwell.serving.files import file_lock, sha256_file

log = logging.getLogger(__name__)

Compile = Literal["auto", "on", "off"]
"""The library: compiled now where it is missing, and torch's layers where that fails (auto); or an
error (on); never (off)."""
SOURCES = Path(__file__).parent
SOURCE = SOURCES / "decoder.cpp"
OPTIONS = (
    "-O2",
    "-std=c++17",
    "-march=native",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fopenmp",
    "-fPIC",
    "-shared",
)
SECONDS = 150
"""After which a compiler has hung: it takes two."""


def key() -> str:
    """What the library depends on: its source and options, and the processor's instructions."""
    files = [*sorted(SOURCES.glob("*.h")), SOURCE]
    text = repr((OPTIONS, cpu_flags())).encode()
    return hashlib.sha256(b"".join([text, *(file.read_bytes() for file in files)])).hexdigest()[:32]


def find_library(wanted: Compile, folders: Sequence[Path]) -> ctypes.CDLL | None:
    """The library of this kind of machine, or None.

    Args:
        folders: where it may be besides this machine's own.
    Raises:
        DraftwellError: it is wanted, and there is none and none can be made.
    """
    if wanted == "off":
        return None
    for file in filter(None, map(find, folders)):
        try:
            return load(file)
        except (DraftwellError, OSError) as error:  # one that needs a newer C library, say
            log.info("this machine's own layers are used: %s", error)
    try:
        return _load_own()
    except (DraftwellError, OSError) as error:
        if wanted == "on":
            raise
        log.warning("%s; layers run by torch, whose answers depend on what runs beside them", error)
        return None


def _load_own() -> ctypes.CDLL:
    """This machine's library, compiled where it is missing or damaged."""
    folder = own_folder(COMPILED, key())
    if (file := own_library()) is None:
        with file_lock(folder / "lock"):  # of several starts one compiles
            file = own_library() or build(folder)
    try:
        return load(file)
    except DraftwellError as error:
        log.warning("layers are compiled again: %s", error)
    made = build(folder)
    if made != file:
        file.unlink(missing_ok=True)
    return load(made)


def own_library() -> Path | None:
    """Where this machine's library is; None where it was not compiled yet.

    Raises:
        DraftwellError: others may have written it (`foreign_library`).
    """
    if (file := find(own_folder(COMPILED, key()).parent)) is not None:
        check_own(file)
    return file


def find(folder: Path) -> Path | None:
    """The library of this kind of machine in a folder of libraries."""
    return next((folder / key()).glob(f"{'?' * 64}.so"), None)


def compiler() -> str | None:
    """Path of the C++ compiler, or None."""
    return shutil.which(command()[0])


def command() -> list[str]:
    """How the C++ compiler is called: `$CXX`, else g++."""
    return shlex.split(os.environ.get("CXX", "")) or ["g++"]


def build(folder: Path) -> Path:
    """Compile the library into a folder, in seconds; a compiler that fails is tried twice.

    Returns:
        the file, which is named by its sha256.
    Raises:
        DraftwellError: there is no C++ compiler, or it fails.
    """
    if compiler() is None:
        raise DraftwellError(
            "layers cannot be compiled, there is no C++ compiler here: install g++, or load the "
            "pair with compile=off",
            code="no_compiler",
        )
    try:
        return _compiled(folder)
    except DraftwellError as error:
        log.warning("trying once more: %s", error)
    return _compiled(folder)


def _compiled(folder: Path) -> Path:
    try:
        with tempfile.TemporaryDirectory(dir=folder) as place:
            made = Path(place) / "layers.so"
            subprocess.run(
                [*command(), *OPTIONS, "-o", str(made), str(SOURCE)],
                timeout=SECONDS,
                check=True,
                capture_output=True,
                text=True,
            )
            made.chmod(0o600)
            return made.replace(folder / f"{sha256_file(made)}.so")
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        raise DraftwellError(
            f"the layers could not be compiled ({said[:200]!r}): load the pair with compile=off",
            code="compile_failed",
        ) from error


def verify(file: Path) -> None:
    """Refuse a library whose sha256 is not its name.

    Raises:
        DraftwellError: `forged_library`.
    """
    if sha256_file(file) != file.stem:
        raise DraftwellError(
            f"{file} does not have the sha256 of its name (it was changed, cut short, or put there "
            "by somebody): delete it",
            code="forged_library",
        )


@cache
def load(file: Path) -> ctypes.CDLL:
    """The library of a file, which is verified first.

    Raises:
        DraftwellError: it is not what its name says (`forged_library`), or it does not run here
            (`broken_compiled_layer`).
    """
    verify(file)
    try:
        library = ctypes.CDLL(str(file))
        library.draftwell_lanes.restype = ctypes.c_int64
        library.draftwell_norm.argtypes = [
            *[ctypes.c_void_p] * 3,
            *[ctypes.c_int64] * 2,
            ctypes.c_float,
        ]
        library.draftwell_product.argtypes = [*[ctypes.c_void_p] * 3, ctypes.c_int64]
        library.draftwell_product.restype = library.draftwell_layers.restype = ctypes.c_int64
        library.draftwell_unpacks.restype = library.draftwell_choose_table.restype = ctypes.c_int64
        library.draftwell_choose_table.argtypes = [
            ctypes.c_void_p,
            *[ctypes.c_int64] * 2,
            *[ctypes.c_void_p] * 2,
        ]
        library.draftwell_shorten.argtypes = [
            ctypes.c_void_p,
            *[ctypes.c_int64] * 2,
            *[ctypes.c_void_p] * 4,
        ]
        library.draftwell_shorten.restype = None
        library.draftwell_dots.argtypes = [*[ctypes.c_void_p] * 3, *[ctypes.c_int64] * 3]
    except (OSError, AttributeError) as error:
        raise DraftwellError(
            f"the compiled layers {file} do not run here ({error}): load the pair with compile=off",
            code="broken_compiled_layer",
        ) from error
    return library
