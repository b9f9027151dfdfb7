"""Draft lengths by load that were tuned elsewhere, tried beside those that are found here: its
lengths like ours, and where it names one for each load, the whole schedule as it would be served.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, fsum, log

from draftwell.components.bench.engines.figures import Figure
from draftwell.components.engines.vllm_methods import DEFAULTS, OFF, Method, schedule_of
from draftwell.components.report.intervals import FEWEST_PROMPTS, TAIL
from draftwell.components.tune.engines.choice import EngineChoice
from draftwell.components.tune.engines.lab import Lab, left_out_if_it_fails
from draftwell.components.tune.engines.settings import EngineTuneSettings, Lengths
from draftwell.components.tune.levels import Level
from draftwell.serving.errors import DraftwellError


@dataclass(frozen=True)
class Imported:
    """A schedule from elsewhere.

    Args:
        source: its file and format, for people.
        method: one of vLLM's.
        lengths: by load, for the loads that are measured; 0: none.
    """

    source: str
    method: str
    lengths: tuple[tuple[int, tuple[int, ...]], ...]

    @property
    def whole(self) -> Method | None:
        """As it is served; None where it leaves several lengths open at a load, or is plain
        decoding at all."""
        if any(len(lengths) != 1 for _, lengths in self.lengths):
            return None
        table = {load: lengths[0] for load, lengths in self.lengths}
        longest = max(table.values())
        if longest == 0:
            return None
        n = DEFAULTS[self.method][1]
        return Method(self.method, longest, n, schedule_of(table))


def check_imported(settings: EngineTuneSettings, imported: Imported) -> None:
    """Refuse a schedule that cannot be compared.

    Raises:
        DraftwellError: its method is not tuned, or only one load is measured (`bad_import`).
    """
    if imported.method not in settings.methods:
        raise DraftwellError(
            f"{imported.source} is of {imported.method}: name that in methods",
            code="bad_import",
        )
    if len(settings.levels) == 1:
        raise DraftwellError(
            f"{imported.source} is compared at several loads: name them, such as --set "
            f"levels=1,8,32",
            code="bad_import",
        )


def with_lengths_of(lengths: Mapping[str, Lengths], imported: Imported) -> dict[str, Lengths]:
    """Method → draft lengths, with its own among those of its method."""
    theirs = {k for _, loaded in imported.lengths for k in loaded} - {0}
    own = tuple(sorted({*lengths[imported.method], *theirs}))
    return {**lengths, imported.method: own}


def beside_imported(
    lab: Lab, settings: EngineTuneSettings, imported: Imported, found: EngineChoice
) -> EngineChoice:
    """The choice, or the imported schedule where that pays at all loads and is the faster one over
    them (geometric mean).

    Args:
        lab: open, with everything of `found` in its store.
    """
    theirs = imported.whole
    if theirs is None or theirs == found.chosen:
        return found
    out, figures = dict(found.left_out), list[Figure]()
    with left_out_if_it_fails(out, theirs.label):
        figures = lab.measure(theirs, "imported", settings.levels, tail=TAIL / 2)
    found = found.model_copy(update={"left_out": out, "loads": (*found.loads, *figures)})
    if not figures:
        return found
    told = f"{imported.source}: {theirs.label}"
    ours, other = over_loads(own_figures(found)), over_loads(figures)
    if not pays(imported, figures):
        return said(found, f"{told} is not surely faster than plain decoding where it drafts")
    if other <= ours:
        return said(found, f"{told} is not faster over all loads ({other:.2f}, ours {ours:.2f})")
    reason = f"{told} is faster over all loads ({other:.2f} times plain decoding, ours {ours:.2f})"
    levels = tuple(Level(at_once=load, k=ks[0], open=ks) for load, ks in imported.lengths)
    return found.of(theirs, reason).model_copy(
        update={"schedule": theirs.schedule, "levels": levels, "scheduled": tuple(figures)}
    )


def own_figures(found: EngineChoice) -> list[Figure]:
    """Of the choice at each load that it was measured at, as it is served; none of plain
    decoding."""
    if found.method == OFF:
        return []
    label = found.chosen.label
    of_it = {
        figure.at_once: figure
        for figure in (*found.confirmed, *found.loads, *found.scheduled)
        if figure.label == label
    }
    return list(of_it.values())


def over_loads(figures: Sequence[Figure]) -> float:
    """Geometric mean of the speed over plain decoding; 1 without figures: plain decoding itself."""
    logs = [log(figure.ratio) for figure in figures]
    return exp(fsum(logs) / len(logs)) if logs else 1.0


def pays(imported: Imported, figures: Sequence[Figure]) -> bool:
    """Whether it is surely faster at each load at which it drafts, on enough prompts, and not
    surely slower at the others: as for lengths that are found here."""
    drafts = {load: any(lengths) for load, lengths in imported.lengths}
    return all(
        figure.surely_faster and figure.prompts >= FEWEST_PROMPTS
        if drafts[figure.at_once]
        else not figure.surely_slower
        for figure in figures
    )


def said(found: EngineChoice, words: str) -> EngineChoice:
    """The same choice, whose reason says why it is not the imported schedule."""
    return found.model_copy(update={"reason": f"{found.reason}; {words}"})
