"""The whole loop on another engine: collect, train, tune, gate, deploy, serve, monitor, one after
the other, in a given time.

Every step keeps what it has finished where the single commands keep it, and begins with what is
there: a run that was killed is started again in the same way and continues. What is left of the
time after collecting and training, less what the last steps take, is the tuning's.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from shutil import rmtree
from typing import TYPE_CHECKING, Any

from draftwell.components.drift.schema import NOT_ENOUGH
from draftwell.components.engines.texts import rows_of
from draftwell.components.engines.vllm_methods import OFF, ONE_LENGTH, Method
from draftwell.components.prompts.overlap import hashes_of
from draftwell.components.tune.engines.budget import NO_TIME, Budget
from draftwell.components.tune.engines.regret import grid_regret
from draftwell.flows.context import pictures_of, training_prompts
from draftwell.flows.steps.eagle3 import HeadRequest, run_train_eagle3
from draftwell.flows.steps.engine.collect import collect_on_engine
from draftwell.flows.steps.engine.deploy import deploy_on_engine, unmeasured_loads
from draftwell.flows.steps.engine.gate import gate_on_engine, judged_digest
from draftwell.flows.steps.engine.monitor import check_engine
from draftwell.flows.steps.engine.release import (
    EngineRelease,
    choice_of,
    publish_on_engine,
    with_choice,
)
from draftwell.flows.steps.engine.serve import serve_and_ask
from draftwell.flows.steps.engine.served import Deployment
from draftwell.flows.steps.engine.settings import LoopSettings
from draftwell.flows.steps.engine.space import EngineSpace, about, untouched
from draftwell.flows.steps.engine.tune import (
    lab_of,
    refuse_if_nothing_is_left,
    tune_on_engine,
    tuning_subject,
    with_marked,
)
from draftwell.registry.bundles.vllm.build import activate_vllm_bundle
from draftwell.registry.bundles.vllm.edits import keep_edits
from draftwell.registry.bundles.vllm.render import MANIFEST
from draftwell.registry.promotion import outdated, promote
from draftwell.registry.releases import gate_record, is_champion, objection
from draftwell.registry.store import Store
from draftwell.serving.artifacts.base import ArtifactError, read_manifest
from draftwell.serving.errors import DraftwellError
from draftwell.serving.files import write_json

if TYPE_CHECKING:
    from draftwell.components.drift.schema import DriftLimits
    from draftwell.components.gate.verdict import Thresholds
    from draftwell.components.prompts.prompt import Prompt
    from draftwell.components.tune.engines.choice import EngineChoice
    from draftwell.components.tune.engines.ngram_replay import Text

STEPS = ("collect", "train", "tune", "gate", "deploy", "serve", "monitor")
TEXTS, REPORT = "loop-texts.jsonl", "loop.json"
LAST_STEPS = 0.3
"""Share of the time that is kept for gate, deployment, serving and monitoring: four starts of the
engine and some minutes."""
LEAST_SECONDS = 60.0
"""Below which a tuning is not begun."""
NO_HEAD = ("unsupported_architecture", "too_shallow")
"""Codes of targets that no head can be trained for: the loop continues without one."""


@dataclass
class EngineLoop:
    """The loop of a pair.

    Args:
        prompts: from which every step takes its own.
        say: is told what begins and what came of it.
        clock: seconds, ascending.
        activate: lets a bundle be what is served, after it was tried.
        deployment: what a person decided about the bundle, such as its port, and at which
            temperature it is tuned and judged.
    """

    space: EngineSpace
    prompts: Sequence[Prompt]
    wanted: LoopSettings
    thresholds: Thresholds
    limits: DriftLimits
    say: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    report: dict[str, Any] = field(default_factory=dict)
    activate: Callable[[Path], None] = activate_vllm_bundle
    deployment: Deployment = field(default_factory=Deployment)

    def run(self) -> dict[str, Any]:
        """Run all steps; where the gate does not pass, nothing after it.

        Returns:
            plain JSON, which is also written into the engine's folder of the workspace: `seconds`
            of each step, `collected`, `head`, `choice`, `release`, `regret`, `record` (the gate's),
            where it passed `bundle`, `served` and `drift`, and `grid` where it was asked for.
        Raises:
            DraftwellError: what steps raise; there are too few prompts (`few_prompts`), or there is
                no time left to tune (`no_time`).
        """
        self.begun = self.clock()
        # a run that is stopped leaves no report of an earlier one
        (self.space.folder / REPORT).unlink(missing_ok=True)
        self.report = {**about(self.space), "minutes": self.wanted.minutes, "seconds": {}}
        with self.step("collect"):
            texts = self.collect()
        with self.step("train"):
            self.train()
        with self.step("tune"):
            released = self.tune(texts)
        choice = released.choice
        with self.step("gate"):
            passed = self.gate(released)
        if passed:
            at_once = (
                max((level.at_once for level in choice.levels), default=1)
                if choice.method != OFF
                else max(self.wanted.levels)
            )
            with self.step("deploy"):
                bundle = self.deploy(released, at_once)
            with self.step("serve"):
                self.serve(bundle, at_once)
                self.promote(released)  # not before it has answered
                self.activate(bundle)
            with self.step("monitor"):
                self.monitor()
        if self.wanted.grid:
            write_json(self.space.folder / REPORT, self.report)  # the grid takes long, and may fail
            with self.step("grid"):
                self.grid(choice, texts)
        write_json(self.space.folder / REPORT, self.report)
        return self.report

    @property
    def trial_spool(self) -> Path:
        """Folder of the counts of requests that this loop sends."""
        return self.space.folder / "trial-spool"

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """A step of the loop, which is told and timed."""
        begun = self.clock()
        steps = [*STEPS, *(["grid"] if self.wanted.grid else [])]
        self.say(
            f"{steps.index(name) + 1}/{len(steps)} {name}, after "
            f"{clock_time(begun - self.begun)} of {self.wanted.minutes:g} minutes"
        )
        yield
        self.report["seconds"][name] = round(self.clock() - begun, 1)

    def learnt(self) -> list[Prompt]:
        """The prompts that texts are collected for, and that a head is trained on.

        Raises:
            DraftwellError: too few are left for the other steps.
        """
        wanted = self.wanted
        if len(self.prompts) < wanted.needed:
            raise DraftwellError(
                f"there are {len(self.prompts)} prompts, and {wanted.needed} are needed: "
                f"{wanted.collect_prompts} to collect, "
                f"{wanted.tune_prompts} to tune and {wanted.bench_prompts} to judge: name a file "
                "that holds more",
                code="few_prompts",
            )
        return list(self.prompts[: wanted.collect_prompts])

    def collect(self) -> list[Text]:
        """Texts of vLLM's plain decoding, for tuning."""

        wanted, file = self.wanted, self.space.folder / TEXTS
        sampling = self.space.pair.sampling(max_tokens=wanted.max_tokens)
        try:
            made = collect_on_engine(
                self.space, self.learnt(), Method(), sampling, file, fresh=wanted.fresh
            )
        except DraftwellError as error:
            if error.code != "other_texts":
                raise
            self.say(
                "    the texts of an earlier run are of other prompts or settings: collected again"
            )
            made = collect_on_engine(
                self.space, self.learnt(), Method(), sampling, file, fresh=True
            )
        speed = made["tokens_per_second"]
        self.report["collected"] = {
            "rows": made["rows"],
            "tokens": made["tokens"],
            "tokens_per_second": speed,
        }
        self.say(
            f"    {made['rows']} texts, {made['tokens']} tokens"
            + (", of an earlier run" if speed is None else f", {speed:.0f} tokens/s, eight at once")
        )
        return [(row["prompt_ids"], row["tokens"]) for row in rows_of(file)]

    def train(self) -> None:
        """An EAGLE-3 head, where the pair has none or time for one was named."""
        methods, minutes = self.wanted.methods, self.wanted.train_minutes
        if methods is not None and "eagle3" not in methods:
            self.told("head", "no head is needed for the methods that were named")
        elif minutes is None and self.space.files.head is not None:
            self.told("head", f"the pair has a head: {self.space.files.head.name}")
        else:
            self.told("head", self.train_head(minutes or self.wanted.minutes / 5))
            self.space = replace(self.space)  # another head, or none, is known of the one before

    def train_head(self, minutes: float) -> str:
        """Train one on the prompts that texts were collected for, and say how it fares; the head
        that they made already is kept."""

        space, prompts = self.space.workspace, self.learnt()
        if not self.wanted.fresh and self.head_hashes() == set(hashes_of(prompts)):
            return "the head of an earlier run, trained on the same prompts"
        try:
            head, report = run_train_eagle3(
                space, HeadRequest(prompts=prompts, minutes=minutes), say=self.say
            )
        except DraftwellError as error:
            if error.code not in NO_HEAD:
                raise
            return f"none is trained: {error}"
        made = Store().publish(
            space.folder(head.kind),
            pair=space.spec.name,
            metrics=report["curves"],
            plots=pictures_of(space, head.kind),
        )
        return (
            f"trained for {minutes:g} minutes, {report['accepted_length']:.2f} tokens of a "
            f"draft are kept; {made.name} {made.version}"
        )

    def head_hashes(self) -> set[str]:
        """Hashes of the prompts that the workspace's head was trained on; empty where there is
        none."""

        try:
            return set(
                read_manifest(self.space.workspace.folder("eagle3_head"))["provenance"].get(
                    "training_prompts"
                )
                or ()
            )
        except ArtifactError:
            return set()

    def tune(self, texts: Sequence[Text]) -> EngineRelease:
        """A release of the choice, with its regret; that of an earlier run stays where nothing that
        it depends on has changed."""

        wanted, settings = self.wanted, self.wanted.tuning(self.deployment.temperature)
        self.space = with_marked(self.space)
        if wanted.methods is not None:
            refuse_if_nothing_is_left(self.space, settings)
        prompts = self.prompts_to_tune()
        _, store = lab_of(self.space, prompts, settings, fresh=False)
        config = self.space.config(settings.temperature)
        subject = tuning_subject(store, settings, texts)
        same = config is not None and config.contents.subject == subject
        before = choice_of(config) if config is not None and same else None
        left = 60 * wanted.minutes * (1 - LAST_STEPS) - (self.clock() - self.begun)
        unfinished = (
            before is not None and NO_TIME in before.left_out.values() and left >= LEAST_SECONDS
        )
        if wanted.fresh or before is None or unfinished:
            if left < LEAST_SECONDS:
                raise DraftwellError(
                    "collecting and training left no time to tune: name more than "
                    f"{wanted.minutes:g} --minutes; what was "
                    "collected is kept",
                    code="no_time",
                )
            if unfinished:
                self.say("    an earlier run had no time for all of it: tuned on")
            tune_on_engine(
                self.space,
                prompts,
                settings,
                fresh=wanted.fresh,
                texts=texts,
                budget=Budget(left, self.clock),
            )
        else:
            self.say("    the choice of an earlier run: --fresh tunes again")
        self.bound()
        released = publish_on_engine(self.space, settings.temperature)
        choice = released.choice
        self.report["release"] = released.release.name
        self.report["choice"] = choice.model_dump(mode="json")
        self.say(f"    {choice.reason}")
        for name, why in choice.left_out.items():
            self.say(f"    left out: {name}, {why}")
        return released

    def bound(self) -> None:
        """Where more requests are served at once than the choice was measured with, make it one
        with lengths by load, which the gate judges: the bundle drafts nothing beyond them then.
        Methods of one length draft there, and `deploy` says so."""
        config = self.space.tuned_config(self.deployment.temperature)
        choice = choice_of(config)
        top = max((level.at_once for level in choice.levels), default=1)
        if (
            choice.schedule
            or choice.method in (OFF, *ONE_LENGTH)
            or self.deployment.at_once(top) == top
        ):
            return
        bounded = choice.model_copy(update={"schedule": ((1, top, choice.k),)})
        with_choice(self.space, config, bounded)

    def prompts_to_tune(self) -> list[Prompt]:
        """The first after those that were collected."""

        wanted = self.wanted
        rows = self.prompts[wanted.collect_prompts : len(self.prompts) - wanted.bench_prompts]
        prompts, lines = training_prompts(self.space.workspace, kinds=("eagle3_head",)).untouched(
            rows, wanted.tune_prompts
        )
        for line in lines:
            self.say(line)
        return prompts

    def gate(self, released: EngineRelease) -> bool:
        """Whether the gate passes the release; a record that passed it on these prompts stays."""
        wanted, release = self.wanted, released.release
        rows = untouched(self.space, self.prompts[::-1], wanted.bench_prompts, released.config)
        record = None if wanted.fresh else gate_record(release)
        if (
            record is not None
            and record.judged == judged_digest(rows, wanted.max_tokens)
            and objection(release, record) is None
            and outdated(Store(), release, record) is None
        ):
            self.say("    passed in an earlier run")
            self.report["record"] = {"passed": True, "checks": [], "figures": []}
            return True
        verdict, figures = gate_on_engine(
            self.space, released, rows, self.thresholds, wanted.max_tokens
        )
        self.say(f"    {verdict.result}")
        self.report["record"] = {
            "passed": verdict.passed,
            "checks": [vars(check) for check in verdict.checks],
            "figures": [figure.model_dump(mode="json") for figure in figures],
        }
        return verdict.passed

    def promote(self, released: EngineRelease) -> None:
        """Make a release that passed and that has served a trial the champion."""
        store, release = Store(), released.release
        if not is_champion(store, release):
            promote(store, release.pair, release.device, release.version)
            self.say(f"    {release.name} is the champion")

    def deploy(self, released: EngineRelease, at_once: int) -> Path:
        """The bundle, for as many requests at once as were measured; of plain decoding, for all
        that were named. `current` stays.

        What it follows is served for no fewer, and what a person decided about that stays: its
        options, and the files that are theirs.
        """
        kept = self.deployment
        if at_once < max(self.wanted.levels):
            self.say(
                f"    measured for {at_once} at once: there was no time to measure more; "
                "name more --minutes and run it again"
            )
        bundle = deploy_on_engine(
            self.space,
            released,
            self.wanted.out,
            options={**kept.options, "max_num_seqs": str(kept.at_once(at_once))},
            with_weights=kept.with_weights,
            activate=False,
        )
        before = kept.follows
        if before is not None and before != bundle.resolve():
            self.keep_edits(before, bundle)
        self.report["bundle"] = str(bundle)
        settings = json.loads((bundle / MANIFEST).read_text(encoding="utf-8"))["settings"]
        self.say(f"    {bundle}, which decodes up to {settings['max_num_seqs']} requests at once")
        if line := unmeasured_loads(released.choice, settings):
            self.say(f"    {line}")
        return bundle

    def keep_edits(self, before: Path, bundle: Path) -> None:
        """Copy a user's files into the bundle that follows, and say which."""
        kept = keep_edits(before, bundle)
        if kept.names:
            self.say(f"    kept of {before.name}: {', '.join(kept.names)}")
        if kept.unknown:
            self.say(
                f"    made again: {', '.join(kept.unknown)}; an earlier version made "
                f"{before.name}, and what you changed there is not "
                "known: change it again here"
            )

    def serve(self, bundle: Path, at_once: int) -> None:
        """Requests to what was deployed; what is counted of them stays apart from what users'
        requests leave for monitoring."""
        rmtree(self.trial_spool, ignore_errors=True)
        wanted = self.wanted
        ids, _ = self.space.encoded(self.prompts[wanted.collect_prompts :], wanted.max_tokens)
        served = serve_and_ask(
            bundle,
            self.space.workspace.spec.name,
            ids,
            max_tokens=wanted.max_tokens,
            seconds=wanted.serve_seconds,
            clients=at_once,
            port=wanted.port,
            spool=self.trial_spool,
        )
        self.report["served"] = served.to_json()
        self.say(
            f"    {served.requests} requests of {served.clients} clients, {served.tokens} "
            "tokens in "
            f"{served.seconds:.0f} s"
        )

    def monitor(self) -> None:
        """Whether drafts fared as they did when they were tuned."""
        self.report["drift"] = self.since_tuning()
        self.say(f"    {self.report['drift']['verdict']}: {self.report['drift']['why']}")

    def since_tuning(self) -> dict[str, str]:
        """`verdict` and `why`; the trial's requests are greedy, and say nothing about sampled
        ones."""

        if temperature := self.deployment.temperature:
            return {
                "verdict": NOT_ENOUGH,
                "why": (
                    f"it is tuned for temperature {temperature:g}, and the trial's requests "
                    "were greedy"
                ),
            }
        try:
            found = check_engine(
                self.space, spool=self.trial_spool, out=self.wanted.out, limits=self.limits
            )
            return {"verdict": found.verdict, "why": found.why}
        except DraftwellError as error:
            if error.code != "spool_empty":
                raise
            return {"verdict": NOT_ENOUGH, "why": str(error)}

    def grid(self, choice: EngineChoice, texts: Sequence[Text]) -> None:
        """The regret of the choice, by all settings measured again on all prompts that it was tuned
        on."""

        settings = self.wanted.tuning(self.deployment.temperature)
        lab, _ = lab_of(self.space, self.prompts_to_tune(), settings, fresh=False)
        self.report["grid"] = grid_regret(lab, settings, choice, texts)

    def told(self, name: str, line: str) -> None:
        """Keep a line in the report, and say it."""
        self.report[name] = line
        self.say(f"    {line}")


def clock_time(seconds: float) -> str:
    """Minutes and seconds.

    >>> clock_time(754.4)
    '12:34'
    """
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
