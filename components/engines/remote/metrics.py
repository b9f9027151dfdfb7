"""Metrics in Prometheus' text format as `Counters`, by a table of names for each dialect."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from draftwell.components.engines.remote.counters import Counters
from draftwell.serving.errors import DraftwellError

STARTED = "process_start_time_seconds"


@dataclass(frozen=True)
class Names:
    """Names of samples in an engine's metrics.

    Args:
        sums: field of `Counters` → samples, of which the first that is there is added up over its
            labels.
        accepted_at: counter with the label `position`.
    """

    sums: Mapping[str, tuple[str, ...]]
    accepted_at: str | None = None


def read_counters(
    text: str, names: Names, *, version: str | None = None, model: str | None = None
) -> Counters:
    """Counters of a text of metrics.

    Args:
        version: of the engine, where it says so elsewhere.
        model: samples of other models (label `model_name`) are left out; an alias names none.
    Raises:
        DraftwellError: the text is in another format (`engine_bad_answer`).
    """
    samples = list(samples_of(text))
    models = {sample.labels.get("model_name") for sample in samples}
    found: dict[str, list[Sample]] = {}
    for sample in samples:
        if model not in models - {None} or sample.labels.get("model_name", model) == model:
            found.setdefault(sample.name, []).append(sample)
    sums = {field: sum_of(found, options, field) for field, options in names.sums.items()}
    return Counters(
        at=time.time(),
        started=started_in(found),
        version=version,
        accepted_at=by_position(found.get(names.accepted_at or "", [])),
        **sums,  # type: ignore[arg-type]
    )


def samples_of(text: str) -> Iterator[Sample]:
    """The finite samples of a text."""
    try:
        for family in text_string_to_metric_families(text):
            yield from (sample for sample in family.samples if math.isfinite(sample.value))
    except (ValueError, KeyError, IndexError) as error:
        raise DraftwellError(
            "the metrics of the engine are not in Prometheus' text format: check its address",
            code="engine_bad_answer",
        ) from error


def sum_of(
    found: Mapping[str, list[Sample]], options: tuple[str, ...], field: str
) -> float | int | None:
    """The sum over the labels of the first sample that is there."""
    for name in options:
        if name in found:
            total = sum(sample.value for sample in found[name])
            return total if field.endswith("seconds") else round(total)
    return None


def started_in(found: Mapping[str, list[Sample]]) -> float | None:
    """When the process started; where it does not say, when its first counter was made."""
    if STARTED in found:
        return found[STARTED][0].value
    made = [
        s.value for name, samples in found.items() if name.endswith("_created") for s in samples
    ]
    return min(made, default=None)


def by_position(samples: list[Sample]) -> tuple[int, ...]:
    """Values by the label `position`, over all other labels."""
    counts: dict[int, float] = {}
    for sample in samples:
        place = sample.labels.get("position", "")
        if place.isdecimal():
            counts[int(place)] = counts.get(int(place), 0.0) + sample.value
    return tuple(round(counts.get(place, 0.0)) for place in range(max(counts, default=-1) + 1))
