"""How `make test` hands out its files: which share a process, and which begin first."""

from __future__ import annotations

from tests.support.paths import REPO
from tests.support.side_by_side import ONE_PREFECT_SERVER, SharedServer, place_of


def scope_of(nodeid: str) -> str:
    return SharedServer._split_scope(object.__new__(SharedServer), nodeid)


def test_quick_files_that_need_prefects_server_share_a_process() -> None:
    """All of them: one that is missing from the list starts a server of its own in another
    process."""
    texts = {
        str(path.relative_to(REPO)): path.read_text(encoding="utf-8")
        for path in (REPO / "tests" / "flows").rglob("test_*.py")
    }
    quick = {
        name
        for name, text in texts.items()
        if "prefect_server" in text and "\npytestmark = [pytest.mark.slow, " not in text
    }
    assert quick == set(ONE_PREFECT_SERVER)
    assert {scope_of(f"{name}::test_a") for name in quick} == {"prefect"}


def test_other_files_stay_whole_and_are_handed_out_one_by_one() -> None:
    file = "tests/flows/cli/test_cli.py"
    assert {scope_of(f"{file}::test_a[1]"), scope_of(f"{file}::test_b")} == {file}
    assert scope_of("tests/registry/test_store.py::test_a") == "tests/registry/test_store.py"


def test_the_longest_files_begin_first() -> None:
    """Sorted by the number of tests, as xdist does it, a file of eight long ones would begin when
    the others end."""
    names = [
        "tests/docs/test_pages.py",
        "tests/serving/server/test_main.py",
        "tests/flows/cli/test_tune.py",
        ONE_PREFECT_SERVER[0],
    ]
    assert sorted(names, key=place_of) == names[::-1]
