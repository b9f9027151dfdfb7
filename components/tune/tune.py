"""Tuning: which strategy, with which parameters, for this pair, this machine and these prompts.

Replay over a trace predicts many configurations without a model, and those that no replay can predict are tried briefly; the
best of both are measured by successive halving beside plain decoding and the champion. A configuration is chosen only if it keeps
to the constraints and is surely faster than plain decoding in a measurement that had no part in selecting it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from components.collect.decoding import encode_all
from components.prompts.prompt import Prompt, prompts_digest
from components.replay.head_scores import score_rollouts
from components.replay.texts import Texts, read_texts
from components.report.machine import describe_machine
from components.tune.candidates import EXPLORE_TOKENS, Explorer, choose_strategies, unfit_champion
from components.tune.constraints import ConstraintChecker, Constraints, VanillaBaseline
from components.tune.evaluator import Config, Evaluate, QualityOf, label_of
from components.tune.evidence import artifacts_of, evidence_of, rollouts_of
from components.tune.report.reading import describe_config
from components.tune.resume import Ledger
from components.tune.search.search import Log, Progress, Search, Trial, fastest_vanilla, shortlist
from components.tune.search.space import MEASURED, REPLAYED, key
from components.tune.search.studies import Studies
from components.tune.successive_halving import PLAIN, halve, named
from serving.artifacts.acceptance_head import AcceptanceHead
from serving.artifacts.base import ArtifactError
from serving.artifacts.hardware_profile import HardwareProfile
from serving.errors import DraftwellError
from serving.recording.trace import TraceSet
from serving.runtime.pair import LoadedPair
from serving.runtime.strategies import StrategyResources, find_strategy

SPECDEC_PP = "specdec_pp"
FEWEST_PROMPTS = 8
"""Of a confirmation, for a choice over plain decoding. A bootstrap knows no slower prompt than those it has: of n prompts on which
chance decides, all n say "faster" once in 2ⁿ times, and then so does every resample."""
Spread = Callable[[Search, Mapping[str, int]], Sequence[Trial]]
"""Has the configs of these strategies replayed elsewhere, as many of each as it says, and returns what came of them."""


@dataclass(frozen=True)
class Tuned:
    """The choice, and what it rests on as plain JSON (see `evidence`)."""

    strategy: str
    parameters: dict[str, Any]
    evidence: dict[str, Any]


def tune_strategy(
    pair: LoadedPair,
    trace: TraceSet,
    prompts: Sequence[Prompt],
    resources: StrategyResources,
    profile: HardwareProfile,
    *,
    evaluate: Evaluate,
    quality: QualityOf | None = None,
    strategies: Sequence[str] | None = None,
    constraints: Constraints | None = None,
    champion: Config | None = None,
    trials: int = 60,
    explore: int = 5,
    measure_top: int = 5,
    max_tokens: int = 64,
    seed: int = 0,
    overlap: bool = True,
    study: Path | None = None,
    named_study: bool = False,
    rungs: Path | None = None,
    spread: Spread | None = None,
    log: Log | None = None,
    progress: Progress | None = None,
) -> Tuned:
    """Choose a strategy and its parameters.

    Args:
        trace: of this pair, at temperature 0.
        prompts: what is measured on; others than the trace's show what the choice is worth on new ones.
        resources: artifacts; a strategy that lacks one is left out, and the evidence says so.
        evaluate: measures (`contest.Contest`).
        quality: judges outputs (`contest.Reader`); needed for lossy strategies.
        strategies: names to choose among, None takes all that are allowed and possible.
        constraints: None takes the defaults: lossless strategies only.
        champion: what is served now; measured beside the others throughout, and chosen if it is still the best.
        trials: replays in all.
        explore: configs of each strategy that no replay can predict, measured on 2 prompts × 24 tokens.
        measure_top: replayed configs that enter the halving; of the explored ones half as many do, rounded up.
        max_tokens: tokens per prompt, as `evaluate` measures them; predictions are of as many, or of all that the trace's texts have.
        overlap: whether forwards that a strategy overlaps run at once.
        study: SQLite file of trials, so that a run that was cut short goes on; None keeps them in memory.
        named_study: the user chose that file, so a search of another kind in it is refused.
        rungs: JSON file of what was measured, for the same purpose; whoever keeps the result removes it.
        spread: has replays made by others, but for SpecDec++, whose rollouts the draft that is loaded here scores; measurements are
            always made here, one at a time, because they are timings.
        log: called with ("predicted_seconds_per_token/<strategy>", value, trial).
    Raises:
        ContextTooLong: a prompt is too long for a model that may read it; nothing has been replayed or measured then.
        DraftwellError: no prompts, an empty trace or one of another pair, an unknown or unfit strategy, a study of another search, a
            measurement that is no number.
    """
    if not prompts:
        raise DraftwellError("there are no prompts to measure on: name a file that holds some")
    if min(trials, explore, measure_top) < 1:
        raise DraftwellError(f"trials, explore and measure_top must be at least 1, not {trials}, {explore} and {measure_top}")
    constraints = constraints or Constraints()
    if constraints.max_cost_ratio is not None and "draft" not in pair.models:
        raise DraftwellError("a cost ratio is against vanilla SD, which needs a draft model: leave --max-cost-ratio out")
    trace = check_trace(pair, trace, profile)
    names, left_out = choose_strategies(pair, resources, strategies, constraints.lossless_only, quality)
    if champion is not None and (why := unfit_champion(pair, resources, champion, quality)):
        left_out["champion"], champion = why, None
    wanted = [PLAIN[0], *names, *([champion[0]] if champion is not None else [])]
    encode_all(pair, prompts, max_tokens, {role for name in wanted for role in find_strategy(name).roles})  # else the last rung may say so
    texts, digest = texts_for(pair, trace, resources, names), trace.digest()
    studies = Studies(study, seed, named=named_study)
    search = Search(texts, resources, profile, min(max_tokens, texts.max_tokens), overlap, studies, digest)
    evaluate = Ledger(evaluate, rungs, {"fingerprint": pair.fingerprint, "device_class": profile.provenance.device_class,
                                        "artifacts": artifacts_of(resources), "max_tokens": max_tokens, "padded_to": pair.padded_to,
                                        "threads": torch.get_num_threads()})
    explorer = Explorer(pair, search, evaluate, quality, prompts, profile)
    try:
        studies.check({name: explorer.describe(name) for name in names})
        replayable = [name for name in names if name in REPLAYED]
        left = search.unfinished(replayable, trials) if spread is not None else {}
        left.pop(SPECDEC_PP, None)  # its rollouts are scored by the draft that is loaded here
        if spread is not None and left:
            search = replace(search, known={(t.strategy, key(t.parameters)): t for t in spread(search, left)})
        replayed = search.run(replayable, trials, log, progress)
        explored, estimates = explorer.run([name for name in names if name in MEASURED], explore)
    finally:
        studies.close()
    vanilla = fastest_vanilla(search, replayed) if "draft" in pair.models else None
    plain = search.predict(*PLAIN)
    judge = ConstraintChecker(constraints, quality, vanilla.target_calls_per_token if vanilla else None,
                  {label_of((t.strategy, t.parameters)): float(t.target_calls_per_token or 0) for t in [plain, *replayed]},
                  VanillaBaseline(evaluate, (vanilla.strategy, vanilla.parameters)) if vanilla else None)
    tried = [*replayed, *explored]
    allowed = [trial for trial in tried if constraints.objection(figures_of(trial, judge, explorer.few)) is None]
    best = [*shortlist([t for t in allowed if t.source == "replayed"], measure_top),
            *shortlist([t for t in allowed if t.source == "measured"], (measure_top + 1) // 2)]
    halved = halve(evaluate, [(trial.strategy, trial.parameters) for trial in best], prompts, champion=champion, seed=seed,
                   fit=judge.fit)
    confirmed = [figure | judge.figures(config, prompts, result, halved.confirmed[0][1])
                 for figure, (config, result) in zip(halved.confirmation, halved.confirmed, strict=True)]
    for figure in confirmed:
        figure["objection"] = constraints.objection(figure)
    (strategy, parameters), reason = choose(confirmed, halved.tail, len(tried), len(allowed))
    evidence = evidence_of(tried, halved, confirmed, [plain, *([vanilla] if vanilla else []), *estimates]) | {
        "choice": {"strategy": strategy, "parameters": parameters}, "reason": reason,
        "champion": named(champion) if champion is not None else None,
        "constraints": vars(constraints), "left_out": left_out, "rollouts": rollouts_of(search, names, replayed),
        "trace_digest": digest, "artifacts": artifacts_of(resources), "fingerprint": pair.fingerprint, "padded_to": pair.padded_to,
        "device_class": profile.provenance.device_class, "machine": describe_machine(pair), "prompts": len(prompts),
        "prompts_digest": prompts_digest(prompts), "max_tokens": max_tokens, "replayed_tokens": search.max_tokens,
        "seed": seed}
    return Tuned(strategy, parameters, evidence)


def texts_for(pair: LoadedPair, trace: TraceSet, resources: StrategyResources, names: Sequence[str]) -> Texts:
    """The trace's texts; with what the resources' acceptance head says along their rollouts where SpecDec++ is to be replayed."""
    texts = read_texts(trace)
    head: Any = resources.artifacts.get(AcceptanceHead.kind)
    return score_rollouts(pair, texts, head) if SPECDEC_PP in names else texts


def figures_of(trial: Trial, judge: ConstraintChecker, few: Sequence[Prompt]) -> dict[str, Any]:
    """What constraints ask of a trial; ROUGE-L is asked of longer texts only. `few`: what explored ones were measured on."""
    calls, config = trial.target_calls_per_token, (trial.strategy, trial.parameters)
    return {"lossless": find_strategy(trial.strategy).lossless, "quality_loss": trial.divergence or 0.0, "rouge_l_lost": None,
            "cost_ratio": None if calls is None else judge.cost_ratio(config, calls, few, EXPLORE_TOKENS)}


def check_trace(pair: LoadedPair, trace: TraceSet, profile: HardwareProfile) -> TraceSet:
    """The trace, bound to this pair; a trace or profile of another pair is refused."""
    bound = TraceSet(trace.folder, fingerprint=pair.fingerprint)
    _ = bound.header
    owner = profile.provenance
    if owner.fingerprint and owner.fingerprint != pair.fingerprint:
        raise ArtifactError(f"the hardware profile belongs to pair {owner.pair} with fingerprint {owner.fingerprint[:12]}, not "
                            f"{pair.fingerprint[:12]}: calibrate this pair (draftwell calibrate)")
    return bound


def choose(figures: Sequence[Mapping[str, Any]], tail: float, tried: int, allowed: int) -> tuple[Config, str]:
    """The fastest config that is allowed and whose speedup's lower bound is at least 1, else plain decoding; and why, in a sentence.

    Fewer prompts than `FEWEST_PROMPTS` choose nothing.

    Args:
        figures: of the confirmation; the first is plain decoding's. `objection` says which constraint a config breaks.
        tail: of their intervals.
        tried, allowed: how many configs were predicted or explored, and how many of these keep to the constraints.
    """
    others = sorted(figures[1:], key=lambda figure: -figure["speedup"])
    fitting = [figure for figure in others if figure["objection"] is None]
    sure = [figure for figure in fitting if figure["speedup_low"] >= 1.0]
    plain = PLAIN[0]
    if fitting and figures[0]["prompts"] < FEWEST_PROMPTS:
        return PLAIN, (f"{plain}, because {figures[0]['prompts']} prompts are too few to choose anything else: measure on at least "
                       f"{FEWEST_PROMPTS}; the best there, {describe_config(fitting[0])}, was {fitting[0]['speedup']:.2f} times as fast")
    if sure:
        best = sure[0]
        return (best["strategy"], dict(best["parameters"])), (
            f"{describe_config(best)} is {best['speedup']:.2f} times as fast as {plain} (at least {best['speedup_low']:.2f} times, "
            f"one-sided {100 * (1 - tail):.1f} %)"
        )
    if fitting:
        best = fitting[0]
        return PLAIN, (
            f"{plain}, because nothing is surely faster: the best, {describe_config(best)}, measured {best['speedup']:.2f} times its "
            f"speed with a lower bound of {best['speedup_low']:.2f}"
        )
    if others:
        return PLAIN, f"{plain}, because nothing keeps to the constraints: {describe_config(others[0])} does not, {others[0]['objection']}"
    if tried and not allowed:
        return PLAIN, f"{plain}, because none of {tried} configurations keeps to the constraints"
    return PLAIN, f"{plain}, because there was nothing to compare it with"
