"""The regret of a choice for another engine (`draftwell.components.tune.regret`): every way is
measured again on all prompts, then the choice and the best of the others beside each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from draftwell.components.engines.vllm_methods import OFF, Method
from draftwell.components.tune.engines.choice import EngineChoice
from draftwell.components.tune.engines.lab import Lab, left_out_if_it_fails
from draftwell.components.tune.engines.ngram_replay import Text
from draftwell.components.tune.engines.settings import EngineTuneSettings
from draftwell.components.tune.engines.tune import ways
from draftwell.components.tune.regret import regret_of
from draftwell.serving.errors import DraftwellError


def grid_regret(
    lab: Lab, settings: EngineTuneSettings, choice: EngineChoice, texts: Sequence[Text] | None
) -> dict[str, Any]:
    """All that a tuning chooses among measured again, one request at a time, and what the choice
    lost.

    Returns:
        plain JSON: `figures` of the grid, `regret` of the choice (`Regret`; None where it could not
        be measured beside the best of the others) and `left_out` (label → why).
    """
    grid: dict[Method, float] = {Method(): 1.0}
    figures, failed = [], dict[str, str]()
    own = choice.alone
    with lab.open():
        names = [name for name in settings.methods if name not in (OFF, *choice.left_out)]
        tried = [own] if own.name != OFF else []
        for method in dict.fromkeys([*tried, *ways(lab, settings, names, failed, texts)]):
            with left_out_if_it_fails(failed, method.label):
                (figure,) = lab.measure(method, "grid")
                grid[method] = figure.ratio
                figures.append(figure.model_dump(mode="json"))
        regret = None
        if own in grid and len(grid) > 1:
            best = max(grid.keys() - {own}, key=lambda method: grid[method])
            regret = beside_best(lab, own, best, failed)
    return {"figures": figures, "regret": regret, "left_out": failed}


def beside_best(
    lab: Lab, own: Method, best: Method, failed: dict[str, str]
) -> dict[str, Any] | None:
    """What the choice lost to the best of the others, both beside each other: the only time that
    two ways to speculate are up at once, for which memory may not suffice."""
    name = f"{best.label} beside {own.label}"
    try:
        with left_out_if_it_fails(failed, name):
            beside = lab.between(own, best, "regret")
            return regret_of(best.label, beside.plain, beside.other).model_dump(mode="json")
    except DraftwellError as error:
        if error.code not in ("engine_killed", "engine_out_of_memory"):
            raise
        failed[name] = str(error)
    return None
