"""An engine at an address, behind the port: it was started by others and runs on afterwards."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from draftwell.components.engines.port import About, Acceptance, Answer, Decoded, EngineSettings
from draftwell.components.engines.process import request_of
from draftwell.components.engines.remote.address import EngineAddress
from draftwell.components.engines.remote.client import CONNECTIONS, EngineClient
from draftwell.components.engines.remote.counters import Counters
from draftwell.components.engines.remote.dialect import Dialect
from draftwell.components.engines.remote.discover import find_dialect
from draftwell.serving.errors import DraftwellError
from draftwell.serving.runtime.requests import Sampling


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
        dialect = find_dialect(self.client)
        if not self.speculate and not dialect.switches_off:
            raise DraftwellError(
                f"no request can switch speculation off at {self.address.url} ({dialect.name}): "
                "name an address of the same model without speculation with --plain",
                code="engine_always_speculates",
            )
        self._dialect = dialect
        return dialect.about(self.client)

    def decode(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> Decoded:
        """Decode prompts that are sent at once. Where answers do not say how drafts fared, the
        first one gets what the engine's counters gained, if they gained these requests and no
        others."""
        dialect = self.dialect
        request_of(prompts, sampling)  # refuses what engines do not know
        before = dialect.counters(self.client)
        begun = time.perf_counter()
        with ThreadPoolExecutor(len(prompts)) as pool:
            waiting = [
                pool.submit(self._one, ids, replace(sampling, seed=sampling.seed + place))
                for place, ids in enumerate(prompts)
            ]
            answers = [one.result() for one in waiting]
        seconds = time.perf_counter() - begun
        if not any(answer.acceptance.rounds or answer.acceptance.drafted for answer in answers):
            gained = dialect.counters(self.client).since(before)
            answers = [share(gained, answers), *answers[1:]]
        return Decoded(seconds=seconds, answers=answers)

    def _one(self, ids: Sequence[int], sampling: Sampling) -> Answer:
        return self.dialect.decode_one(self.client, ids, sampling, speculate=self.speculate)

    def stop(self) -> None:
        """Close the connections; the engine runs on."""
        client, self._client, self._dialect = self._client, None, None
        if client is not None:
            client.close()


def share(gained: Counters | None, answers: Sequence[Answer]) -> Answer:
    """The first answer, with the acceptance of all where the counters gained just these."""
    tokens = sum(len(answer.tokens) for answer in answers)
    if gained is None or gained.requests != len(answers) or not gained.drafted:
        return answers[0]
    if gained.new_tokens is not None and gained.new_tokens != tokens:
        return answers[0]
    return answers[0].model_copy(
        update={
            "acceptance": Acceptance(
                rounds=gained.rounds or 0,
                drafted=gained.drafted,
                accepted=gained.accepted or 0,
                accepted_at=gained.accepted_at,
            )
        }
    )
