"""The run of `draftwell reproduce gpu`: its parts, one after another, in a home of their own."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from draftwell.components.bench.gpu.card import Card, describe_card
from draftwell.components.bench.gpu.limited import run_limited
from draftwell.components.bench.gpu.parts import Part, measure_parts
from draftwell.components.bench.gpu.results import GpuResults, file_of, read_results, results_in
from draftwell.components.bench.gpu.table import write_page
from draftwell.flows.cli.gpu_parts import (
    Scale,
    Trial,
    import_commands,
    parts_of,
    prepare,
    restore_tuned,
)
from draftwell.flows.cli.options import say, write_json
from draftwell.registry.pairs import find_pair
from draftwell.serving.artifacts.pair_files import draftwell_home, models_root
from draftwell.serving.device import cuda_problem
from draftwell.serving.errors import DraftwellError

SCALE = Scale()
CARD_SECONDS, PREPARING_SECONDS = 60.0, 120.0


def measure_card(
    pair: str, out: Path | None, kit: Path, minutes: float, only: str, page: Path | None
) -> None:
    """Measure what is wanted, and write the table of all results into a page; arguments as of the
    command."""
    end = time.monotonic() + 60 * minutes
    name = find_pair(pair).name
    work = (draftwell_home() / "gpu").absolute()
    out = (out or work).absolute()
    card = card_here(work)
    if isinstance(card, str):
        say(f"nothing was measured: {card}")
    else:
        file = file_of(out, name, card)
        say(f"{card.name}: copies {card.bandwidth:,.0f} GB/s; results go to {file}")
        measure(Trial(pair, SCALE, kit, bundle_of(kit, name)), card, file, work, end, only)
    found = results_in(out)
    if page is not None and found:
        write_page(page, found)
        say(f"the table is in {page}")
    elif page is not None:
        say(f"no results in {out}: {page} stays as it is")


def card_here(work: Path) -> Card | str:
    """The card of this machine, or why there is none: asked in another process, so that this one
    has never used CUDA and may be copied."""
    (found := work / "card.json").unlink(missing_ok=True)
    state, why = run_limited(partial(look_at_card, found), CARD_SECONDS, work / "card.log")
    if state != "measured":
        return why
    answer = json.loads(found.read_text())
    return str(answer["problem"]) if "problem" in answer else Card.model_validate(answer)


def look_at_card(found: Path) -> None:
    """Write what the card is, or why there is none."""
    problem = cuda_problem()
    write_json(found, {"problem": problem} if problem else describe_card().model_dump())


def bundle_of(kit: Path, pair: str) -> Path:
    """The bundle that came along, else the one that is deployed here."""
    brought = kit / "bundle"
    return brought if brought.is_dir() else Path("dist") / pair / "current"


def measure(trial: Trial, card: Card, file: Path, work: Path, end: float, only: str) -> None:
    """Measure what is wanted in a home of the run's own; models stay where they are."""
    name = find_pair(trial.pair).name
    results = read_results(file) if file.is_file() else GpuResults(pair=name, card=card)
    if (results.pair, results.card.device_class) != (name, card.device_class):
        raise DraftwellError(
            f"{file} holds results of {results.pair} on {results.card.name}: move it away",
            code="results_of_other_card",
        )
    if (results.card.torch, results.card.cuda) != (card.torch, card.cuda):
        results = GpuResults(pair=name, card=card)  # nothing there is of these libraries
    results = results.model_copy(update={"card": card})
    parts = chosen(parts_of(trial), only)
    import_commands()
    with at_home(work / "home" / card.device_class):
        say("preparing models")
        left = min(PREPARING_SECONDS, end - time.monotonic())
        state, why = run_limited(partial(prepare, trial), left, work / "models.log")
        if state != "measured":
            say(f"every part is skipped, without the models of {trial.pair}: {why}")
            return
        restore_tuned(trial, results)
        measure_parts(parts, results, file, work / card.device_class, end, say)


@contextmanager
def at_home(home: Path) -> Iterator[None]:
    """Let this process, and those that it starts, have another home with the same models."""
    places = {"DRAFTWELL_MODELS": models_root().absolute(), "DRAFTWELL_HOME": home}
    before = {name: os.environ.get(name) for name in places}
    os.environ.update({name: str(place) for name, place in places.items()})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def chosen(parts: list[Part], only: str) -> list[Part]:
    """The parts that are named, in their order; all where none is."""
    names = {name.strip() for name in only.split(",") if name.strip()}
    known = [part.name for part in parts]
    if unknown := sorted(names - set(known)):
        raise DraftwellError(
            f"--set only={unknown[0]}: there is no such part, choose among {', '.join(known)}",
            code="unknown_part",
        )
    return [part for part in parts if not names or part.name in names]
