"""The library of the layers: compiled once for a kind of machine, kept in the user's cache,
loaded without a compiler.

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
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Literal

from draftwell.serving.artifacts.compiled_libraries import LIBRARY, libraries_folder
from draftwell.serving.device import cpu_flags
from draftwell.serving.errors import DraftwellError

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
SECONDS = 300
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
    try:
        for folder in folders:
            with suppress(DraftwellError, OSError):  # one that needs a newer C library
                if (file := folder / key() / LIBRARY).is_file():
                    return load(file)
        own = find([libraries_folder()])
        if not own.is_file():
            build(own)
        check_owner(own)
        return load(own)
    except (DraftwellError, OSError, RuntimeError) as error:
        if wanted == "on":
            raise
        log.warning("%s; layers run by torch, whose answers depend on what runs beside them", error)
        return None


def check_owner(file: Path) -> None:
    """Refuse to run code that others may have written.

    Raises:
        DraftwellError: another user owns the file or its folder, or everybody may write to it
            (`foreign_library`).
    """
    for place in (file, file.parent):
        found = place.stat()
        if found.st_uid not in (0, os.getuid()) or found.st_mode & 0o002:
            raise DraftwellError(
                f"{place} belongs to another user, or everybody may write to it: delete it, or set "
                "XDG_CACHE_HOME to a folder of your own",
                code="foreign_library",
            )


def find(folders: Sequence[Path]) -> Path:
    """Where the library is: in the first of the folders that has it; if none has, where it will be,
    in the last."""
    files = [folder / key() / LIBRARY for folder in folders]
    return next((file for file in files if file.is_file()), files[-1])


def compiler() -> str | None:
    """Path of the C++ compiler, or None."""
    return shutil.which(command()[0])


def command() -> list[str]:
    """How the C++ compiler is called: `$CXX`, else g++."""
    return shlex.split(os.environ.get("CXX", "")) or ["g++"]


def build(file: Path) -> None:
    """Compile the library, in seconds.

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
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=file.parent) as folder:
            made = Path(folder) / LIBRARY
            subprocess.run(
                [*command(), *OPTIONS, "-o", str(made), str(SOURCE)],
                timeout=SECONDS,
                check=True,
                capture_output=True,
                text=True,
            )
            made.chmod(0o755)
            file.parent.chmod(0o755)
            made.replace(file)
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        raise DraftwellError(
            f"the layers could not be compiled ({said[:200]!r}): load the pair with compile=off",
            code="compile_failed",
        ) from error


@cache
def load(file: Path) -> ctypes.CDLL:
    """The library of a file.

    Raises:
        DraftwellError: it is broken, or of another machine (`broken_compiled_layer`).
    """
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
        library.draftwell_dots.argtypes = [*[ctypes.c_void_p] * 3, *[ctypes.c_int64] * 3]
    except (OSError, AttributeError) as error:
        raise DraftwellError(
            f"the compiled layers {file} cannot be loaded: delete the folder; they are then "
            "compiled again",
            code="broken_compiled_layer",
        ) from error
    return library
