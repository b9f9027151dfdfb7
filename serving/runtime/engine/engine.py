"""The engine: drives the generators of any number of requests.

Each step gathers the forward passes that requests wait for, runs one ragged batch per model, hands
the rows back, and answers together what all ask about theirs (decisions.py). Strategies never see
batches, threads, devices or each other. Generators are resumed by the thread that steps the engine
and by no other; only forward passes run on worker threads, and only while a request overlaps two
models (workers.py). The engine itself is not thread-safe: one thread steps it.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from draftwell.serving.errors import ContextTooLong, DeviceLost
from draftwell.serving.runtime.commands import SHADOW, Decision, Forward, Role
from draftwell.serving.runtime.engine.decisions import decide
from draftwell.serving.runtime.engine.prompt_budget import PromptBudget
from draftwell.serving.runtime.engine.prompt_pieces import alike, reads_prompt, share_room
from draftwell.serving.runtime.engine.shared_prompts import copy_prompt, waits_for_another
from draftwell.serving.runtime.engine.task import Task
from draftwell.serving.runtime.engine.thread_governor import ThreadGovernor
from draftwell.serving.runtime.engine.workers import Workers, finish
from draftwell.serving.runtime.failures import lost_device, readable
from draftwell.serving.runtime.logits import Span
from draftwell.serving.runtime.model import Model
from draftwell.serving.runtime.models.cuda.cuda_graph import Marks, read_marks
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.session.session import UNLIMITED, Session
from draftwell.serving.runtime.strategies.base import Strategy
from draftwell.serving.runtime.strategies.given import draft_given
from draftwell.serving.runtime.types import Emitted

log = logging.getLogger(__name__)


class Job:
    """A request that runs: read `new_tokens()` between steps, `error` and `finished` at the end."""

    def __init__(self, session: Session, task: Task, overlaps: bool = False):
        self.session, self.task, self.overlaps = session, task, overlaps
        self.error: Exception | None = None
        self.finished = False
        self.started = time.perf_counter()
        self.unread: list[tuple[Forward, Marks, int]] = []
        self._sent = 0

    @property
    def overlapping(self) -> bool:
        """Whether its strategy may run two models at once from here on: it overlaps them, and the
        draft's context has room."""
        return self.overlaps and self.session.draft_context > len(self.session.text.ids)

    @property
    def output(self) -> list[int]:
        """All final tokens so far."""
        return self.session.text.output

    @property
    def output_length(self) -> int:
        """Tokens of `output`, which is a copy."""
        return self.session.text.output_length

    def new_tokens(self) -> list[Emitted]:
        """Final tokens since the last call, with where they come from and, where asked for, their
        ratings."""
        fresh = self.session.emitted(self._sent)
        self._sent += len(fresh)
        return fresh

    def measure(self) -> None:
        """At the end: complete the statistics by the times that were left on the device."""
        stats, wall = self.session.stats, time.perf_counter() - self.started
        times = read_marks([marks for _, marks, _ in self.unread])
        for (command, _, sharers), (start, end) in zip(self.unread, times, strict=True):
            stats.time_forward(command, start - self.started, end - self.started, sharers)
        stats.end(wall, self.output_length)
        stats.overlap_seconds = self.task.overlaps


@dataclass
class BatchResult:
    """What a batch of forward passes gave: an output or an error for each, and when it ran
    (`time.perf_counter` seconds).

    Where a model does not wait for its device those times are the launch's, and `marks` will give
    the true ones.
    """

    outputs: list[Span | Exception]
    started: float
    ended: float
    marks: Marks | None = None


@dataclass(eq=False)
class BatchInFlight:
    """A batch of forward passes on its way through one model."""

    model: Model
    group: list[tuple[Job, Task]]
    future: Future[BatchResult] | None = None
    prompt_tokens: int = 0


class Engine:
    """Runs requests over the models of a pair.

    Args:
        models: role → model; "target" must be there.
        split: give every model cores and a thread of its own: None does so while a request runs
            whose strategy overlaps models, True always (serial strategies are then compared on
            equal cores), False never (sides run in turn).
        budget: tokens of prompts that a step reads, also while nobody is being answered; None:
            whole prompts.
        governor: adapts the compute threads between steps to what other processes leave; None: they
            stay as they are.

    For one request alone, over a pair that `load_pair` loaded:

        engine = Engine(pair.models)
        engine.generate(prompt, Sampling(), build_strategy("autoregressive")).output
    """

    def __init__(
        self,
        models: Mapping[Role, Model],
        *,
        split: bool | None = None,
        budget: PromptBudget | None = None,
        governor: ThreadGovernor | None = None,
    ):
        self.models, self.split, self.budget, self.governor = dict(models), split, budget, governor
        self.jobs: list[Job] = []
        self.device_lost: DeviceLost | None = None
        """Set once a device has failed for good: from then on every request fails with it, and only
        a new process helps."""
        self._flights: list[BatchInFlight] = []
        self._workers: Workers | None = None
        self._gained = 0
        """Tokens that this step brought to requests that had some."""
        self._turns: Counter[int] = Counter()
        """Steps in which a model read prompts."""
        self.reading = 0
        """Tokens of prompts that the forward passes of the step that runs now read; may be read
        from any thread."""
        self.patience: int | None = None
        """Passes of other models that a pass of the target waits for at most, where models take
        turns; None: until all have drafted."""
        self._waited = 0
        """Passes of other models since the target's pass could have run."""

    def submit(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        strategy: Strategy,
        draft_limit: int = UNLIMITED,
        owner: Hashable = None,
    ) -> Job:
        """Start a request; it waits for its first forward pass when this returns.

        Args:
            draft_limit: as in `Session`; it can be changed between steps.
            owner: as in `Session`: whose prompts and answers it need not read again. None: it
                shares nothing, and no other request's time depends on it.
        Raises:
            ContextTooLong: prompt and max_tokens exceed the target's context (that of a smaller
                model only ends its drafts).
            DraftwellError: an empty prompt, or no free slot.
            DeviceLost: an earlier request met a device that has failed.
        """
        if self.device_lost:
            raise self.device_lost
        models = strategy.choose_models(self.models)
        context = models["target"].max_context
        if len(prompt) + sampling.max_tokens > context:
            raise ContextTooLong(
                f"prompt of {len(prompt)} tokens + max_tokens {sampling.max_tokens} exceed "
                "the target's context of "
                f"{context}: shorten one of them"
            )
        if not sampling.greedy and strategy.couples(sampling, models["target"]):
            sampling = replace(sampling, coupled=True)
        try:
            session = Session(prompt, sampling, models, draft_limit, owner)
        except Exception as error:  # a slot may have to be cleared on a device
            explained = self._explained(error)
            if explained is error:
                raise
            raise explained from error
        draft_given(session)
        job = Job(session, Task(strategy.run(session)), strategy.overlaps)
        self.jobs.append(job)
        self._advance(job, job.task, None)
        return job

    def step(self) -> None:
        """Run what requests wait for: drafts, else the target; or, while models overlap, until one
        of them is done."""
        if self.governor and self._workers is None:  # workers divide the threads that they found
            self.governor.check()
        draining = self._choose_workers()
        ready = [] if draining else self._ready()
        self.reading = sum(flight.prompt_tokens for flight in (*self._flights, *ready))
        for flight in ready:
            if self._workers is None:
                flight.group = [(job, leaf) for job, leaf in flight.group if not job.finished]
                self._land(flight, self._fly(flight))
            else:
                flight.future = self._workers.submit(flight.model, self._fly, flight)
                self._flights.append(flight)
        if self._flights:
            wait(
                [flight.future for flight in self._flights if flight.future],
                return_when=FIRST_COMPLETED,
            )
            for flight in [f for f in self._flights if f.future and f.future.done()]:
                # a request that failed has waited for its other flight already
                if flight in self._flights:
                    self._await(flight)
        if self._gained and self.budget:
            self.budget.end_pause(time.perf_counter())
        self._gained = 0
        if self.device_lost:
            for job in list(self.jobs):
                self._end(job, self.device_lost)
        if not self.jobs:
            self.close()

    def run(self, jobs: Sequence[Job]) -> None:
        """Step until all of `jobs` are finished; the first error is raised."""
        while not all(job.finished for job in jobs):
            self.step()
        for job in jobs:
            if job.error:
                raise job.error

    def generate(self, prompt: Sequence[int], sampling: Sampling, strategy: Strategy) -> Job:
        """Run one request to its end."""
        job = self.submit(prompt, sampling, strategy)
        self.run([job])
        return job

    def cancel(self, job: Job) -> None:
        """End a request now, after the forward pass that it is part of; its slots are free when
        this returns."""
        if not job.finished:
            self._end(job, None)
        if not self.jobs:
            self.close()

    def close(self) -> None:
        """Let the worker threads go; the engine can still be used."""
        if self._workers is not None:
            self._workers.close()
            self._workers = None

    def _choose_workers(self) -> bool:
        """Worker threads exist while a request overlaps models, and come and go only when nothing
        is in flight.

        Under load something always is. So where they are to go, nothing more may begin until what
        is in flight has landed: True says so. They stay for as long as such a request runs, not for
        a single `Overlap`: threads and OpenMP teams are dear to make.
        """
        wanted = any(job.overlapping for job in self.jobs) if self.split is None else self.split
        if wanted == (self._workers is not None):
            return False
        if self._flights:
            return True
        if wanted:
            models = {
                id(lane.model): lane.model
                for job in self.jobs
                for lane in job.session.lanes.values()
            }
            self._workers = Workers(list(models.values()))
        else:
            self.close()
        return False

    def _ready(self) -> list[BatchInFlight]:
        """For every idle model the forward passes that wait for it, as one batch each.

        Where models take turns the target comes last: its forward pass costs the same for one
        request as for many, so it waits until all who draft have come to their verification, or
        `patience` is at its end: a request that drafts as long as it likes, because its answer must
        repeat, would hold up all others. For a draft model that is reading a long prompt it does
        not wait.
        """
        flights, held_back = self._waiting_batches()
        self._share_budget(list(flights.values()), held_back)
        target = id(self.models["target"])
        drafting = any(
            not leaf.reading
            for model, flight in flights.items()
            if model != target
            for _, leaf in flight.group
        )
        waits = (
            target in flights
            and self._workers is None
            and drafting
            and (self.patience is None or self._waited < self.patience)
        )
        if waits:
            del flights[target]
        self._waited = self._waited + 1 if waits else 0
        for flight in flights.values():
            self._count_prompt_tokens(flight)
        return [flight for flight in flights.values() if flight.group]

    def _waiting_batches(self) -> tuple[dict[int, BatchInFlight], set[Job]]:
        """The forward passes that idle models could run, by the model's id, and the requests that
        wait to copy a prompt that another is reading."""
        busy = {id(flight.model) for flight in self._flights}
        flights: dict[int, BatchInFlight] = {}
        held_back: set[Job] = set()
        for job in self.jobs:
            for leaf in job.task.leaves():
                if leaf.waiting is None or leaf.flying:
                    continue
                model = job.session.lanes[leaf.waiting.model].model
                if id(model) in busy:
                    continue
                if waits_for_another(job, leaf, self.jobs):
                    held_back.add(job)
                else:
                    copy_prompt(job, leaf)
                    flight = flights.setdefault(id(model), BatchInFlight(model, []))
                    flight.group.append((job, leaf))
        return flights, held_back

    def _count_prompt_tokens(self, flight: BatchInFlight) -> None:
        """Mark a batch as flying, and take what it reads of prompts from the budget."""
        for _, leaf in flight.group:
            leaf.flying = True
        self._turns[id(flight.model)] += any(reads_prompt(leaf) for _, leaf in flight.group)
        read = [
            leaf
            for job, leaf in flight.group
            if leaf.piece and (leaf.read or reads_prompt(leaf) or not job.output_length)
        ]
        flight.prompt_tokens = sum(len(leaf.piece.tokens) for leaf in read if leaf.piece)
        if self.budget:
            spent = sum(
                len(leaf.piece.tokens) * self._weight(flight.model, leaf)
                for leaf in read
                if leaf.piece
            )
            self.budget.spend(id(flight.model), spent)

    def _share_budget(self, flights: Sequence[BatchInFlight], held_back: Collection[Job]) -> None:
        """Cut prompts into pieces, and leave out of the flights what has to wait for another step.

        Args:
            held_back: requests that wait to copy another's prompt: they read none, so they make no
                burst, and go on when it is read.
        """
        answered = [job for job in self.jobs if job.output_length]
        waiting = len(self.jobs) - len(answered) - sum(not job.output_length for job in held_back)
        reading = {
            id(job) for flight in flights for job, leaf in flight.group if reads_prompt(leaf)
        } | {id(job) for job in held_back}
        readers = sum(any(reads_prompt(leaf) for _, leaf in flight.group) for flight in flights)
        for flight in flights:
            room = None
            if self.budget:
                room = self.budget.room(
                    id(flight.model),
                    len(answered),
                    waiting,
                    reading=sum(id(job) in reading for job in answered),
                    readers=max(1, readers),
                )
            # while nobody waits for a next token, pieces stay long
            weigh = partial(self._weight, flight.model) if answered else alike
            chosen = set(
                share_room(
                    [leaf for _, leaf in flight.group], room, self._turns[id(flight.model)], weigh
                )
            )
            flight.group = [(job, leaf) for job, leaf in flight.group if leaf in chosen]

    def _weight(self, model: Model, task: Task) -> float:
        """What the budget counts a task's next token for, in first tokens of a prompt; 1 where the
        budget is fixed."""
        if self.budget is None or not self.budget.adapts:
            return 1.0
        assert task.waiting is not None
        return model.token_cost(model.slots.lengths[task.waiting.slot])

    def _fly(self, flight: BatchInFlight) -> BatchResult:
        """Run a batch; if it fails, request by request, so that a bad one does not take the others
        with it."""
        commands = [leaf.piece for _, leaf in flight.group if leaf.piece]
        started = time.perf_counter()
        outputs: list[Span | Exception] = []
        try:
            spans = flight.model.forward(commands) if commands else []
            # on a thread of its own it can wait: a side lands when it is done
            if self._workers is not None:
                finish(flight.model, spans)
            outputs += spans
        except Exception as error:
            if len(commands) == 1 or lost_device(error):
                outputs = [error] * len(commands)
            else:
                outputs = [
                    self._fly(BatchInFlight(flight.model, [one])).outputs[0] for one in flight.group
                ]
        marks = flight.model.marks if self._workers is None else None
        return BatchResult(outputs, started, time.perf_counter(), marks)

    def _await(self, flight: BatchInFlight) -> None:
        """Wait for a batch in flight and hand its rows back."""
        assert flight.future is not None
        self._flights.remove(flight)
        self._land(flight, flight.future.result())

    def _land(self, flight: BatchInFlight, landed: BatchResult) -> None:
        for (job, leaf), output in zip(flight.group, landed.outputs, strict=True):
            if job.finished or leaf.waiting is None or leaf.piece is None:
                continue
            if landed.marks is not None:
                job.unread.append((leaf.piece, landed.marks, len(flight.group)))
            else:
                job.session.stats.time_forward(
                    leaf.piece,
                    landed.started - job.started,
                    landed.ended - job.started,
                    len(flight.group),
                )
            leaf.seconds += landed.ended - landed.started
            # a shadow hears of it itself
            if isinstance(output, Exception) and leaf.waiting.model != SHADOW:
                self._end(job, output)
            elif isinstance(output, Exception):
                self._advance(job, leaf, output)
            elif (whole := leaf.land_piece(output)) is not None:
                self._advance(job, leaf, whole)
        self._decide()

    def _decide(self) -> None:
        """Answer what requests ask about their rows, all at once, until every one waits for a
        forward pass again."""
        while asked := [
            (job, leaf, leaf.deciding)
            for job in self.jobs
            for leaf in job.task.leaves()
            if leaf.deciding is not None
        ]:
            for _, leaf, _ in asked:  # ending one may land another's pass, and decide in between
                leaf.deciding = None
            replies = self._replies([command for _, _, command in asked])
            for (job, leaf, _), reply in zip(asked, replies, strict=True):
                if job.finished:
                    continue
                if isinstance(reply, Exception):
                    self._end(job, reply)
                else:
                    self._advance(job, leaf, reply)

    def _replies(self, commands: list[Decision]) -> list[Any]:
        """As `decide`; if it fails, one by one, so that a bad one does not take the others with
        it."""
        try:
            return decide(commands)
        except Exception as error:
            if len(commands) == 1 or lost_device(error):
                return [error] * len(commands)
            return [self._replies([command])[0] for command in commands]

    def _advance(self, job: Job, leaf: Task, reply: Any) -> None:
        known = job.output_length
        try:
            leaf.resume(reply)
            job.task.join()
        except Exception as error:
            self._end(job, error)
            return
        self._gained += job.output_length - known if known else 0
        if job.session.stats.first_token_seconds == 0.0 and job.output_length:
            job.session.stats.first_token_seconds = time.perf_counter() - job.started
        if job.task.done:
            self._end(job, None)

    def _end(self, job: Job, error: Exception | None) -> None:
        """End a request: whatever fails on the way, its slots are free afterwards."""
        if job.finished:
            return
        job.finished = True
        self.jobs.remove(job)
        if error:
            job.session.forget()
        try:
            with ExitStack() as ending:  # the last step first
                ending.callback(job.session.close)
                ending.callback(job.task.close)
                ending.callback(job.measure)
                self._await_all(job)
        except Exception as failed:
            log.warning("a request could not be ended cleanly", exc_info=failed)
            error = error or failed
        job.error = self._explained(error) if error else None

    def _await_all(self, job: Job) -> None:
        """Wait for the batches in flight that a request is part of: its slots are being written
        to."""
        for flight in [f for f in self._flights if any(mine is job for mine, _ in f.group)]:
            # another request that failed meanwhile may have waited for it already
            if flight in self._flights:
                self._await(flight)

    def _explained(self, error: Exception) -> Exception:
        """An error as users see it; one that says that the device is lost is noted for all requests
        to come."""
        error = readable(error)
        if isinstance(error, DeviceLost):
            self.device_lost = self.device_lost or error
        return error
