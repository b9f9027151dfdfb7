"""What `draftwell bench --out` wrote, as a `speculation_profile.json`: our engine's reports and
those of other engines."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from draftwell.components.bench.categories import ALL, CategoryFigure
from draftwell.components.bench.engines.figures import Figure
from draftwell.components.bench.schema import SCHEMA, BenchEntry, BenchReport
from draftwell.components.export.profile import SpeculationProfile, profile_of
from draftwell.serving.errors import DraftwellError
from draftwell.serving.files import read_text
from draftwell.serving.runtime.strategies import build_strategy

METHODS = {"vanilla_sd": "draft_model", "eagle3": "eagle3"}
"""Our strategies that draft a chain of one length, as other engines call them."""
LABEL = re.compile(r"(draft_model|eagle3)\(k=(\d+)\)")
"""Of a method of one length in the figures of another engine."""


class Counted(NamedTuple):
    """What was counted of drafts of k tokens."""

    k: int
    rounds: int
    accepted_at: Sequence[int]
    categories: Sequence[CategoryFigure]
    per_request: float | None
    conditions: dict[str, Any]
    drafter: str | None
    """What was measured: of a head the digest of its artifact, or the name of a folder that ends
    with the beginning of that; of a draft the fingerprint of both models. None where the file does
    not say."""


def profile_from(file: Path, method: str, **known: Any) -> tuple[SpeculationProfile, str | None]:
    """The profile of a method, of the longest drafts that were measured, with mean lengths of the
    shorter ones; and what was measured (`Counted.drafter`).

    Raises:
        DraftwellError: no file of a bench (`bad_bench_file`), or none that measured this method in
            drafts of one length (`not_in_bench`). One line each.
    """
    found = sorted(counted(file, method), key=lambda one: one.k)
    if not found:
        raise DraftwellError(
            f"{file} has no figures of {method} in drafts of one length: bench that, or name "
            "another file",
            code="not_in_bench",
        )
    longest = found[-1]
    made = profile_of(
        longest.rounds,
        longest.accepted_at,
        method=method,
        k=longest.k,
        accept_length_by_k={
            str(one.k): round(1 + sum(one.accepted_at) / one.rounds, 6) for one in found
        },
        mean_accept_length_per_request=longest.per_request,
        per_category={
            one.category: {
                "mean_accept_length": one.acceptance_length,
                "low": one.acceptance_low,
                "high": one.acceptance_high,
                "num_samples": one.prompts,
            }
            for one in longest.categories
            if one.category != ALL
        }
        or None,
        measurement_conditions=longest.conditions,
        **known,
    )
    return made, longest.drafter


def counted(file: Path, method: str) -> Iterator[Counted]:
    """What a file counted of a method, for each length."""
    try:
        found = json.loads(read_text(file))
        if isinstance(found, Mapping) and "address" in found:
            raise bad_file(file, "figures of an engine at an address name no settings of ours")
        if isinstance(found, Mapping) and "figures" in found:
            yield from of_engine(found, method)
        else:
            yield from of_report(BenchReport.model_validate(found), method)
    except OSError as error:
        raise bad_file(file, f"it cannot be read, {error.strerror}") from error
    except (ValidationError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise bad_file(file, "it was not written by `draftwell bench --out`") from error


def of_report(report: BenchReport, method: str) -> Iterator[Counted]:
    """Of our engine."""
    machine, settings = report.machine, report.settings
    for entry in report.strategies.values():
        k = chain_length(entry) if METHODS.get(entry.strategy or "") == method else None
        if k is None or not entry.rounds or not entry.accepted_at:
            continue
        each = [1 + row.accepted / row.rounds for row in entry.per_prompt if row.rounds]
        yield Counted(
            k,
            entry.rounds,
            entry.accepted_at,
            entry.categories,
            round(sum(each) / len(each), 6) if each else None,
            {
                "engine": "draftwell",
                "engine_version": machine.libraries.get("draftwell"),
                "commit": machine.commit,
                "libraries": machine.libraries,
                "machine": machine.device_name or machine.cpu,
                "device": machine.device_class,
                "dtype": machine.dtype,
                "dataset": settings.prompts_file,
                "num_samples": report.prompts,
                "osl": settings.max_tokens,
                "temperature": settings.temperature,
                "concurrency": 1,
            },
            (entry.artifacts or {}).get("eagle3_head")
            if method == "eagle3"
            else report.fingerprint,
        )


def chain_length(entry: BenchEntry) -> int | None:
    """Tokens of every draft, where all are chains of one length, as another engine would draft
    them: no trees, no rule that ends them early, no qualifier."""
    config: Any = build_strategy(entry.strategy or "", dict(entry.parameters)).config
    if entry.strategy == "vanilla_sd":
        chain = config.drafter == "draft"
    else:
        chain = config.top_k == 1 and config.stop == "probability" and config.threshold == 0
    return config.num_speculative_tokens if chain else None


def of_engine(document: Mapping[str, Any], method: str) -> Iterator[Counted]:
    """Of another engine."""
    for row in document["figures"]:
        figure = Figure.model_validate_json(json.dumps(row))
        said = LABEL.fullmatch(figure.label)
        if said is None or said[1] != method or not figure.acceptance.rounds:
            continue
        yield Counted(
            int(said[2]),
            figure.acceptance.rounds,
            figure.acceptance.accepted_at,
            figure.categories,
            None,
            {
                "engine": document["engine"],
                "engine_version": document["version"],
                "machine": document["machine"],
                "device": document["device_class"],
                "dtype": document["dtype"],
                "dataset": document["prompts_file"],
                "num_samples": figure.prompts,
                "osl": document["max_tokens"],
                "temperature": document["temperature"],
                "concurrency": figure.at_once,
            },
            document["models"].get("head") if method == "eagle3" else document["fingerprint"],
        )


def bad_file(file: Path, what: str) -> DraftwellError:
    """What is wrong with a file, in one line."""
    return DraftwellError(
        f"{file} holds no figures (of schema {SCHEMA}): {what}; name a file of "
        "`draftwell bench --out`",
        code="bad_bench_file",
    )
