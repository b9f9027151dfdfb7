"""The locked requirements of a bundle: complete, exact, and other on CUDA by PyTorch alone."""

import importlib.metadata
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from draftwell.registry.bundles.requirements import closure, locked, runtime_requirements
from tests.support.errors import raises_code


def pins(text: str) -> dict[str, str]:
    """name → specifier of a requirements file, on Linux."""
    found = map(
        Requirement, (line for line in text.splitlines() if line and not line.startswith("#"))
    )
    return {
        canonicalize_name(r.name): str(r.specifier)
        for r in found
        if r.marker is None or r.marker.evaluate({"sys_platform": "linux"})
    }


def test_every_version_is_exact_and_the_one_that_is_installed() -> None:
    for name, version in pins(locked("cpu").text).items():
        if name != "torch":
            assert version == f"=={importlib.metadata.version(name)}"


def test_it_holds_what_its_packages_need_and_nothing_of_the_pipeline() -> None:
    found = set(pins(locked("cpu").text))
    assert {
        "torch",
        "transformers",
        "tokenizers",
        "huggingface-hub",
        "fastapi",
        "starlette",
        "uvicorn",
        "h11",
        "pydantic-core",
    } <= found
    assert (
        not {"prefect", "mlflow", "sqlalchemy", "datasets", "scikit-learn", "pytest", "draftwell"}
        & found
    )
    for name in found:  # nothing is left for pip to choose
        for line in importlib.metadata.requires(name) or []:
            needed = Requirement(line)
            if needed.marker is None or needed.marker.evaluate({"extra": ""}):
                assert canonicalize_name(needed.name) in found, f"{name} needs {needed}"


def test_devices_differ_in_torch_alone() -> None:
    cpu, cuda = pins(locked("cpu").text), pins(locked("cuda").text)
    assert cpu.pop("torch") == cuda.pop("torch") + "+cpu"
    assert cpu == cuda


def test_two_times_the_same_text() -> None:
    assert locked("cpu") == locked("cpu")
    assert runtime_requirements() == sorted(set(runtime_requirements()))


@pytest.fixture
def installed(
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[[dict[str, tuple[str, list[str]]]], None]:
    """Let other packages be installed than there are: name → version and requirements."""

    def install(packages: dict[str, tuple[str, list[str]]]) -> None:
        def distribution(name: str) -> SimpleNamespace:
            if name not in packages:
                raise importlib.metadata.PackageNotFoundError(name)
            version, requires = packages[name]
            return SimpleNamespace(version=version, requires=requires)

        monkeypatch.setattr(importlib.metadata, "distribution", distribution)
        monkeypatch.setattr(importlib.metadata, "requires", lambda name: packages[name][1])

    return install


def test_extras_markers_and_circles(installed: Callable[..., None]) -> None:
    installed(
        {
            "a": ("1", ["B_b[fast]>=2", 'never; python_version < "3"', 'other; extra == "more"']),
            "b-b": ("2.1", ['speed; extra == "fast"', "a", 'unasked; extra == "slow"']),
            "speed": ("3", []),
        }
    )
    assert closure(["a"]) == {"a": "1", "b-b": "2.1", "speed": "3"}


def test_an_extra_that_is_asked_for_later_counts_too(installed: Callable[..., None]) -> None:
    installed(
        {
            "a": ("1", ["c", "b"]),
            "b": ("1", ["c[x]"]),
            "c": ("1", ['d; extra == "x"']),
            "d": ("1", []),
        }
    )
    assert closure(["a"]) == {"a": "1", "b": "1", "c": "1", "d": "1"}


def test_a_cpu_bundle_that_is_built_beside_cuda_libraries_leaves_them_out(
    installed: Callable[..., None],
) -> None:
    installed(
        {
            "draftwell": (
                "0.1.0",
                ["torch>=2.11", 'prefect; extra == "pipeline"', 'fastapi; extra == "server"'],
            ),
            "torch": ("2.11.0+cu130", ["nvidia-cublas==13.1", "triton==3.6", "filelock"]),
            "nvidia-cublas": ("13.1", []),
            "triton": ("3.6", []),
            "filelock": ("3", []),
            "fastapi": ("0.150.0", []),
        }
    )
    assert pins(locked("cpu").text) == {
        "torch": "==2.11.0+cpu",
        "filelock": "==3",
        "fastapi": "==0.150.0",
    }
    assert pins(locked("cuda").text) == {
        "torch": "==2.11.0+cu130",
        "filelock": "==3",
        "fastapi": "==0.150.0",
        "nvidia-cublas": "==13.1",
        "triton": "==3.6",
    }


@pytest.mark.parametrize(
    ("installed_torch", "measured", "pinned", "index"),
    [
        # the gate measured with what is here
        (
            "2.13.0+cu130",
            "2.11.0+cu128",
            "2.13.0+cu130",
            "https://download.pytorch.org/whl/cu130",
        ),
        (
            "2.13.0+cpu",
            "2.11.0+cu128",
            "2.11.0+cu128",
            "https://download.pytorch.org/whl/cu128",
        ),
        ("2.13.0+cpu", "2.13.0+cpu", "2.13.0", None),
        ("2.13.0+cpu", "2.13.x (nightly)", "2.13.0", None),
        ("2.13.0+cpu", None, "2.13.0", None),
    ],
)
def test_cuda_takes_the_build_of_torch_that_was_measured(
    installed: Callable[..., None],
    installed_torch: str,
    measured: str | None,
    pinned: str,
    index: str | None,
) -> None:
    installed({"draftwell": ("0.1.0", ["torch"]), "torch": (installed_torch, [])})
    lock = locked("cuda", measured={"torch": measured} if measured else {})
    assert (pins(lock.text)["torch"], lock.index) == (f"=={pinned}", index)


def test_a_torch_that_the_runtime_does_not_take_is_not_pinned(
    installed: Callable[..., None],
) -> None:
    installed({"draftwell": ("0.1.0", ["torch>=2.11"]), "torch": ("2.13.0+cpu", [])})
    lock = locked("cuda", measured={"torch": "2.9.1+cu128"})
    assert lock.versions["torch"] == "2.13.0"
    lock = locked("cuda", measured={"torch": "2.11.0+cu128"})
    assert lock.versions["torch"] == "2.11.0+cu128"


def test_pypis_own_build_of_torch_is_taken_from_there(installed: Callable[..., None]) -> None:
    installed(
        {
            "draftwell": ("0.1.0", ["torch"]),
            "torch": ("2.13.0", ["nvidia-cublas"]),
            "nvidia-cublas": ("13", []),
        }
    )
    lock = locked("cuda")
    assert (lock.versions["torch"], lock.index) == ("2.13.0", None)


def test_what_is_not_installed_is_named(installed: Callable[..., None]) -> None:
    installed({"a": ("1", ["missing-thing"])})
    with raises_code("missing_package", "missing-thing", "pip install"):
        closure(["a"])
