"""An engine at an address, behind the port: it was started by others and runs on afterwards."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from draftwell.components.engines.port import About, Answer, Decoded, EngineSettings
from draftwell.components.engines.process import request_of
from draftwell.components.engines.remote.address import EngineAddress
from draftwell.components.engines.remote.client import CONNECTIONS, EngineClient
from draftwell.components.engines.remote.counters import Counters
from draftwell.components.engines.remote.dialect import Dialect
from draftwell.components.engines.remote.discover import find_dialect
from draftwell.serving.errors import DraftwellError
from draftwell.serving.runtime.requests import Sampling

GAIN_TRIES, GAIN_SECONDS = 10, 0.1
"""How often, and how long apart, counters are read until they have what was answered."""


class RemoteEngine:
    """A server that others started (an `Engine`).

    Args:
        label: names it in tables.
        address: where it is.
        speculate: False asks it for plain decoding with every request.
        connect: makes a client of the address, at every start.
        launched: whether a launcher started it with the speculation of the settings.
    Raises:
        DraftwellError: (of every method) what `EngineClient` and `find_dialect` raise; requests of
            it cannot switch speculation off (`engine_always_speculates`); a way to speculate that
            nobody can start there (`engine_option`); it was not started (`engine_not_started`).
    """

    def __init__(
        self,
        label: str,
        address: EngineAddress,
        *,
        speculate: bool = True,
        connect: Callable[[EngineAddress], EngineClient] = EngineClient,
        launched: bool = False,
    ):
        self.label, self.address, self.speculate = label, address, speculate
        self.launched = launched
        self._connect = connect
        self._client: EngineClient | None = None
        self._dialect: Dialect | None = None
        self._counts = speculate
        self.new_tokens = 0
        """That it has decoded since it was started."""

    @property
    def client(self) -> EngineClient:
        """What asks it, once it was started."""
        if self._client is None:
            raise self._not_started()
        return self._client

    @property
    def dialect(self) -> Dialect:
        """What it speaks, once it was started."""
        if self._dialect is None:
            raise self._not_started()
        return self._dialect

    def _not_started(self) -> DraftwellError:
        return DraftwellError(
            f"{self.label} was not asked what it is: start it first", code="engine_not_started"
        )

    def start(self, settings: EngineSettings) -> About:
        """Find out what it speaks and what it says of itself; nothing is started."""
        if settings.speculation is not None and not self.launched:
            raise DraftwellError(
                f"{self.address.url} speculates as it was started: another way needs a launcher",
                code="engine_option",
            )
        if settings.slots > CONNECTIONS:
            raise DraftwellError(
                f"{settings.slots} requests at once are more than the {CONNECTIONS} connections "
                "that are opened to an engine: ask for fewer",
                code="engine_option",
            )
        self.stop()
        self._client = self._connect(self.address)
        try:
            return self._ask_what_it_is()
        except BaseException:
            self.stop()
            raise

    def _ask_what_it_is(self) -> About:
        dialect = find_dialect(self.client)
        if not self.speculate and not dialect.switches_off:
            raise DraftwellError(
                f"no request can switch speculation off at {self.address.url} ({dialect.name}): "
                "name an address of the same model without speculation with --set plain=…",
                code="engine_always_speculates",
            )
        self._dialect, self._counts, self.new_tokens = dialect, self.speculate, 0
        return dialect.about(self.client)

    def decode(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> Decoded:
        """Decode prompts that are sent at once. Where answers do not say how drafts fared, the
        first one gets what the engine's counters gained, if they gained these requests and no
        others."""
        request_of(prompts, sampling)  # refuses what engines do not know
        before = self.dialect.counters(self.client) if self._counts else None
        begun = time.perf_counter()
        with ThreadPoolExecutor(len(prompts)) as pool:
            waiting = [
                pool.submit(self._one, ids, replace(sampling, seed=sampling.seed + place))
                for place, ids in enumerate(prompts)
            ]
            answers = [one.result() for one in waiting]
        seconds = time.perf_counter() - begun
        self.new_tokens += sum(len(answer.tokens) for answer in answers)
        if before is not None:
            answers = self._with_gains(before, answers)
        return Decoded(seconds=seconds, answers=answers)

    def _with_gains(self, before: Counters, answers: list[Answer]) -> list[Answer]:
        """The answers with what the counters say of them; an engine may count a little later than
        it answers."""
        if any(answer.acceptance.accepted_at for answer in answers):
            self._counts = False  # answers say so themselves
            return answers
        tokens = sum(len(answer.tokens) for answer in answers)
        for _ in range(GAIN_TRIES):
            gained = self.dialect.counters(self.client).since(before)
            if gained is not None and are_gains(gained, answers):
                return [with_gains(gained, answers[0]), *answers[1:]] if gained.drafted else answers
            if gained is None or gained.new_tokens is None or gained.new_tokens > tokens:
                break  # it counts nothing, or others' requests too
            time.sleep(GAIN_SECONDS)
        return answers

    def _one(self, ids: Sequence[int], sampling: Sampling) -> Answer:
        return self.dialect.decode_one(self.client, ids, sampling, speculate=self.speculate)

    def stop(self) -> None:
        """Close the connections; the engine runs on."""
        client, self._client, self._dialect = self._client, None, None
        if client is not None:
            client.close()


def are_gains(gained: Counters, answers: Sequence[Answer]) -> bool:
    """Whether counters gained just these answers, and nothing of others' requests."""
    tokens = sum(len(answer.tokens) for answer in answers)
    drafted = sum(answer.acceptance.drafted for answer in answers)
    return (
        gained.requests in (None, len(answers))
        and gained.new_tokens in (None, tokens)
        and drafted in (0, gained.drafted)
    )


def with_gains(gained: Counters, answer: Answer) -> Answer:
    """The first answer of a group with what only the counters say of the group: rounds and
    acceptance by position; and all of it where answers say nothing."""
    own = answer.acceptance
    said = own.model_copy(update={"rounds": gained.rounds or 0, "accepted_at": gained.accepted_at})
    if not own.drafted:
        sums = {"drafted": gained.drafted or 0, "accepted": gained.accepted or 0}
        said = said.model_copy(update=sums)
    return answer.model_copy(update={"acceptance": said})
