"""What MLflow can do with a version: predict, name its traces, and compare what a tuning tried."""

import time
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pytest
import torch

from draftwell.registry.cards.datasets import LONGEST_DIGEST
from draftwell.registry.cards.trials import MOST
from draftwell.registry.pyfunc_models import MODELS, _load_pyfunc
from draftwell.registry.store import Store
from draftwell.serving.artifacts.acceptance_table import AcceptanceTable
from draftwell.serving.artifacts.base import Provenance
from draftwell.serving.artifacts.decoding_config import SampledChoice
from draftwell.serving.artifacts.verifier import Verifier
from tests.support.errors import raises_code
from tests.support.loop.publishing import config, head, memory, publish, table, verifier

MARK = "a" * 64


@pytest.fixture(autouse=True)
def tracking_uri(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store.uri)


def load(name: str) -> Any:
    """As a user of MLflow does, with its own client."""
    return mlflow.pyfunc.load_model(f"models:/{name}.tiny/1")


@pytest.mark.parametrize("make", [verifier, head, table])
def test_every_example_fits_its_signature_and_gives_a_probability(
    store: Store, tmp_path: Path, make: Any
) -> None:
    made = publish(store, make(MARK), tmp_path / "artifact")
    model = load(made.kind)
    outputs = model.predict(model.input_example)
    assert list(outputs) == model.metadata.get_output_schema().input_names()
    (values,) = outputs.values()
    (expected,) = model.metadata.get_output_schema().inputs
    rows = len(next(iter(model.input_example.values())))
    assert (values.shape, values.dtype) == ((rows,), expected.type)
    assert ((values > 0) & (values < 1)).all()
    (name,) = model.input_example
    with pytest.raises(mlflow.exceptions.MlflowException):
        model.predict({f"not_{name}": model.input_example[name]})


def test_predictions_are_those_of_the_artifact(store: Store, tmp_path: Path) -> None:
    counted = AcceptanceTable([30] * 20, [*range(20)], Provenance(pair="tiny", fingerprint=MARK))
    publish(store, counted, tmp_path / "table")
    confidence = np.array([0.0, 0.42, 0.945, 1.0])
    found = load("acceptance_table").predict({"confidence": confidence})["acceptance"]
    assert found.tolist() == [counted.alpha(value) for value in confidence]
    learnt = Verifier(
        torch.tensor([0.5, -1.0, 2.0, 0.25, -0.5, 1.5]),
        -0.3,
        ("after", "scalars"),
        0.5,
        1.2,
        Provenance(pair="tiny", fingerprint=MARK),
    )
    publish(store, learnt, tmp_path / "verifier")
    raw, after = torch.tensor([0.6, 0.3, 0.1]), torch.tensor([0.2, -0.4])
    model = load("verifier")
    rows = np.array(
        [[*after.tolist(), 0.6, 0.6, float(torch.special.entr(raw).sum()), 0.0], np.zeros(6)],
        np.float32,
    )
    assert model.predict({"features": rows})["score"][0] == pytest.approx(
        learnt.score(None, after, raw, 0), abs=1e-6
    )
    with pytest.raises(mlflow.exceptions.MlflowException):
        model.predict({"features": rows[:, :5]})


def test_a_changed_file_is_not_loaded_and_other_kinds_predict_nothing(
    store: Store, tmp_path: Path
) -> None:
    made = publish(store, table(MARK), tmp_path / "table")
    publish(store, memory(MARK), tmp_path / "memory")
    file = Path(made.source) / "table.json"
    file.write_text(file.read_text().replace("3", "4", 1))
    with raises_code("changed_file", "table.json"):
        load("acceptance_table")
    with raises_code("no_pyfunc", "correction_memory", *MODELS):
        _load_pyfunc(str(tmp_path / "memory"))
    with pytest.raises(mlflow.exceptions.MlflowException, match="python_function"):
        load("correction_memory")


def test_traces_are_inputs_of_the_run(store: Store, tmp_path: Path) -> None:
    made = publish(store, table(MARK), tmp_path / "table")
    (traces,) = store.client.get_run(made.run_id).inputs.dataset_inputs
    assert (traces.dataset.name, traces.dataset.digest) == ("traces.tiny", "7" * LONGEST_DIGEST)
    assert {tag.key: tag.value for tag in traces.tags} == {
        "mlflow.data.context": "calibration",
        "trace_digest": "7" * 64,
    }
    assert mlflow.data.get_source(traces).to_dict()["tags"]["trace_digest"] == "7" * 64
    untraced = publish(store, verifier(MARK), tmp_path / "verifier")  # names no trace
    assert store.client.get_run(untraced.run_id).inputs.dataset_inputs == []


def tried(tau: float, **figures: float) -> dict[str, Any]:
    return {"strategy": "spide", "parameters": {"tau": tau, "gamma": 4}, **figures}


def test_what_a_tuning_tried_stands_in_nested_runs(store: Store, tmp_path: Path) -> None:
    chosen = config(MARK)
    chosen.evidence |= {
        "confirmation": {
            "figures": [
                tried(
                    0.5, seconds_per_token=0.02, speedup=1.5, quality_loss=0.01, rouge_l_lost=None
                )
            ]
        },
        "measured": [tried(0.5, seconds_per_token=0.03), tried(0.6, seconds_per_token=0.025)],
        "trials": [
            tried(n / 100, predicted_seconds_per_token=n / 1000, source="replayed")
            for n in range(99, 0, -1)
        ],
    }
    begun = time.monotonic()
    made = publish(store, chosen, tmp_path / "config")
    assert time.monotonic() - begun < 30, "of a person's time; idle it takes two seconds"
    parent = store.client.get_run(made.run_id)
    found = store.client.search_runs(
        [parent.info.experiment_id], f"tags.`mlflow.parentRunId` = '{made.run_id}'", max_results=200
    )
    assert len(found) == MOST
    by_source = {
        source: [run for run in found if run.data.params["source"] == source]
        for source in ("confirmed", "measured", "replayed")
    }
    assert [len(runs) for runs in by_source.values()] == [1, 1, MOST - 2]
    (best,) = by_source["confirmed"]
    assert best.data.params == {
        "strategy": "spide",
        "source": "confirmed",
        "requests": "greedy",
        "tau": "0.5",
        "gamma": "4",
    }
    assert best.data.metrics == {"seconds_per_token": 0.02, "speedup": 1.5, "quality_loss": 0.01}
    times = [run.data.metrics["seconds_per_token"] for run in by_source["replayed"]]
    assert max(times) == pytest.approx(0.060, abs=0.002), "the fastest of the replayed are kept"
    assert {run.info.status for run in found} == {"FINISHED"}
    assert publish(store, chosen, tmp_path / "config") == made
    assert (
        len(store.client.search_runs([parent.info.experiment_id], max_results=200)) == MOST + 1
    ), "logged once"


def test_what_was_tried_for_sampled_requests_stands_in_runs_of_its_own_class(
    store: Store, tmp_path: Path
) -> None:
    """The same configuration tried for both classes is two runs."""
    chosen = config(MARK)
    chosen.evidence |= {"trials": [tried(0.5, predicted_seconds_per_token=0.01)]}
    evidence = {
        "trials": [
            tried(0.5, predicted_seconds_per_token=0.03),
            tried(0.6, predicted_seconds_per_token=0.02),
        ]
    }
    chosen.sampled = SampledChoice(0.7, "spide", {"gamma": 4}, evidence)
    made = publish(store, chosen, tmp_path / "config")
    runs = store.client.search_runs(
        [store.client.get_run(made.run_id).info.experiment_id],
        f"tags.`mlflow.parentRunId` = '{made.run_id}'",
    )
    found = {
        (run.data.tags["requests"], run.data.params["tau"], run.data.metrics["seconds_per_token"])
        for run in runs
    }
    assert found == {("greedy", "0.5", 0.01), ("sampled", "0.5", 0.03), ("sampled", "0.6", 0.02)}
    assert len({run.info.run_name for run in runs}) == 3, "a list of runs tells them apart"
