"""Feedback: a share of the served requests, recorded for monitoring (docs/drift.md). Off unless a
folder is named.

An observer of the scheduler. A selected request gets a recorder
(`draftwell.serving.recording.recorder`); every other one costs a random number. Records go to the
spool's thread through a bounded queue. Without texts a record holds only numbers: the draft's
confidence and the target's probability of its tokens. No token, prompt or hidden state is kept, and
the names of prompts are random, after that of the tenant (`draftwell.serving.recording.tenants`).
"""

from __future__ import annotations

import hashlib
import json
import random
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

from draftwell.serving.artifacts.base import Artifact
from draftwell.serving.artifacts.verifier import Verifier
from draftwell.serving.recording.prompt_ratings import RatedPrompt
from draftwell.serving.recording.recorder import PositionRecorder
from draftwell.serving.recording.shadow import read_along
from draftwell.serving.recording.tenants import prompt_id, short_tenant
from draftwell.serving.recording.trace_schema import LOSSY
from draftwell.serving.runtime.engine.engine import Job
from draftwell.serving.runtime.model import Model
from draftwell.serving.runtime.pair import LoadedPair
from draftwell.serving.server.feedback.record import Record, RecordOrigin
from draftwell.serving.server.feedback.spool import Spool
from draftwell.serving.server.scheduling.observer import Observer
from draftwell.serving.server.scheduling.ticket import End, Event, Ticket
from draftwell.serving.server.settings import FEEDBACK_DAYS

TEXT_COLUMNS = frozenset({"token", "correction", "draft_token", "hidden_before"})
"""Columns from which a text could be reconstructed."""
REMEMBERED = 4096
"""Recent prompts that are not recorded again: a repeated prompt is not independent evidence."""
PER_MINUTE = 60.0
"""Most requests recorded in a minute, so that what recording costs is bounded under any load."""


@dataclass(frozen=True)
class Source:
    """A serving pair. It must not reference the pair itself, which would then stay in memory after
    a switch of bundles.

    Args:
        hidden: whether the bundle's verifier reads the draft's hidden states.
        draft: the pair's draft, which reads the text of strategies without a draft.
    """

    origin: RecordOrigin
    tokenizer: Any
    hidden: bool
    draft: ReferenceType[Model]


class Feedback(Observer):
    """Records a share of the requests. Schedulers of several pairs may call it at once.

    Args:
        folder: the spool: a folder of recorded requests.
        rate: share of the requests that is recorded, 0 to 1.
        text: record prompts and outputs too; recalibration needs them.
        days: age at which files are deleted.
        per_minute: most requests recorded in a minute.
        seed: of the random choice of requests; None: a new one at each start.
        spool: where records go; None: a new one in the folder. It is started and closed with this
            object.
    """

    def __init__(
        self,
        folder: Path,
        rate: float,
        *,
        text: bool = False,
        days: float = FEEDBACK_DAYS,
        per_minute: float = PER_MINUTE,
        seed: int | None = None,
        spool: Spool | None = None,
    ):
        self.rate, self.text, self.per_minute = rate, text, per_minute
        self.spool = spool or Spool(folder, days=days, private=text)
        self._sources: WeakKeyDictionary[Any, Source] = WeakKeyDictionary()  # target → its pair
        self._open: dict[int, tuple[Ticket, Source, PositionRecorder]] = {}
        self._seen: OrderedDict[bytes, None] = OrderedDict()
        self._random = random.Random(seed)
        self._allowance, self._refilled = float(max(1.0, per_minute)), time.monotonic()
        self._lock = threading.Lock()

    def follow(self, pair: LoadedPair, artifacts: Mapping[str, Artifact] | None = None) -> None:
        """Record requests that this pair serves from now on, if it has a draft.

        Args:
            artifacts: the bundle's; if its verifier reads the draft's hidden states, records with
                text include them.
        """
        verifier = (artifacts or {}).get(Verifier.kind)
        hidden = isinstance(verifier, Verifier) and "before" in verifier.features
        if "draft" not in pair.models:
            return
        source = Source(
            RecordOrigin(pair.name, pair.fingerprint, pair.dtype),
            pair.tokenizer,
            hidden,
            ref(pair.models["draft"]),
        )
        with self._lock:
            self._sources[pair.models["target"]] = source

    def start(self) -> None:
        """Start the spool's thread."""
        self.spool.start()

    def close(self) -> None:
        """Write what is queued; call it when no request runs any more."""
        self.spool.close()

    @property
    def counts(self) -> dict[str, int]:
        """What became of requests, by name: recorded, written, dropped_… and skipped_…"""
        return dict(self.spool.counts)

    def admitted(self, ticket: Ticket) -> None:
        """Select at random; a selected request that can be recorded gets a recorder."""
        if self._random.random() >= self.rate or ticket.own:
            return
        assert ticket.job is not None
        with self._lock:
            target = ticket.job.session.lanes.get("target")  # None if the request has already ended
            source = self._sources.get(target.model) if target is not None else None
            draft = source.draft() if source is not None else None
            if source is None or draft is None:
                self.spool.counts["skipped_no_draft"] += 1
            elif why := self._objection(ticket, draft):
                self.spool.counts[why] += 1
            else:
                self._record(ticket, ticket.job, source, draft)

    def _objection(self, ticket: Ticket, draft: Model) -> str | None:
        """Why a request is not recorded, by the counter's name."""
        if unlike_others(ticket):
            return "skipped_altered"
        if len(ticket.prompt) + ticket.sampling.max_tokens > draft.max_context:
            return "skipped_too_long"
        if self.spool.full:
            return "dropped_queue_full"
        if digest_of(ticket.prompt) in self._seen:
            return "skipped_repeated"
        return None if self._allows() else "dropped_too_many"

    def _record(self, ticket: Ticket, job: Job, source: Source, draft: Model) -> None:
        self._remember(digest_of(ticket.prompt))
        lossless = ticket.strategy is not None and ticket.strategy.lossless
        recorder = PositionRecorder(
            job.session, lossless=lossless, hidden=self.text and source.hidden
        )
        self._open[id(ticket)] = ticket, source, recorder
        if "draft" not in job.session.lanes:
            read_along(job, draft, recorder)

    def finished(self, ticket: Ticket, event: Event) -> None:
        """Queue the record for the spool; nothing is kept of requests that failed or were
        cancelled."""
        with self._lock:
            found = self._open.pop(id(ticket), None)
        if found is None:
            return
        _, source, recorder = found
        positions = recorder.finish()
        if not isinstance(event, End) or not positions:
            unfinished = "skipped_too_short" if isinstance(event, End) else "skipped_unfinished"
            self.spool.counts["failed" if recorder.failed else unfinished] += 1
            return
        kind = "target" if recorder.lossless else LOSSY
        tenant, text = short_tenant(ticket.owner[0]), self.text
        name = prompt_id(tenant, secrets.token_hex(8))
        self.spool.counts["recorded"] += 1
        self.spool.offer(
            Record(
                name,
                source.origin,
                ticket.sampling,
                kind,
                positions if text else [blind(p) for p in positions],
                list(ticket.prompt) if text else None,
                {"id": name, **body} if text and (body := body_of(ticket, source)) else None,
                tenant,
            )
        )

    def _remember(self, prompt: bytes) -> None:
        self._seen[prompt] = None
        if len(self._seen) > REMEMBERED:
            self._seen.popitem(last=False)

    def _allows(self) -> bool:
        """A token bucket that holds one minute's requests."""
        now, size = time.monotonic(), max(1.0, self.per_minute)
        self._allowance = min(size, self._allowance + (now - self._refilled) * self.per_minute / 60)
        self._refilled = now
        if self._allowance < 1:
            return False
        self._allowance -= 1
        return True


def digest_of(prompt: Sequence[int]) -> bytes:
    """Digest of a recorded prompt, kept in memory only."""
    return hashlib.blake2b(json.dumps(list(prompt)).encode(), digest_size=16).digest()


def unlike_others(ticket: Ticket) -> bool:
    """Whether a request changes the logits in a way that no trace records, has a prediction in
    front of its strategy, or only has its prompt rated: its distributions do not represent the
    traffic."""
    asked = ticket.sampling
    cut = asked.min_p and not asked.greedy
    altered = asked.penalises or asked.biases or asked.banned_token_ids or asked.prediction or cut
    return bool(altered) or isinstance(ticket.strategy, RatedPrompt)


def blind(position: Mapping[str, Any]) -> dict[str, Any]:
    """A position without the columns from which a text could be reconstructed."""
    return {name: value for name, value in position.items() if name not in TEXT_COLUMNS}


def body_of(ticket: Ticket, source: Source) -> dict[str, Any] | None:
    """The request's body with the output, as a row that `draftwell step collect --prompts`
    reads; None if the ticket has none."""
    if ticket.body is None:
        return None
    said = {
        name: ticket.body[name]
        for name in ("messages", "prompt")
        if ticket.body.get(name) is not None
    }
    assert ticket.job is not None
    output = source.tokenizer.decode(ticket.job.output, skip_special_tokens=True)
    return {"model": source.origin.pair, **said, "output": output} if said else None
