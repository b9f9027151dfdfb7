"""What MLflow can do with a version: predict, name its traces, and compare what a tuning tried."""

import time
from pathlib import Path
from typing import Any

import mlflow
import mlflow.onnx
import numpy as np
import onnxruntime
import pytest
import torch

from draftwell.registry.cards.datasets import LONGEST_DIGEST
from draftwell.registry.cards.trials import MOST
from draftwell.registry.store import Store
from draftwell.serving.artifacts.acceptance_head import AcceptanceHead
from draftwell.serving.artifacts.acceptance_table import AcceptanceTable
from draftwell.serving.artifacts.base import Provenance
from draftwell.serving.artifacts.decoding_config import SampledChoice
from draftwell.serving.artifacts.verifier import Verifier
from draftwell.serving.runtime.requests import Sampling
from tests.support.loop.publishing import Make, config, head, memory, publish, table, verifier
from tests.support.models.resources import whole_scalars
from tests.support.models.spans import span_of

MARK = "a" * 64


@pytest.fixture(autouse=True)
def tracking_uri(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store.uri)


def load(name: str) -> Any:
    """As a user of MLflow does, with its own client."""
    return mlflow.pyfunc.load_model(f"models:/{name}.tiny/1")


@pytest.mark.parametrize("make", [verifier, head, table])
def test_every_example_fits_its_signature_and_gives_a_probability(put: Make, make: Any) -> None:
    made = put(make(MARK))
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


def scored(name: str, **inputs: np.ndarray) -> np.ndarray:
    """What the graph of a version gives, loaded as MLflow's flavour `onnx`."""
    graph = mlflow.onnx.load_model(f"models:/{name}.tiny/1")
    session = onnxruntime.InferenceSession(
        graph.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    (values,) = session.run(None, inputs)
    return values


def test_graphs_score_as_the_runtime_does(store: Store, tmp_path: Path) -> None:
    """Draft states and distributions at random, through the artifacts that serving reads back."""
    random, made = torch.Generator().manual_seed(0), Provenance(pair="tiny", fingerprint=MARK)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random)

    blocks = [(normal(6, 6) / 3, normal(6)) for _ in range(2)]
    for artifact in (
        Verifier(normal(16), -0.3, ("before", "after", "scalars"), 0.5, 1.2, made),
        AcceptanceHead(normal(6), normal(6).abs() + 0.1, blocks, normal(6), 0.4, made),
        AcceptanceTable([30] * 20, [*range(20)], made),
    ):
        publish(store, artifact, tmp_path / artifact.kind)
    states, logits = normal(2, 8, 6), normal(2, 8, 50)
    judge = Verifier.load(tmp_path / "verifier")
    before, after = (span_of(x, Sampling(), h) for x, h in zip(logits, states, strict=True))
    features, expected = [], []
    for i in range(8):
        scalars = whole_scalars(before.raw(i), 3)
        features.append(torch.cat([before.hidden(i), after.hidden(i), scalars]))
        expected.append(judge.score_drafted(before[i], after[i], 3))
    found = scored("verifier", features=torch.stack(features).numpy())
    assert found == pytest.approx(expected, abs=1e-5)

    network = AcceptanceHead.load(tmp_path / "acceptance_head")
    found = scored("acceptance_head", hidden_state=states[0].numpy())
    assert found == pytest.approx([network.acceptance(x) for x in states[0]], abs=1e-5)

    counted = AcceptanceTable.load(tmp_path / "acceptance_table")
    confidence = np.array([0.0, 0.1, 0.42, 0.945, 1 - 2**-9, 1.0])
    found = scored("acceptance_table", confidence=confidence)
    assert found.tolist() == [counted.alpha(value) for value in confidence]


def test_other_kinds_predict_nothing(put: Make) -> None:
    put(memory(MARK))
    with pytest.raises(mlflow.exceptions.MlflowException, match="python_function"):
        load("correction_memory")


def test_traces_are_inputs_of_the_run(put: Make, store: Store) -> None:
    made = put(table(MARK))
    (traces,) = store.client.get_run(made.run_id).inputs.dataset_inputs
    assert (traces.dataset.name, traces.dataset.digest) == ("traces.tiny", "7" * LONGEST_DIGEST)
    assert {tag.key: tag.value for tag in traces.tags} == {
        "mlflow.data.context": "calibration",
        "trace_digest": "7" * 64,
    }
    assert mlflow.data.get_source(traces).to_dict()["tags"]["trace_digest"] == "7" * 64
    untraced = put(verifier(MARK))  # names no trace
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
    assert time.monotonic() - begun < 120, "of a person's time; idle it takes two seconds"
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
    put: Make, store: Store
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
    made = put(chosen)
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
