"""Which release the gate judges, and what its exit code says: no success where a release was
expected and none was judged."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftwell.flows.cli.gate_run import exit_code, release_to_judge
from draftwell.flows.context import StepContext
from draftwell.registry.pairs import fetch, find_pair
from draftwell.registry.promotion import promote
from draftwell.registry.releases import ReleaseVersion, find_release, gate_record, record_gate
from draftwell.registry.store import Store
from draftwell.serving.bundle.verdict import Check, GateVerdict
from tests.support.errors import raises_code
from tests.support.loop import publishing

OPEN = Check("speedup", 1.02, 1.0, False, "1.02 x autoregressive", enough=False, prompts_needed=40)
GOOD = Check("speedup", 1.2, 1.0, True, "1.20 x autoregressive")
BAD = Check("speedup", 0.8, 1.0, False, "0.80 x autoregressive")


@pytest.fixture
def tiny(own_stores: Path, empty_database: Path, pair_file: Path) -> Callable[..., ReleaseVersion]:
    """Register a release of the tiny pair for a device."""
    from draftwell.registry.connection import SQLITE, default_uri

    database = Path(default_uri().removeprefix(SQLITE))
    database.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(empty_database, database)
    spec = find_pair(str(pair_file))

    def make(device: str = "cpu") -> ReleaseVersion:
        return publishing.release(Store(), spec, fetch(spec), own_stores / device, device=device)

    return make


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str | None, Any]]:
    """(device, release) of everything that would be measured; all of it passes."""
    import draftwell.flows.cli.gate_run

    seen: list[tuple[str | None, Any]] = []

    def passing(
        step: Any, prompts: Any, settings: Any, *, alias: Any, **given: Any
    ) -> dict[str, Any]:
        seen.append((step.workspace, alias))
        return {"release": alias, "verdict": GateVerdict((GOOD,))}

    monkeypatch.setattr(
        draftwell.flows.cli.gate_run,
        "open_pair",
        lambda *names, **options: StepContext(options["device"], None),
    )  # type: ignore[arg-type]
    monkeypatch.setattr(draftwell.flows.cli.gate_run, "gate_release", passing)
    return seen


@pytest.mark.parametrize(
    ("checks", "code"), [((GOOD,), 0), ((GOOD, OPEN), 3), ((OPEN, BAD), 1), ((BAD,), 1), ((), 1)]
)
def test_only_what_passed_is_a_success(checks: tuple[Check, ...], code: int) -> None:
    assert exit_code([GateVerdict((GOOD,)), GateVerdict(checks)]) == code


def test_a_fresh_clone_judges_the_counts_alone_and_asks_no_registry(own_stores: Path) -> None:
    assert release_to_judge("tiny", "cpu", None, expected=False) is None
    assert not list(own_stores.rglob("mlflow.db"))
    with raises_code("no_candidate", "release.tiny.cuda has no candidate"):
        release_to_judge("tiny", "cuda", None, expected=True)
    assert not list(own_stores.rglob("mlflow.db"))


def test_a_registry_without_this_pair_is_like_a_fresh_clone(
    tiny: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert release_to_judge("another", "cpu", None, expected=False) is None
    assert "counts alone" in capsys.readouterr().err
    with raises_code("no_candidate"):
        release_to_judge("another", "cpu", None, expected=True)


def test_a_candidate_for_another_device_is_named_and_not_passed_over(
    tiny: Callable[..., ReleaseVersion],
) -> None:
    """As after a tuning on a machine with CUDA, and a gate for the CPU."""
    tiny("cuda")
    assert release_to_judge("tiny", "cuda", None, expected=False) == 1
    with raises_code(
        "no_candidate",
        "release.tiny.cpu has no candidate",
        "for cuda it has candidate = 1 (device cuda)",
        "counts_only",
    ):
        release_to_judge("tiny", "cpu", None, expected=False)
    with raises_code("not_registered", "device cuda"):
        release_to_judge("tiny", "cpu", "3", expected=False)


def test_releases_without_a_candidate_are_no_fresh_clone(
    tiny: Callable[..., ReleaseVersion],
) -> None:
    tiny()
    store = Store()
    store.client.delete_registered_model_alias("release.tiny.cpu", "candidate")
    with raises_code("no_candidate", "for cpu it has releases without an alias (--release)"):
        release_to_judge("tiny", "cpu", None, expected=False)
    assert release_to_judge("tiny", "cpu", "1", expected=False) == 1


def test_not_enough_evidence_is_kept_as_such_and_not_promoted(
    tiny: Callable[..., ReleaseVersion],
) -> None:
    made, store = tiny(), Store()
    check = Check(
        name="speedup", value=1.02, threshold=1.0, passed=False, enough=False, prompts_needed=40
    )
    record_gate(
        store, publishing.verdict(made).model_copy(update={"passed": False, "checks": (check,)})
    )
    again = find_release(store, "tiny", "cpu", 1)
    kept = gate_record(again)
    assert kept is not None
    assert (kept.result, again.published.tags["gate"], kept.undecided) == (
        "not enough evidence",
        "not enough evidence",
        False,
    )
    assert "challenger" not in store.get_aliases("release", "tiny.cpu")
    with raises_code(
        "not_gated", "not enough evidence (speedup; an estimated 40 prompts would decide)"
    ):
        promote(store, "tiny", "cpu", 1)


@pytest.mark.usefixtures("cuda_host")
def test_a_tuning_on_a_cuda_host_is_judged_by_a_plain_gate(
    tiny: Callable[..., ReleaseVersion],
    run: Callable[..., Any],
    pair_file: Path,
    judged: list[tuple[str | None, Any]],
) -> None:
    """The same default device for both; before, the gate took the CPU, found nothing and was
    green."""
    tiny("cuda")
    done = run(f"gate --pair {pair_file}")
    assert done.exit_code == 0, (done.output, done.exception)
    assert judged == [("cuda", 1)]
    assert "device: cuda, picked by default" in done.stderr
    done = run(f"gate --pair {pair_file} --device cpu")
    assert (done.exit_code, len(judged)) == (2, 1)
    assert "for cuda it has candidate = 1 (device cuda)" in done.stderr


@pytest.mark.usefixtures("cuda_host")
def test_promote_and_deploy_take_the_same_device(
    tiny: Callable[..., ReleaseVersion], run: Callable[..., Any], pair_file: Path
) -> None:
    made = tiny("cuda")
    record_gate(Store(), publishing.verdict(made))
    assert run(f"release promote --pair {pair_file}").exit_code == 0
    assert Store().get_aliases("release", "tiny.cuda")["champion"] == 1
    assert Store().get_aliases("acceptance_table", "tiny") == {
        "candidate-cuda": 1,
        "challenger-cuda": 1,
        "champion-cuda": 1,
    }
    done = run(f"release promote --pair {pair_file} --set device=cpu")
    assert done.exit_code == 2
    assert "device cuda" in done.stderr


def test_a_champion_of_each_device_keeps_its_own_artifacts(
    tiny: Callable[..., ReleaseVersion],
) -> None:
    """Both name the same registered tables."""
    store = Store()
    for device in ("cpu", "cuda"):
        promote(store, "tiny", device, 1, publishing.verdict(tiny(device)))
    known = store.get_aliases("acceptance_table", "tiny")
    assert {name for name in known if name.startswith("champion")} == {
        "champion-cpu",
        "champion-cuda",
    }
