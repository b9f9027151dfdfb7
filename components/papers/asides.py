"""What stands under a table besides its rows: where it was measured, whose texts differ, what
overlapping costs, what was tried."""

from __future__ import annotations

from collections import Counter
from math import isfinite
from statistics import mean, stdev
from typing import NamedTuple

import numpy as np

from draftwell.components.bench.schema import BenchEntry, Machine
from draftwell.components.papers.cell_file import CellFile
from draftwell.components.papers.cells import PLAIN
from draftwell.components.papers.certainty import certainty_words
from draftwell.components.papers.estimates import calls, mat, pace, settings_of, speed, sums_of
from draftwell.components.papers.points import SD_ROLES
from draftwell.components.papers.rounds import pass_words
from draftwell.components.report.tables import markdown, number
from draftwell.serving.artifacts.forward_costs import seconds_at
from draftwell.serving.runtime.strategies.lossless.duo_decoding import in_one_pass

OVERLAPPING = ("spide", "pearl", "duo_decoding")
"""Strategies in which both models compute at once."""
CONTENTION_TOKENS = 8
"""Of the target pass that `contention_words` names."""
BASES = ("SD", "SpS")
"""Roles of vanilla SD, by what their paper calls it."""
FEW = 4
"""Prompts that are named one by one; of more, the first and the last: the cell's file has all."""
TRIED = (
    "role",
    "settings",
    "decoding over plain",
    "decoding over SD",
    "target calls over SD's",
    "MAT",
)


def asides(file: CellFile) -> str:
    """All sentences on a measured cell."""
    said = (
        machine_words(file),
        seed_words(file),
        identity_words(file),
        contention_words(file),
        sequence_words(file),
        pass_words(file),
        certainty_words(file.certainty),
        *file.remarks,
    )
    return " ".join(words for words in said if words)


def device_words(machine: Machine) -> str:
    """The GPU, if there is one, and the processor."""
    gpu = f"one {machine.device_name}, " if machine.cuda else ""
    return f"{gpu}{machine.cpu}, {machine.cores} cores"


def machine_words(file: CellFile) -> str:
    """Where it was measured, and on which prompts."""
    machine, ids = file.report.machine, list(dict.fromkeys(file.report.prompt_ids))
    how = "Counted by replay" if file.cell.get("replay") else "Measured"
    took = (
        f"{file.seconds / 60:.0f} minutes" if file.seconds >= 90 else f"{file.seconds:.0f} seconds"
    )
    prompts = ", ".join(ids) if len(ids) <= FEW else f"{len(ids)} from {ids[0]} to {ids[-1]}"
    torch = f"torch {machine.libraries['torch']}, " if "torch" in machine.libraries else ""
    return (
        f"{how} on {device_words(machine)}, {machine.threads} threads, {machine.dtype}, "
        f"{torch}commit "
        f"{(machine.commit or 'unknown')[:9]}, in {took}; prompts: {prompts}."
    )


def seed_words(file: CellFile) -> str:
    """How much speeds differ between the seeds that each prompt was decoded with; empty where it
    was decoded once."""
    measured = file.measured()
    seeds = measured.cell.seeds
    if seeds == 1:
        return ""
    base = measured.entry(PLAIN)
    shown = {role: over_by_seed(measured.entry(role), base, seeds) for role in measured.cell.roles}
    values = ", ".join(
        f"{role} {mean(ratios):.2f} ± {stdev(ratios):.2f}" for role, ratios in shown.items()
    )
    return (
        f"Each prompt was decoded with {seeds} seeds; an interval's bootstrap draws "
        "prompts, with all of them. Mean and standard "
        f"deviation over seeds of the decoding speed over plain: {values}."
    )


def over_by_seed(entry: BenchEntry, base: BenchEntry, seeds: int) -> list[float]:
    """How many times as fast one entry decodes as another, of the texts of each seed: the report
    has all prompts of a seed in a row."""
    prompts = len(entry.per_prompt) // seeds
    spans = [slice(seed * prompts, (seed + 1) * prompts) for seed in range(seeds)]
    return [pace(base.per_prompt[span]) / pace(entry.per_prompt[span]) for span in spans]


def identity_words(file: CellFile) -> str:
    """On how many prompts lossless contenders wrote what plain decoding did; empty where that is
    not counted, as of samples."""
    prompts = file.report.prompts
    found = [
        entry
        for entry in file.report.strategies.values()
        if entry.lossless
        and entry.greedy
        and entry.strategy != "autoregressive"
        and entry.identical_outputs is not None
    ]
    if not found:
        return ""
    counts = [entry.identical_outputs or 0 for entry in found]
    other = sum(
        prompts - (entry.identical_outputs or 0) - (entry.near_ties or 0) for entry in found
    )
    if min(counts) == prompts:
        return "All lossless contenders write the same texts as plain decoding."
    span = f"{min(counts)} to {max(counts)}" if min(counts) < max(counts) else str(counts[0])
    rest = (
        f"{other} differ elsewhere than at a near-tie"
        if other
        else "all others differ first at a near-tie of the target's best two"
    )
    return (
        f"Lossless contenders write plain decoding's text on {span} of {prompts} prompts; {rest} "
        f"(passes over several tokens round differently in {file.report.machine.dtype})."
    )


def contention_words(file: CellFile) -> str:
    """What a pass takes with all cores, on its own share of them, and with both models at work;
    empty where nothing overlaps."""
    costs = file.costs
    if costs is None or costs.alone is None or costs.busy is None:
        return ""
    if not any(
        entry.split_cores and entry.strategy in OVERLAPPING
        for entry in file.report.strategies.values()
    ):
        return ""
    drafts, passes = zip(
        *(
            (draft, seconds_at(verify, CONTENTION_TOKENS))
            for draft, verify in ((costs.t_draft, costs.t_verify), costs.alone, costs.busy)
        ),
        strict=True,
    )
    gpu = file.report.machine.cuda
    alone, apart = (
        ("without worker threads", "on a thread of its own")
        if gpu
        else ("with all cores", "on its share of them")
    )
    drafting, judging = ([milliseconds(seconds) for seconds in three] for three in (drafts, passes))
    return (
        f"Cost of contention: a draft pass takes {drafting[0]} ms {alone}, {drafting[1]} "
        f"ms {apart} while the target is idle, "
        f"and {drafting[2]} ms while both compute; a target pass over {CONTENTION_TOKENS} "
        f"tokens {judging[0]}, {judging[1]} and "
        f"{judging[2]} ms. The two models share one "
        f"{'GPU' if gpu else 'memory and its bandwidth'}; the papers' run on several GPUs."
    )


def milliseconds(seconds: float) -> str:
    """Two digits where one would say little.

    >>> milliseconds(0.0021), milliseconds(0.0151)
    ('2.1', '15')
    """
    return f"{seconds * 1e3:.{1 if seconds < 0.01 else 0}f}"


def sequence_words(file: CellFile) -> str:
    """How often DuoDecoding drafted how many sequences (its Figure 5), where their number is its
    own choice; empty without it."""
    entries = [
        entry
        for entry in file.report.strategies.values()
        if entry.strategy == "duo_decoding" and not entry.parameters
    ]
    counts = Counter[int]()
    for row in [row.sequences or {} for entry in entries for row in entry.per_prompt]:
        counts.update({count: sum(rounds) for count, rounds in row.items()})
    if not counts:
        return ""
    shares = ", ".join(
        f"{count} in {counts[count] / counts.total():.0%}" for count in sorted(counts)
    )
    costs = file.chosen_by or file.costs
    longest = (
        ""
        if costs is None or costs.busy is None
        else (
            f" Its sequences have at most {in_one_pass(costs.busy[1])} tokens here, which "
            "the target verifies in about one pass."
        )
    )
    return (
        "DuoDecoding's number of sequences, of the rounds that judge one (Figure 5): "
        f"{shares}.{longest}"
    )


def tried(file: CellFile) -> str:
    """Every contender's speed, target calls and MAT, as Markdown."""
    measured = file.measured()
    roles = measured.cell.roles
    base = next((measured.entry(role) for role in BASES if role in measured.labels), None)
    rows = [
        tried_row(
            role,
            measured.entries[label],
            measured.entry(PLAIN),
            None if role in SD_ROLES[:2] else base,
        )
        for role in roles
        for label in measured.labels[role]
    ]
    drafts = (
        " SD is the one that drafts with the draft model."
        if any("qualifier drafts" in role for role in roles)
        else ""
    )
    return (
        "Every contender; rows above have the fastest of each "
        f"role.{drafts}\n\n{markdown(TRIED, rows)}"
    )


class Curve(NamedTuple):
    """A role's settings along one threshold.

    Args:
        taus: ascending.
        speeds, calls: over SD's fastest, of decoding alone, and target calls a token.
    """

    taus: list[float]
    speeds: list[float]
    calls: list[float]


def curves(file: CellFile) -> dict[str, Curve]:
    """Role → speed and target calls by τ, of the roles of which several were tried that differ in
    nothing else (Figures 6, 7)."""
    measured, found = file.measured(), dict[str, Curve]()
    if "SD" not in measured.labels:
        return {}
    base = measured.entry("SD")
    for role, specs in measured.cell.contenders.items():
        entries = [measured.entries[label] for label in measured.labels[role]]
        rest = [
            {name: value for name, value in entry.parameters.items() if name != "tau"}
            for entry in entries
        ]
        if (
            len(specs) > 1
            and all("tau" in entry.parameters for entry in entries)
            and all(one == rest[0] for one in rest)
        ):
            points = sorted(
                (float(entry.parameters["tau"]), found_speed.value, calls_over(entry, base))
                for entry in entries
                if (found_speed := speed(entry, base)) is not None
            )
            if points:
                found[role] = Curve(*(list(column) for column in zip(*points, strict=True)))
    return found


def calls_over(entry: BenchEntry, base: BenchEntry) -> float:
    """Target calls a token over another contender's."""
    return float(calls(sums_of(entry).sum(0)) / calls(sums_of(base).sum(0)))


def tried_row(
    role: str, entry: BenchEntry, plain: BenchEntry, base: BenchEntry | None
) -> list[str]:
    """A row of text."""
    speeds = [None if other is None else speed(entry, other) for other in (plain, base)]
    cost = None if base is None else calls_over(entry, base)
    with np.errstate(divide="ignore", invalid="ignore"):
        accepted = float(mat(sums_of(entry).sum(0)))
    return [
        role,
        settings_of(entry),
        *("–" if found is None else f"{found.value:.2f}" for found in speeds),
        number(cost, ".2f"),
        number(accepted if isfinite(accepted) else None, ".2f"),
    ]
