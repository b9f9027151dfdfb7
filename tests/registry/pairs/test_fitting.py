"""Pairs that fit no device here are for export only, and say so before anything is downloaded."""

from __future__ import annotations

from pathlib import Path

import pytest

import draftwell.registry.pairs.fitting as fitting
from draftwell.flows.workspace import Workspace
from draftwell.registry.pairs import PairSpec, find_pair, list_pairs
from draftwell.registry.pairs.fitting import check_fits, device_gigabytes, export_only, too_large
from tests.support.errors import raises_code
from tests.support.patching import replace_everywhere


def pair(gigabytes: float | None, *devices: str) -> PairSpec:
    return PairSpec.model_validate(
        {
            "name": "some",
            "description": "d",
            "licence": "l",
            "target": {"path": "t"},
            "gigabytes": gigabytes,
            "devices": devices or ("cpu", "cuda"),
        }
    )


@pytest.mark.parametrize(
    ("spec", "memory", "why"),
    [
        (
            pair(144, "cuda"),
            {"cpu": 500.0, "cuda": 80.0},
            "its weights take 144 GB in bfloat16, with slots about 158, and cuda has 80 GB",
        ),
        (pair(144, "cuda"), {"cpu": 500.0}, "it is for cuda, which is not here"),
        (pair(70, "cuda"), {"cpu": 8.0, "cuda": 80.0}, None),
        (pair(4.4), {"cpu": 16.0}, None),
        (
            pair(40),
            {"cpu": 16.0, "cuda": 24.0},
            "its weights take 40 GB in bfloat16, with slots about 44, and cuda has 24 GB",
        ),
        (pair(40), {"cpu": 16.0, "cuda": 80.0}, None),
        (pair(None), {"cpu": 1.0}, None),
    ],
)
def test_a_pair_runs_where_one_device_holds_it(
    spec: PairSpec, memory: dict[str, float], why: str | None
) -> None:
    found = export_only(spec, memory)
    assert (found or "").endswith(why or "")
    assert (found is None) is (why is None)


@pytest.mark.parametrize(
    ("number_format", "takes"),
    [
        (None, "40 GB in bfloat16"),
        ("float16", "40 GB in float16"),
        ("float32", "80 GB in float32"),
        ("bfloat16-int8", None),
        ("bfloat16-int4", None),
    ],
)
def test_the_number_format_decides_what_weights_take(
    number_format: str | None, takes: str | None
) -> None:
    found = too_large(pair(40), "cpu", {"cpu": 30.0}, number_format)
    assert (found is None) is (takes is None)
    assert (takes or "") in (found or "")


def test_a_containers_limit_counts_where_it_is_below_the_machines_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert fitting.memory_limit(tmp_path) == float("inf")
    limit = tmp_path / "sys" / "fs" / "cgroup" / "memory.max"
    limit.parent.mkdir(parents=True)
    for text, expected in (("2000\n", 2000), ("max\n", float("inf"))):
        limit.write_text(text)
        assert fitting.memory_limit(tmp_path) == expected
    monkeypatch.setattr(fitting, "memory_limit", lambda: 5 * 10**8)
    assert device_gigabytes()["cpu"] == 0.5


def test_the_default_pair_runs_here_and_the_catalogue_says_how_large_the_others_are() -> None:
    assert device_gigabytes()["cpu"] > 1
    assert export_only(find_pair("default")) is None
    assert [
        spec.name for spec in list_pairs() if spec.name != "smollm2-135m" and spec.gigabytes is None
    ] == []
    for name in ("llama3-1b-70b", "qwen2.5-7b-72b"):
        assert too_large(find_pair(name), "cuda", {"cuda": 80.0}), "on one GPU of 80 GB"


def test_what_does_not_fit_is_refused_before_it_is_fetched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DRAFTWELL_HOME", str(tmp_path))
    replace_everywhere(
        monkeypatch, fitting, "device_gigabytes", lambda: {"cpu": 16.0, "cuda": 80.0}
    )
    monkeypatch.setattr(
        "draftwell.flows.workspace.fetch", lambda *words, **options: pytest.fail("it was fetched")
    )
    space = Workspace("llama3-1b-70b", device="cuda")
    with raises_code(
        "pair_too_large", "llama3-1b-70b is for export only", "144 GB", "80 GB", "draftwell export"
    ):
        space.load(device="cuda:0")
    check_fits(find_pair("qwen3-1.7b-32b"), "cuda")
