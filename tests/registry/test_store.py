"""Publishing, finding, naming and downloading artifacts."""

import json
import threading
from pathlib import Path

import pytest
import yaml

from registry.store import Store
from serving.runtime.artifacts.acceptance_table import AcceptanceTable
from serving.runtime.artifacts.base import digest_of
from serving.runtime.types import DraftwellError
from tests.registry.making import config, distilled, head, publish, table, verifier

MARK = "f" * 64


def test_publish_resolve_and_download_return_the_same_artifact(store: Store, tmp_path: Path) -> None:
    plot = tmp_path / "curve.png"
    plot.write_bytes(b"png")
    made = publish(store, table(MARK), tmp_path / "table", metrics={"ece": 0.1}, plots=[plot])
    assert (made.kind, made.name, made.version) == ("acceptance_table", "acceptance_table.tiny", 1)
    assert made.fingerprint == MARK
    assert made.tags["trace_digest"] == "7" * 64
    assert store.resolve("acceptance_table", "tiny", 1) == made

    folder = store.download(made, tmp_path / "down" / "table")
    assert sorted(p.name for p in folder.iterdir()) == ["artifact.json", "table.json"]
    assert digest_of(folder) == made.digest
    assert AcceptanceTable.load(folder, fingerprint=MARK).accepted == [3] * 20

    run = store.client.get_run(made.run_id)
    assert run.data.metrics == {"brier": 0.25, "ece": 0.1}
    assert run.data.params == {"prompts": "12"}
    assert [f.path for f in store.client.list_artifacts(made.run_id, "plots")] == ["plots/curve.png"]
    assert run.info.status == "FINISHED"


def test_the_same_data_is_registered_once(store: Store, tmp_path: Path) -> None:
    first = publish(store, table(MARK), tmp_path / "a")
    assert publish(store, table(MARK), tmp_path / "b") == first
    assert publish(store, table("e" * 64), tmp_path / "c").version == 2  # the same counts for another pair of models
    assert publish(store, table(MARK, accepted=4), tmp_path / "d").version == 3
    assert [v.version for v in store.versions("acceptance_table", "tiny")] == [1, 2, 3]


@pytest.mark.parametrize(("make", "inputs"), [
    (lambda: verifier(MARK), "features"), (lambda: head(MARK), "hidden_state"),
    (lambda: table(MARK), "confidence"), (lambda: config(MARK), None),
    (distilled, "input_ids")])
def test_what_the_interface_of_mlflow_shows(store: Store, tmp_path: Path, make, inputs: str | None) -> None:
    made = publish(store, make(), tmp_path / "artifact")
    source = Path(made.source)
    card = yaml.safe_load((source / "MLmodel").read_text())
    assert list(card["flavors"]) == ["draftwell"]
    assert card["metadata"]["kind"] == made.kind
    if inputs is None:
        assert "signature" not in card or card["signature"] is None
    else:
        assert json.loads(card["signature"]["inputs"])[0]["name"] == inputs
        assert (source / "input_example.json").is_file()
    version = store.client.get_model_version(made.name, "1")
    assert "Pair tiny" in version.description
    assert store.client.get_registered_model(made.name).description
    names = {p.suffix for p in source.rglob("*") if p.is_file()}
    assert not names & {".pkl", ".py", ".bin", ".pt"}


def test_an_alias_moves_and_is_found(store: Store, tmp_path: Path) -> None:
    one = publish(store, table(MARK, 1), tmp_path / "a")
    two = publish(store, table(MARK, 2), tmp_path / "b")
    store.set_alias(one, "champion")
    store.set_alias(two, "champion")
    store.set_alias(one, "previous")
    assert store.get_aliases("acceptance_table", "tiny") == {"champion": 2, "previous": 1}
    assert store.resolve("acceptance_table", "tiny", "champion") == two
    assert store.get_aliases("acceptance_table", "unknown") == {}


def test_what_is_not_there_is_named(store: Store, tmp_path: Path) -> None:
    with pytest.raises(DraftwellError, match=r"^the registry holds no alias champion of verifier\.tiny: run"):
        store.resolve("verifier", "tiny", "champion")
    store.set_alias(publish(store, table(MARK), tmp_path / "a"), "candidate")
    with pytest.raises(DraftwellError, match=r"no version 7 of acceptance_table\.tiny: it has candidate = 1"):
        store.resolve("acceptance_table", "tiny", 7)
    with pytest.raises(DraftwellError, match="cannot be registered"):
        store.resolve("verifier", "a/b' or 1=1", "champion")


def test_a_changed_file_is_refused_when_publishing_and_when_downloading(store: Store, tmp_path: Path) -> None:
    made = publish(store, table(MARK), tmp_path / "a")
    (Path(made.source) / "table.json").write_text("{}")
    with pytest.raises(DraftwellError, match=r"table\.json is missing or was changed"):
        store.download(made, tmp_path / "down")
    assert not (tmp_path / "down").exists()
    (tmp_path / "a" / "table.json").write_text("{}")
    with pytest.raises(DraftwellError, match=r"table\.json is missing or was changed"):
        store.publish(tmp_path / "a", pair="tiny")


def test_a_failed_upload_registers_nothing(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store.client, "log_model_artifacts", full)
    with pytest.raises(DraftwellError, match="No space left"):
        publish(store, table(MARK), tmp_path / "a")
    assert store.versions("acceptance_table", "tiny") == []


def test_lineage_leads_back_to_the_traces(store: Store, tmp_path: Path) -> None:
    first = publish(store, table(MARK), tmp_path / "a")
    publish(store, config(MARK, {"acceptance_table": first.digest, "verifier": "9" * 64}), tmp_path / "b")
    tree = store.lineage("decoding_config", "tiny", 1)
    known, unknown = tree.parents
    assert (known.published, known.trace_digest, known.git_commit) == (first, "7" * 64, "c" * 40)
    assert (unknown.kind, unknown.digest, unknown.published) == ("verifier", "9" * 64, None)


def test_threads_that_publish_at_once_get_versions_of_their_own(store: Store, tmp_path: Path) -> None:
    found: list[int] = []

    def work(n: int) -> None:
        found.append(publish(Store(store.uri), table(MARK, accepted=n), tmp_path / str(n)).version)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [1, 2, 3, 4]


def test_a_registry_that_cannot_be_reached_is_one_line_without_its_password(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DraftwellError, match="cannot write the registry's folder"):
        Store(f"sqlite:///{tmp_path}/file/mlflow.db")
    (tmp_path / "mlflow.db").write_text("this is no database, but long enough to look at" * 50)
    with pytest.raises(DraftwellError, match=r"^the registry at sqlite:.* failed") as caught:
        Store(f"sqlite:///{tmp_path}/mlflow.db")
    assert "\n" not in str(caught.value)
