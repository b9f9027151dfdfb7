"""`draftwell release show`: from a row or a version back to the traces, over the registry and
over what lies on this machine."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from draftwell.flows.steps.lineage import Node
from draftwell.registry.promotion import promote, rollback
from draftwell.registry.releases import create_release
from draftwell.registry.store import Store
from draftwell.serving.artifacts.base import Provenance, digest_of
from draftwell.serving.artifacts.correction_memory import CorrectionMemory
from draftwell.serving.recording.trace import TraceSet
from tests.support.loop.publishing import config, publish, table, verdict, verifier
from tests.support.loop.tiny_files import snapshot
from tests.support.loop.trace_sets import make, row

MARK = "f" * 64


@pytest.fixture
def home(own_stores: Path, empty_database: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with an empty registry; the working directory is an empty folder beside it."""
    shutil.copyfile(empty_database, own_stores / "mlflow.db")
    (own_stores / "work").mkdir()
    monkeypatch.chdir(own_stores / "work")
    return own_stores / "draftwell"


@pytest.fixture
def space(home: Path) -> Path:
    """The workspace of the pair tiny."""
    return home / "pairs" / "tiny" / "float32"


def collected(space: Path) -> TraceSet:
    return make(space / "traces", [[row(0), row(1)]])


def made_from(traces: TraceSet, artifact: Any) -> Any:
    artifact.provenance.trace_digest = traces.digest()
    return artifact


def write(name: str, **entries: dict[str, Any]) -> Path:
    path = Path(name)
    path.write_text(json.dumps({"pair": "tiny", "strategies": entries}))
    return path


def walked(run: Any, what: object) -> list[dict[str, Any]]:
    done = run(f"release show {what} --json")
    assert done.exit_code == 0, (done.output, done.exception)
    return list(json.loads(done.stdout))


def refused(run: Any, what: object, *words: str) -> None:
    before = snapshot(Path.cwd())
    done = run("release show", what)
    assert (done.exit_code, done.stdout) == (2, ""), (done.output, done.exception)
    (line,) = done.stderr.strip().splitlines()
    for word in words:
        assert word in line
    assert snapshot(Path.cwd()) == before


def test_a_row_leads_over_config_and_table_to_the_traces(
    run: Any, home: Path, space: Path, tmp_path: Path
) -> None:
    traces = collected(space)
    known = publish(Store(), made_from(traces, table(MARK)), tmp_path / "table")
    chosen = publish(
        Store(),
        made_from(traces, config(MARK, {"acceptance_table": known.digest})),
        tmp_path / "config",
    )
    report = write(
        "bench.json",
        spide={
            "strategy": "spide",
            "parameters": {"gamma": 4},
            "artifacts": {"acceptance_table": known.digest},
            "config_digest": chosen.digest,
            "trace_digest": traces.digest(),
        },
    )
    (line,) = walked(run, report)
    assert (line["what"], line["name"], line["where"]) == ("row", "spide(gamma=4)", None)
    (step,) = line["made_from"]  # table and traces are the config's: they are not told twice
    assert (step["name"], step["digest"], step["where"]) == (
        "decoding_config.tiny version 1",
        chosen.digest,
        "registry",
    )
    of_table, of_config = step["made_from"]
    assert (of_table["name"], of_table["git_commit"]) == (
        "acceptance_table.tiny version 1",
        "c" * 40,
    )
    assert [trace["where"] for trace in (of_config, *of_table["made_from"])] == [
        str(traces.folder)
    ] * 2
    assert of_config["digest"] == traces.digest()

    shown = run("release show", report).stdout
    order = [
        shown.index(words)
        for words in (
            "spide(gamma=4)",
            "decoding_config.tiny version 1",
            "acceptance_table.tiny version 1",
            f"trace {traces.digest()[:12]} ({traces.folder})",
        )
    ]
    assert order == sorted(order)
    assert f"(registry, commit {'c' * 12})" in shown


def test_what_the_registry_lacks_is_found_in_the_workspace_or_said_not_to_be_here(
    run: Any, home: Path, space: Path
) -> None:
    kept = made_from(collected(space), table(MARK))
    kept.save(space / "artifacts" / "acceptance_table")
    report = write(
        "bench.json",
        autoregressive={"artifacts": {}, "config_digest": None, "trace_digest": None},
        spide={"artifacts": {"acceptance_table": kept.digest, "hardware_profile": None}},
        sprinter={"artifacts": {"verifier": "9" * 64}, "trace_digest": "8" * 64},
    )
    plain, spide, sprinter = walked(run, report)
    assert plain["made_from"] == []
    in_folder, on_the_spot = spide["made_from"]
    assert (in_folder["where"], in_folder["git_commit"]) == (
        str(space / "artifacts" / "acceptance_table"),
        "c" * 40,
    )
    assert in_folder["made_from"][0]["where"] == str(space / "traces")
    assert (on_the_spot["digest"], on_the_spot["where"]) == (None, "made on the spot, not kept")
    assert [(step["what"], step["where"]) for step in sprinter["made_from"]] == [
        ("verifier", "not here"),
        ("trace", "not here"),
    ]
    assert "verifier 999999999999 (not here)" in run("release show", report).stdout


@pytest.mark.parametrize("what", ["decoding_config.tiny@champion", "decoding_config.tiny/1"])
def test_a_version_leads_to_the_traces(run: Any, home: Path, tmp_path: Path, what: str) -> None:
    known = publish(Store(), table(MARK), tmp_path / "table")
    chosen = config(MARK, {"acceptance_table": known.digest, "verifier": "9" * 64})
    Store().set_alias(publish(Store(), chosen, tmp_path / "config"), "champion")
    (top,) = walked(run, what)
    assert top["name"] == "decoding_config.tiny version 1"
    of_table, unknown = top["made_from"]
    assert of_table["made_from"] == [Node("trace", "7" * 64, "7" * 64, "not here").as_json()]
    assert (unknown["digest"], unknown["where"]) == ("9" * 64, "not here")


def test_of_a_release_it_says_who_made_which_champion(
    run: Any, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "anna")
    store = Store()
    for number in (1, 2):
        publish(store, table(MARK, number), tmp_path / str(number))
        made = create_release(store, "tiny", "cpu", {"acceptance_table": number}, {}, {})
        promote(store, "tiny", "cpu", number, verdict(made, beside=number - 1 or None))
    rollback(store, "tiny", "cpu", "answers are cut")
    shown = run("release show release.tiny.cpu/2").stdout.splitlines()
    assert "release 1 instead of 2, rollback by anna@" in shown[-3]
    assert shown[-3].endswith(": answers are cut")
    assert "release 1, promotion by anna@" in shown[-1]


def test_a_memory_that_no_traces_were_read_for_leads_to_none(
    run: Any, home: Path, tmp_path: Path
) -> None:
    """`calibrate` decodes prompts for it."""
    memory = CorrectionMemory(
        {(1, 2): 3},
        Provenance(pair="tiny", fingerprint=MARK, parameters={"prompts_digest": "5" * 64}),
    )
    known = publish(Store(), memory, tmp_path / "memory")
    (top,) = walked(run, "correction_memory.tiny/1")
    assert (top["digest"], top["made_from"]) == (known.digest, [])
    report = write(
        "bench.json", csd={"artifacts": {"correction_memory": known.digest}, "trace_digest": None}
    )
    (line,) = walked(run, report)
    assert [(step["what"], step["made_from"]) for step in line["made_from"]] == [
        ("correction_memory", [])
    ]


def test_of_several_pairs_with_the_same_data_the_right_ones_version_is_found(
    run: Any, home: Path, tmp_path: Path
) -> None:
    first, second = table(MARK), table("e" * 64)
    second.provenance.trace_digest = "6" * 64
    digest = publish(Store(), first, tmp_path / "one").digest
    assert publish(Store(), second, tmp_path / "two").digest == digest
    publish(Store(), config(MARK, {"acceptance_table": digest}), tmp_path / "config")
    (top,) = walked(run, "decoding_config.tiny/1")
    assert [step["digest"] for step in top["made_from"][0]["made_from"]] == ["7" * 64]


def test_an_alias_of_the_pair_is_its_name(run: Any, home: Path) -> None:
    refused(run, "verifier.default@champion", "no alias champion of verifier.smollm2-135m")
    refused(run, "release.default.cpu@champion", "no alias champion of release.smollm2-135m.cpu")
    refused(run, "verifier.qwen2.5-of-mine/7", "no version 7 of verifier.qwen2.5-of-mine")


def test_a_tuning_report_leads_over_its_choice(run: Any, home: Path, space: Path) -> None:
    choice = config(MARK, {"verifier": "9" * 64})
    choice.save(space / "cpu" / "artifacts" / "decoding_config")
    Path("tuning.json").write_text(
        json.dumps(
            {
                "pair": "tiny",
                "strategy": "spide",
                "parameters": {"gamma": 4},
                "config_digest": choice.digest,
                "trials": [],
                "artifacts": {"verifier": "9" * 64, "acceptance_table": "8" * 64},
                "trace_digest": "7" * 64,
            }
        )
    )
    (line,) = walked(run, "tuning.json")
    assert line["name"] == "choice spide(gamma=4)"
    assert [(step["what"], step["where"]) for step in line["made_from"]] == [
        ("decoding_config", str(space / "cpu" / "artifacts" / "decoding_config")),
        ("acceptance_table", "not here"),
        ("trace", "not here"),
    ]


def test_artifacts_that_a_pair_ships_with_are_found(run: Any, home: Path) -> None:
    from draftwell.registry.pairs import catalogue

    shipped = (
        Path(catalogue.__file__).parent
        / "smollm2_135m"
        / "artifacts"
        / "bfloat16"
        / "acceptance_table"
    )
    report = write("bench.json", spide={"artifacts": {"acceptance_table": digest_of(shipped)}})
    (line,) = walked(run, report)
    assert line["made_from"][0]["where"] == str(shipped)


def test_neighbours_that_are_broken_do_not_stand_in_the_way(
    run: Any, home: Path, space: Path
) -> None:
    """Artifacts and traces of other pairs, of which nothing is asked."""
    kept = made_from(collected(space), table(MARK))
    kept.save(space / "artifacts" / "acceptance_table")
    other = home / "pairs" / "other" / "float32"
    verifier(MARK).save(other / "artifacts" / "verifier")
    (other / "artifacts" / "verifier" / "artifact.json").write_text("{")
    make(other / "traces", [[row(0)]]).shard(0).write_bytes(b"PAR1")
    (line,) = walked(
        run, write("bench.json", spide={"artifacts": {"acceptance_table": kept.digest}})
    )
    assert line["made_from"][0]["made_from"][0]["where"] == str(space / "traces")


def test_mistakes_are_one_line(run: Any, home: Path, tmp_path: Path) -> None:
    whole = write("bench.json", spide={"artifacts": {"acceptance_table": "a" * 64}}).read_text()
    for name, text, words in (
        ("cut.json", whole[: len(whole) // 2], ("cut.json", "only a part")),
        ("empty.json", "", ("empty.json", "only a part")),
        ("list.json", "[]", ("list.json", "not a report")),
        ("verifier.json", '{"auc": 0.8}', ("verifier.json", "not a report")),
        (
            "old.json",
            json.dumps({"pair": "tiny", "strategies": {"spide": {"speedup": 1.2}}}),
            ("old.json", "names no origins"),
        ),
        (
            "none.json",
            json.dumps({"pair": "tiny", "strategies": {}}),
            ("none.json", "names no origins"),
        ),
        (
            "odd.json",
            json.dumps({"pair": "tiny", "strategies": {"spide": {"artifacts": "all"}}}),
            ("odd.json", "names no origins"),
        ),
        ("pair.json", whole.replace("tiny", "a b' or 1"), ("cannot be registered",)),
    ):
        Path(name).write_text(text)
        refused(run, name, *words)
    Path("binary.json").write_bytes(b"\x89PNG\xff\xfe")
    refused(run, "binary.json", "binary.json", "only a part")
    for what, words in (
        ("nowhere.json", ("no file nowhere.json", "kind.pair@alias")),
        (".", ("is a folder",)),
        ("verifier.tiny", ("no file verifier.tiny", "kind.pair@alias")),
        ("verifier.tiny/0x", ("no file",)),
        ("verifier.tiny/4", ("no version 4 of verifier.tiny",)),
        ("verifier.tiny@champion", ("no alias champion",)),
        ("nonsense.tiny/1", ("no version 1 of nonsense.tiny",)),
    ):
        refused(run, what, *words)
