"""Publishing, finding, naming and downloading artifacts."""

import dataclasses
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy.orm
import yaml

from draftwell.registry.cards.model_card import CARDS
from draftwell.registry.lineage import lineage_of
from draftwell.registry.onnx_models import GRAPHS
from draftwell.registry.store import Store
from draftwell.serving.artifacts.acceptance_table import AcceptanceTable
from draftwell.serving.artifacts.base import digest_of
from draftwell.serving.errors import DraftwellError
from tests.support.errors import raises_code
from tests.support.loop.publishing import (
    Make,
    config,
    distilled,
    head,
    memory,
    profile,
    publish,
    table,
    verifier,
)

MARK = "f" * 64


def test_publish_resolve_and_download_return_the_same_artifact(
    put: Make, store: Store, tmp_path: Path
) -> None:
    plot = tmp_path / "curve.png"
    plot.write_bytes(b"png")
    made = put(table(MARK), metrics={"ece": 0.1}, plots=[plot])
    assert (made.kind, made.name, made.version) == ("acceptance_table", "acceptance_table.tiny", 1)
    assert made.fingerprint == MARK
    assert made.tags["trace_digest"] == "7" * 64
    assert store.resolve("acceptance_table", "tiny", 1) == made

    folder = store.download(made, tmp_path / "down" / "table")
    assert sorted(p.name for p in folder.iterdir()) == ["artifact.json", "table.json"]
    assert digest_of(folder) == made.digest
    assert AcceptanceTable.load(folder, fingerprint=MARK).accepted == [3] * 20

    run = store.client.get_run(made.run_id)
    assert run.data.metrics == {"brier": 0.25, "ece": 0.1, "size_mb": run.data.metrics["size_mb"]}
    assert run.data.metrics["size_mb"] == (folder / "table.json").stat().st_size / 1e6
    assert run.data.params == {"prompts": "12"}
    assert run.info.run_name == "acceptance_table.tiny version 1"
    assert [f.path for f in store.client.list_artifacts(made.run_id, "plots")] == [
        "plots/curve.png"
    ]
    assert run.info.status == "FINISHED"


def test_the_same_data_is_registered_once(put: Make, store: Store) -> None:
    first = put(table(MARK))
    assert put(table(MARK)) == first
    # the same counts for another pair of models
    assert put(table("e" * 64)).version == 2
    assert put(table(MARK, accepted=4)).version == 3
    assert [v.version for v in store.versions("acceptance_table", "tiny")] == [1, 2, 3]


def test_data_that_is_made_again_has_the_tags_of_the_last_time(put: Make, store: Store) -> None:
    """The counts are the same, the commit and the traces are not; what a person wrote stays."""
    first = put(table(MARK))
    store.describe(first, store.description(first) + "\n\nNote: kept for Friday.")
    again = table(MARK)
    again.provenance = again.provenance.model_copy(
        update={"git_commit": "d" * 40, "trace_digest": "8" * 64}
    )
    renewed = put(again)
    assert (renewed.version, renewed.tags["git_commit"], renewed.tags["trace_digest"]) == (
        1,
        "d" * 40,
        "8" * 64,
    )
    assert store.resolve("acceptance_table", "tiny", 1).tags == dict(renewed.tags)
    assert store.description(renewed).endswith("Note: kept for Friday.")
    for tenant in ("b" * 12, "a" * 12):
        again.provenance = again.provenance.model_copy(update={"tenants": [tenant]})
        put(again)
    assert store.resolve("acceptance_table", "tiny", 1).tenants == ["a" * 12, "b" * 12]


def test_a_request_that_is_sent_again_costs_no_run(
    put: Make, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer is lost, the HTTP client posts again, and the server makes a second version of the
    same run."""
    real = store.client.create_model_version

    def twice(*arguments, **options):
        real(*arguments, **options)
        return real(*arguments, **options)

    monkeypatch.setattr(store.client, "create_model_version", twice)
    made = put(table(MARK), metrics={"ece": 0.1})
    assert [v.version for v in store.versions("acceptance_table", "tiny")] == [made.version] == [1]
    run = store.client.get_run(made.run_id)
    assert (run.info.lifecycle_stage, run.info.run_name) == (
        "active",
        "acceptance_table.tiny version 1",
    )
    assert digest_of(store.download(made, tmp_path / "down")) == made.digest


@pytest.mark.parametrize(
    "make", [verifier, head, table, config, memory, profile, lambda mark: distilled()]
)
def test_what_the_interface_of_mlflow_shows(put: Make, store: Store, make) -> None:
    made = put(make(MARK))
    source = Path(made.source)
    card = yaml.safe_load((source / "MLmodel").read_text())
    assert card["metadata"]["kind"] == made.kind
    # true, or absent
    assert (
        ("signature" in card) == (source / "input_example.json").is_file() == (made.kind in GRAPHS)
    )
    version = store.client.get_model_version(made.name, "1")
    assert "Pair tiny" in version.description
    for words in (version.description, store.client.get_registered_model(made.name).description):
        assert words.startswith(CARDS[made.kind].what)
        assert [
            part
            for part in ("made.**", "How good it is.**", "How to use it.**")
            if part not in words
        ] == []
    assert dict(store.client.get_registered_model(made.name).tags) == {
        "kind": made.kind,
        "pair": "tiny",
    }
    assert version.tags["pair"] == "tiny"


def test_a_tuned_choice_is_compared_by_what_was_measured(put: Make, store: Store) -> None:
    chosen = config(MARK)
    figure = {
        "strategy": "spide",
        "parameters": {"gamma": 4},
        "speedup": 1.25,
        "speedup_low": 1.1,
        "seconds_per_token": 0.03,
        "target_calls_per_token": None,
    }
    chosen.evidence["confirmation"] = {
        "figures": [{**figure, "strategy": "autoregressive", "speedup": 1.0}, figure]
    }
    made = put(chosen)
    run = store.client.get_run(made.run_id).data
    assert {
        name: run.metrics[name] for name in ("speedup", "speedup_low", "seconds_per_token")
    } == {"speedup": 1.25, "speedup_low": 1.1, "seconds_per_token": 0.03}
    assert run.params == {"strategy": "spide", "parameters.gamma": "4"}
    assert made.tags["strategy"] == "spide"
    of_profile = put(profile(MARK))
    assert of_profile.tags["device_class"] == "cpu-2-cores"
    assert store.metrics(of_profile)["speed_ratio"] == pytest.approx(5.0)


def test_a_description_fits_into_any_database(put: Make, store: Store) -> None:
    """PostgreSQL refuses more than 5000 characters, which SQLite takes."""
    many = {f"figure_{n:04d}": float(n) for n in range(500)}
    made = put(table(MARK), metrics=many)
    shown = store.description(made)
    assert len(shown) <= 5000
    assert "| 486 more | see the run |" in shown  # of 502, brier and size_mb among them
    assert shown.rstrip().endswith("it serves.")
    store.describe(made, "word " * 2000)
    assert len(store.description(made)) == 5000


def test_every_kind_that_can_be_published_has_a_card() -> None:
    from draftwell.serving.artifacts.kinds import KINDS

    assert set(CARDS) == {*KINDS, "release"}


def test_an_alias_moves_and_is_found(put: Make, store: Store) -> None:
    one = put(table(MARK, 1))
    two = put(table(MARK, 2))
    store.set_alias(one, "champion")
    store.set_alias(two, "champion")
    store.set_alias(one, "previous")
    assert store.get_aliases("acceptance_table", "tiny") == {"champion": 2, "previous": 1}
    assert store.resolve("acceptance_table", "tiny", "champion") == two
    assert store.get_aliases("acceptance_table", "unknown") == {}


def test_two_that_set_an_alias_at_once_both_succeed(
    put: Make, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other process inserts between MLflow's look and its insert; what else fails is told."""
    from mlflow.store.model_registry.sqlalchemy_store import SqlAlchemyStore

    one, two = (
        put(table(MARK, 1)),
        put(table(MARK, 2)),
    )
    real, other = SqlAlchemyStore.set_registered_model_alias, Store(store.uri)

    def late(self: SqlAlchemyStore, name: str, alias: str, version: str) -> None:
        monkeypatch.undo()
        merge = sqlalchemy.orm.Session.merge

        def insert(session: sqlalchemy.orm.Session, row: Any) -> Any:
            monkeypatch.undo()
            row = merge(session, row)  # looks: there is none
            other.set_alias(two, alias)
            return row

        monkeypatch.setattr(sqlalchemy.orm.Session, "merge", insert)
        real(self, name, alias, version)

    monkeypatch.setattr(SqlAlchemyStore, "set_registered_model_alias", late)
    store.set_alias(one, "champion")
    assert store.get_aliases("acceptance_table", "tiny") == {"champion": 1}
    with raises_code("registry_failed"):
        store.set_alias(dataclasses.replace(one, version=77), "champion")


def test_what_is_not_there_is_named(put: Make, store: Store) -> None:
    with raises_code("not_registered", "alias champion", "verifier.tiny", "draftwell tune"):
        store.resolve("verifier", "tiny", "champion")
    store.set_alias(put(table(MARK)), "candidate")
    with raises_code("not_registered", "version 7", "acceptance_table.tiny", "candidate = 1"):
        store.resolve("acceptance_table", "tiny", 7)
    with raises_code("bad_pair_name"):
        store.resolve("verifier", "a/b' or 1=1", "champion")


def test_a_changed_file_is_refused_when_publishing_and_when_downloading(
    store: Store, tmp_path: Path
) -> None:
    made = publish(store, table(MARK), tmp_path / "a")
    (Path(made.source) / "table.json").write_text("{}")
    with raises_code("changed_file", "table.json"):
        store.download(made, tmp_path / "down")
    assert not (tmp_path / "down").exists()
    (tmp_path / "a" / "table.json").write_text("{}")
    with raises_code("changed_file", "table.json"):
        store.publish(tmp_path / "a", pair="tiny")


def test_a_failed_upload_registers_nothing(
    put: Make, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store.client, "log_model_artifacts", full)
    with pytest.raises(DraftwellError, match="No space left"):
        put(table(MARK))
    assert store.versions("acceptance_table", "tiny") == []


def test_a_store_of_files_that_needs_a_package_or_a_password_is_one_line(
    put: Make, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLflow imports boto3 when it reaches S3, whose errors are none of its own."""
    stores = pytest.importorskip(
        "botocore.exceptions", reason="boto3 is not installed (make setup)"
    )
    for error, code, words in (
        (ModuleNotFoundError("No module", name="boto3"), "mlflow_missing", "pip install boto3"),
        (ImportError("", name="google.cloud"), "mlflow_missing", "google-cloud-storage"),
        (stores.NoCredentialsError(), "registry_failed", "credentials"),
    ):

        def refuse(*_: Any, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr(store.client, "log_model_artifacts", refuse)
        with raises_code(code, words) as caught:
            put(table(MARK))
        assert "\n" not in str(caught.value)


def test_lineage_leads_back_to_the_traces(put: Make, store: Store) -> None:
    first = put(table(MARK))
    put(
        config(MARK, {"acceptance_table": first.digest, "verifier": "9" * 64}),
    )
    tree = lineage_of(store, store.resolve("decoding_config", "tiny", 1), "tiny")
    known, unknown = tree.parents
    assert (known.published, known.trace_digest, known.git_commit) == (first, "7" * 64, "c" * 40)
    assert (unknown.kind, unknown.digest, unknown.published) == ("verifier", "9" * 64, None)


def test_threads_that_publish_at_once_get_versions_of_their_own(
    store: Store, tmp_path: Path
) -> None:
    found: list[int] = []

    def work(n: int) -> None:
        found.append(publish(Store(store.uri), table(MARK, accepted=n), tmp_path / str(n)).version)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [1, 2, 3, 4]


def test_threads_that_publish_the_same_at_once_get_the_same_version(
    store: Store, tmp_path: Path
) -> None:
    """Between the look for it and the registration another may have been faster."""
    found: list[int] = []
    together = threading.Barrier(3)

    def work(n: int) -> None:
        mine = Store(store.uri)
        look, looks = mine._find, iter([together.wait])

        def wait_after_the_first_look(*what):
            seen = look(*what)
            for wait in looks:
                wait(timeout=60)  # all have looked and seen nothing
            return seen

        mine._find = wait_after_the_first_look  # type: ignore[method-assign]
        found.append(publish(mine, table(MARK), tmp_path / str(n)).version)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [found[0]] * 3
    assert [v.version for v in store.versions("acceptance_table", "tiny")] == [found[0]]


def test_a_registry_that_cannot_be_reached_is_one_line_without_its_password(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with raises_code("registry_folder_unwritable"):
        Store(f"sqlite:///{tmp_path}/file/mlflow.db")
    (tmp_path / "mlflow.db").write_text("this is no database, but long enough to look at" * 50)
    with raises_code("registry_failed", "sqlite:") as caught:
        Store(f"sqlite:///{tmp_path}/mlflow.db")
    assert "\n" not in str(caught.value)


def test_a_server_that_does_not_answer_is_one_line_that_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, and nobody listens
        uri = f"http://127.0.0.1:{taken.getsockname()[1]}"
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        with raises_code("registry_unreachable", uri, "MLFLOW_TRACKING_URI") as caught:
            Store(uri).get_aliases("release", "tiny.cpu")
    assert "\n" not in str(caught.value)


def test_waiting_for_a_server_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The HTTP library warns at each try, in its own words."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR", "0")
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_BACKOFF_JITTER", "0")
        with raises_code("registry_unreachable", "127.0.0.1"):
            Store(f"http://127.0.0.1:{taken.getsockname()[1]}").get_aliases("release", "tiny.cpu")
    told = [
        record.getMessage() for record in caplog.records if record.name == "urllib3.connectionpool"
    ]
    assert len(told) == 1
    assert "does not answer: trying again" in told[0]
