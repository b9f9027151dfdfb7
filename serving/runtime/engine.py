"""The engine: drives the generators of any number of requests.

Each step gathers the forwards that all requests wait for, runs one ragged batch per model, and hands the rows back.
Strategies never see batches, devices or each other. The engine itself is not thread-safe: one thread steps it.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any

from serving.runtime.session import Session
from serving.runtime.strategies.base import Strategy
from serving.runtime.types import ContextTooLong, Forward, Model, Output, Overlap, Role, Sampling


class Task:
    """A generator that is advanced until it waits for a forward; an `Overlap` makes it wait for child tasks."""

    def __init__(self, steps: Generator[Any, Any, Any]):
        self.steps = steps
        self.waiting: Forward | None = None
        self.children: list[Task] = []
        self.done = False
        self.result: Any = None

    def resume(self, value: Any = None) -> None:
        """Send a value and run to the next command."""
        self.waiting = None
        try:
            command = self.steps.send(value)
        except StopIteration as stop:
            self.done, self.result = True, stop.value
            return
        if isinstance(command, Overlap):
            self.children = [Task(side) for side in command.sides]
            for child in self.children:
                child.resume()
            self.join()
        else:
            self.waiting = command

    def join(self) -> None:
        """Go on once all children are done."""
        for child in self.children:
            child.join()
        if self.children and all(child.done for child in self.children):
            results = tuple(child.result for child in self.children)
            self.children = []
            self.resume(results)

    def leaves(self) -> Iterator[Task]:
        """The tasks below that wait for a forward."""
        if self.waiting is not None:
            yield self
        for child in self.children:
            yield from child.leaves()

    def close(self) -> None:
        for child in self.children:
            child.close()
        self.steps.close()


class Job:
    """A request that runs: read `new_tokens()` between steps, `error` and `finished` at the end."""

    def __init__(self, session: Session, task: Task):
        self.session, self.task = session, task
        self.error: Exception | None = None
        self.finished = False
        self.started = time.perf_counter()
        self._sent = 0

    @property
    def output(self) -> list[int]:
        """All final tokens so far."""
        return self.session.text.output

    def new_tokens(self) -> list[int]:
        """Final tokens since the last call."""
        fresh = self.output[self._sent :]
        self._sent += len(fresh)
        return fresh


class Engine:
    """Runs requests over the models of a pair.

    Args:
        models: role → model; "target" must be there.

    >>> from serving.runtime.models.table_model import TableModel
    >>> from serving.runtime.strategies import build_strategy
    >>> engine = Engine({"target": TableModel.random(vocab_size=5, seed=0)})
    >>> len(engine.generate([1], Sampling(max_tokens=4), build_strategy("autoregressive")).output)
    4
    """

    def __init__(self, models: Mapping[Role, Model]):
        self.models = dict(models)
        self.jobs: list[Job] = []

    def submit(self, prompt: Sequence[int], sampling: Sampling, strategy: Strategy) -> Job:
        """Start a request; it waits for its first forward when this returns.

        Raises:
            ContextTooLong: prompt and max_tokens exceed the context of a model that the strategy uses.
            DraftwellError: an empty prompt, or no free slot.
        """
        models = strategy.choose_models(self.models)
        for role, model in models.items():
            if len(prompt) + sampling.max_tokens > model.max_context:
                raise ContextTooLong(f"prompt of {len(prompt)} tokens + max_tokens {sampling.max_tokens} exceed the {role}'s context of "
                                     f"{model.max_context}: shorten one of them")
        session = Session(prompt, sampling, models)
        job = Job(session, Task(strategy.run(session)))
        self.jobs.append(job)
        self._advance(job, job.task, None)
        return job

    def step(self) -> None:
        """One forward of every model that some request waits for."""
        waiting = [(job, leaf) for job in self.jobs for leaf in job.task.leaves()]
        for role in dict.fromkeys(leaf.waiting.model for _, leaf in waiting if leaf.waiting):
            group = [(job, leaf) for job, leaf in waiting if leaf.waiting and leaf.waiting.model == role and not job.finished]
            for (job, leaf), output in zip(group, self._forward(role, group), strict=True):
                if isinstance(output, Exception):
                    self._end(job, output)
                else:
                    self._advance(job, leaf, output)

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
        """End a request now; its slots are free when this returns."""
        if not job.finished:
            self._end(job, None)

    def _forward(self, role: Role, group: list[tuple[Job, Task]]) -> Sequence[Output | Exception]:
        commands = [leaf.waiting for _, leaf in group if leaf.waiting]
        start = time.perf_counter()
        try:
            outputs: Sequence[Output | Exception] = self.models[role].forward(commands)
        except Exception as error:
            if len(group) == 1:
                return [error]
            return [self._forward(role, [one])[0] for one in group]  # a bad request must not take the others with it
        seconds = (time.perf_counter() - start) / len(group)
        for (job, _), command in zip(group, commands, strict=True):
            stats = job.session.stats
            if command.prefill:
                stats.prefill_seconds += seconds
            elif role == "target":
                stats.target_seconds += seconds
            else:
                stats.draft_seconds += seconds
        return outputs

    def _advance(self, job: Job, leaf: Task, output: Output | None) -> None:
        try:
            leaf.resume(output)
            job.task.join()
        except Exception as error:
            self._end(job, error)
            return
        if job.session.stats.first_token_seconds == 0.0 and job.output:
            job.session.stats.first_token_seconds = time.perf_counter() - job.started
        if job.task.done:
            self._end(job, None)

    def _end(self, job: Job, error: Exception | None) -> None:
        if job.finished:
            return
        job.error, job.finished = error, True
        job.session.stats.wall_seconds = time.perf_counter() - job.started
        job.session.stats.emitted = len(job.output)
        job.task.close()
        job.session.close()
        self.jobs.remove(job)
