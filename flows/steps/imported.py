"""Results that `make gpu` measured on another machine: taken into the workspace and registered
here, so that a release for that device is judged by figures of its own."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from draftwell.components.bench.gpu.results import GpuResults
from draftwell.flows.context import StepContext, encoder_of
from draftwell.flows.steps.gate_parts.elsewhere import (
    GateMeasurement,
    measurement_file,
)
from draftwell.flows.steps.publish import run_publish
from draftwell.flows.workspace import Workspace, in_turn
from draftwell.registry.releases import ReleaseVersion
from draftwell.serving.artifacts.base import Artifact
from draftwell.serving.artifacts.kinds import find_kind
from draftwell.serving.artifacts.pair_files import fingerprint
from draftwell.serving.errors import DraftwellError
from draftwell.serving.files import write_json

TUNING, GATE, ARTIFACTS = "tuning", "gate", "artifacts"
"""Parts of the results, and the report of the tuning that holds what it made."""
DEVICE = "cuda"


@in_turn("draftwell reproduce import")
def import_results(space: Workspace, results: GpuResults) -> ReleaseVersion:
    """Put what was tuned and measured on a card into the workspace, and register it as the
    candidate for CUDA, with every figure of the card.

    Raises:
        DraftwellError: the results are of another pair, of other models, or not of one card alone,
            or nothing was tuned there: nothing was changed.
    """
    with tempfile.TemporaryDirectory() as place:
        made = artifacts_of(results, Path(place))
        measured = measurement_of(results)
        refuse_foreign(space, results, made, measured)
        for artifact in made:
            space.save(artifact)
    file = measurement_file(space, DEVICE)
    if measured is None:
        file.unlink(missing_ok=True)  # of an earlier choice
        space.say(f"the gate was not measured on {results.card.name}: {why_not(results, GATE)}")
    else:
        write_json(file, measured.model_dump(mode="json"))
    evidence = {"imported": results.model_dump(mode="json"), **dict(figures(results))}
    return run_publish(StepContext(space, encoder_of(space)), evidence, device=DEVICE)


def why_not(results: GpuResults, name: str) -> str:
    """Why a part was not measured."""
    part = results.parts.get(name)
    return part.why if part is not None and part.why else "the part did not run"


def artifacts_of(results: GpuResults, place: Path) -> list[Artifact]:
    """What the tuning made, read from files in a folder, which checks their digests."""
    part = results.parts.get(TUNING)
    files = part.reports.get(ARTIFACTS) if part is not None else None
    if not files or "decoding_config" not in files:
        raise DraftwellError(
            f"nothing was tuned on {results.card.name} ({why_not(results, TUNING)}): run `make "
            "gpu` there until the part tuning is measured",
            code="nothing_tuned",
        )
    found = []
    for kind, texts in files.items():
        folder = place / find_kind(kind).name
        folder.mkdir()
        for name, text in texts.items():
            (folder / Path(name).name).write_text(text)
        found.append(find_kind(kind).load_class().load(folder))
    return found


def measurement_of(results: GpuResults) -> GateMeasurement | None:
    """What the gate measured, None where it did not."""
    part = results.parts.get(GATE)
    if part is None or GATE not in part.reports:
        return None
    try:
        return GateMeasurement.model_validate(part.reports[GATE])
    except ValidationError as error:
        raise DraftwellError(
            "the results hold a measurement of the gate that this version cannot read: run `make "
            "gpu` there with the code that is here",
            code="measurement_unreadable",
        ) from error


def refuse_foreign(
    space: Workspace,
    results: GpuResults,
    made: list[Artifact],
    measured: GateMeasurement | None,
) -> None:
    """Refuse results of another pair or of other models, and those that are not all of one card."""
    name, here = space.spec.name, fingerprint(space.files(), space.dtype)
    if results.pair != name:
        raise DraftwellError(
            f"the results are of pair {results.pair}, not {name}: name it with --pair",
            code="results_of_other_pair",
        )
    card = results.card.device_class
    classes = [card, *(str(one.provenance.device_class) for one in made)]
    prints = [one.provenance.fingerprint for one in made]
    if measured is not None:
        classes.append(measured.device_class)
        prints.append(measured.fingerprint)
    if not card.startswith(f"{DEVICE}-") or set(classes) != {card}:
        raise DraftwellError(
            f"the results are of {' and '.join(dict.fromkeys(classes))}, not of one CUDA card: "
            "import what `make gpu` wrote, as it is",
            code="results_of_other_device",
        )
    if other := [one for one in prints if one != here]:
        raise DraftwellError(
            f"the results are of models with fingerprint {other[0][:12]}, those of {name} in "
            f"{space.dtype} here have {here[:12]}: name the number format with --set dtype=…, "
            f"or measure "
            "again with the files of this machine (`make gpu-kit`)",
            code="results_of_other_models",
        )


def figures(results: GpuResults) -> Iterator[tuple[str, float]]:
    """Tokens a second of every bench, under names that MLflow takes."""
    for name, part in results.parts.items():
        report: Any = part.reports.get("bench", {})
        for label, entry in report.get("strategies", {}).items():
            if (rate := entry.get("tokens_per_second")) is not None:
                yield figure_name(name, label), float(rate)
        for label, entry in report.get("configs", {}).items():
            yield figure_name(name, label), float(entry["together"])


def figure_name(part: str, label: str) -> str:
    """Name of a figure.

    >>> figure_name("greedy-7b", "eagle3(top_k=4)")
    'greedy-7b.eagle3_top_k_4'
    """
    return f"{part}.{re.sub('[^A-Za-z0-9_]+', '_', label).strip('_')}"
