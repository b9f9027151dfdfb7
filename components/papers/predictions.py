"""What the formulas predict of a measured cell: Leviathan's speed-up of every SD, and SPIDE's gain
over SD.

The formulas know nothing of the prompt: measured speeds next to them are of decoding alone, from
the first token on.
"""

from __future__ import annotations

from typing import NamedTuple

from draftwell.components.bench.schema import BenchEntry
from draftwell.components.papers import formulas
from draftwell.components.papers.cell_file import CellFile, Costs
from draftwell.components.papers.cells import PLAIN


class Prediction(NamedTuple):
    """One engine's speed, predicted and measured.

    Args:
        engine: its label; `over` says what its speed is over where that is not plain decoding.
        gamma: draft length; None: it varies.
        c: seconds of a draft pass over those of a target pass.
        ideal: by Leviathan's formula; None where it does not apply.
        predicted: with the passes as they were measured.
    """

    engine: str
    acceptance: float
    gamma: int | None
    c: float
    ideal: float | None
    predicted: float
    measured: float
    over: str = ""

    @property
    def share(self) -> float:
        """What was reached of the prediction."""
        return self.measured / self.predicted


def predictions(file: CellFile) -> list[Prediction]:
    """Of every vanilla SD of a cell, and of every SPIDE that overlaps.

    All speeds are over plain decoding with all cores, also those of engines whose models have a
    share of them each. The share is of the prediction with measured passes. SPIDE's rows predict
    its speed over SD's, both by the passes, text by text: a text's tokens have one chance, which is
    its acceptance rate with the strategy, and no draft goes beyond it.
    """
    costs = file.costs
    if costs is None:
        return []
    entries, plain = file.report.strategies, file.measured().entry(PLAIN)
    rows = [
        row
        for label, entry in entries.items()
        if entry.strategy == "vanilla_sd" and (row := sd_row(label, entry, plain, costs))
    ]
    return rows + spide_rows(file, costs)


def times(entry: BenchEntry, costs: Costs) -> formulas.Passes:
    """Draft and target passes as this entry ran them."""
    return (
        costs.alone
        if entry.split_cores and costs.alone is not None
        else (costs.t_draft, costs.t_verify)
    )


def decoding_speed(entry: BenchEntry, base: BenchEntry) -> float | None:
    """How many times as fast one entry decodes as another, the prompt's reading left out on both
    sides; None where nothing was decoded."""
    mine, other = entry.decode_tokens_per_second, base.decode_tokens_per_second
    return mine / other if mine and other else None


def sd_row(label: str, entry: BenchEntry, plain: BenchEntry, costs: Costs) -> Prediction | None:
    """One vanilla SD."""
    alpha, gamma = entry.acceptance_rate, int(entry.parameters.get("num_speculative_tokens", 5))
    measured = decoding_speed(entry, plain)
    # whose passes no profile has
    if alpha is None or measured is None or entry.parameters.get("drafter") == "qualifier":
        return None
    draft, verify = times(entry, costs)
    # the formula is over the same target pass, which on a share of the cores is slower than plain's
    share = costs.t_verify[1] / verify[1]
    ideal = formulas.leviathan_speedup(alpha, gamma, draft / verify[1]) * share
    predicted = formulas.sd_speedup(alpha, gamma, costs.t_verify[1], draft, verify, costs.t_rest)
    return Prediction(label, alpha, gamma, draft / verify[1], ideal, predicted, measured)


def spide_rows(file: CellFile, costs: Costs) -> list[Prediction]:
    """Every SPIDE that overlaps, over the fastest SD of its cell: text by text, with its own
    acceptance and length."""
    found = file.measured()
    if "SD" not in found.labels or costs.busy is None or costs.alone is None:
        return []
    base = found.entry("SD")
    gamma = int(base.parameters.get("num_speculative_tokens", 5))
    slow = sum(
        formulas.sd_seconds(tokens, alpha, gamma, costs.alone, costs.t_rest)
        for tokens, alpha in texts(base)
    )
    rows = []
    for label, entry in file.report.strategies.items():
        if (
            entry.strategy != "spide"
            or str(entry.parameters.get("parallel", True)).lower() == "false"
            or "tau" not in entry.parameters
        ):
            continue
        tau = float(entry.parameters["tau"])
        fast = sum(
            formulas.spide_seconds(tokens, alpha, tau, costs.alone, costs.busy, costs.t_rest)
            for tokens, alpha in texts(entry)
        )
        measured, alpha = decoding_speed(entry, base), entry.acceptance_rate
        if measured is not None and alpha is not None and fast:
            rows.append(
                Prediction(
                    label,
                    alpha,
                    None,
                    costs.busy[0] / costs.busy[1][1],
                    None,
                    slow / fast,
                    measured,
                    over="SD",
                )
            )
    return rows


def texts(entry: BenchEntry) -> list[tuple[int, float]]:
    """(tokens behind the first, acceptance rate) of each text; with nothing judged, 0."""
    return [(row.tokens - 1, (row.accepted or 0) / (row.judged or 1)) for row in entry.per_prompt]
