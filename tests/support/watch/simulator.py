"""A served engine in simulated time, by a law that a reader can check.

*Requests.* Minute by minute a Poisson number of requests arrives; its rate follows the time of
day (`Law.daily`), a slow AR(1) wander and, sometimes, a burst or some idle minutes. A request has
a kind (code, chat, essay), a prompt (log-normal tokens, of which the first `Law.shared` are the
system prompt, read from the cache), an answer (log-normal tokens), and a talent: its own shift of
the acceptance in log odds, because the tokens of one request are alike. A share of requests is
sampled, which accepts less.

*Acceptance.* Each position of a draft is accepted with the request's probability, until the first
refusal, so a round brings 1 + Σ p^i tokens:

    logit p = kind + talent − sampled − context_slope · max(0, log2(prompt / 512)) − faults

*Seconds.* A round takes `(step_base + step_each · at_once · (1 + width/8)) · machine`, a plain step
`(plain_base + plain_each · at_once) · machine`, and `at_once` follows from Little's law: rounds a
second times seconds of a round. `machine` is AR(1) noise of 1.5 % that forgets in five
minutes. A longer prompt makes a step
slower: 1 % for 1024 tokens.

Faults change the law from a minute on (`Faults`). `simulate` gives the counters at the end of each
minute, `probe` what a fixed prompt would get at a minute.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from draftwell.components.engines.port import Acceptance
from draftwell.components.engines.remote.counters import Counters
from draftwell.components.watch.schema import Probe

BEGIN = 1_767_225_600.0
"""2026-01-01, Unix seconds: minute 0."""
KINDS = {"code": 1.5, "chat": 0.7, "essay": 0.0}
"""Kind → log odds of an accepted draft token, greedy, short."""
HARD = -1.2
"""Log odds of a kind that the draft has never seen."""
LONG_PROMPTS, MOST_AT_ONCE, DRIFTED = 4000.0, 32.0, 0.6
"""Median tokens and requests at once that faults lead to, and the share of requests that drift."""
PROBES = (("code", 256), ("chat", 256), ("code", 4096), ("chat", 4096))


@dataclass(frozen=True)
class Law:
    """Of a healthy engine and its traffic."""

    width: int = 4
    """Tokens of a draft."""
    requests: float = 60.0
    """A minute."""
    daily: float = 0.4
    """Half the swing of the load over a day, relative."""
    wander: float = 0.15
    """Standard deviation of the slow wander of the load, in logarithm."""
    bursts: bool = True
    """One minute in a hundred has three times the load; one in two hundred begins idle ones."""
    mixture: tuple[float, float, float] = (0.3, 0.5, 0.2)
    """Of code, chat, essay; wanders by AR(1)."""
    sampled: float = 0.3
    """Share of requests."""
    prompt: float = 200.0
    """Median tokens."""
    shared: int = 64
    context_slope: float = 0.35
    answer: float = 150.0
    talent: float = 0.35
    step_base: float = 0.020
    step_each: float = 0.0020
    plain_base: float = 0.018
    plain_each: float = 0.0003


@dataclass(frozen=True)
class Faults:
    """What goes wrong, from which minute on; -1: never. Each is a row of the test's table."""

    context_from: int = -1
    context_minutes: int = 60
    noise_from: int = -1
    """The draft's weights are replaced by noise."""
    noise_until: int = 10**9
    silent_from: int = -1
    """It drafts nothing any more."""
    drift_from: int = -1
    """Traffic changes to a kind that the draft has never seen."""
    drift_minutes: int = 60
    recovers_from: int = -1
    """The traffic slowly becomes what it was, in `drift_minutes`."""
    sampled_from: int = -1
    """All requests are sampled."""
    stale_from: int = -1
    """Acceptance falls with uptime, by so many log odds an hour; a restart cures it."""
    stale_rate: float = 0.7
    cache_from: int = -1
    build_from: int = -1
    """A restart as version 2, whose rounds are slower."""
    build_slower: float = 1.10
    load_from: int = -1
    """Requests a minute grow in an hour until `MOST_AT_ONCE` are decoded at once."""
    neighbour_from: int = -1
    """Another process on the machine, for ten minutes."""
    idle_from: int = -1
    idle_minutes: int = 0
    gap_from: int = -1
    """No samples for an hour."""
    restarts: tuple[int, ...] = ()
    replicas: int = 1
    """Behind one address, each with its own counters; a sample is of one of them."""
    says_start: bool = True


QUIET = Faults()
LAW = Law()


@dataclass
class Run:
    """A simulated time: counters as a scrape reads them, and what the law said each minute."""

    faults: Faults
    samples: list[Counters]
    at_once: np.ndarray
    """By minute."""
    machine: np.ndarray
    uptime: np.ndarray
    """Minutes since the last start."""
    rng: np.random.Generator = field(repr=False)

    def acceptance(self, kind: str, prompt: float, minute: int) -> float:
        """Probability that a draft token of a greedy request without talent is accepted."""
        odds = KINDS[kind] - harm(self.faults, np.array([prompt]), np.array([minute]), self.uptime)
        return float(np.where(dead(self.faults, np.array([minute])), 0.01, expit(odds))[0])

    def seconds(self, minute: int, *, prompt: float, plain: bool) -> float:
        """Of a round, or of a plain step."""
        base, each = (LAW.plain_base, LAW.plain_each) if plain else (LAW.step_base, step_each())
        slow = self.machine[minute] * (1 + prompt / 102_400)
        return float((base + each * self.at_once[minute]) * slow)

    def probe(self, minute: int, kind: str, prompt: int, *, plain: bool = False) -> Probe:
        """What a fixed prompt of 128 new tokens gets: greedy, so its acceptance hardly varies."""
        p = self.acceptance(kind, prompt, minute)
        noise = float(np.exp(self.rng.normal(0, 0.03)))
        if plain or silent(self.faults, minute):
            rounds, at = 128, np.zeros(LAW.width)
        else:
            share = p ** np.arange(1, LAW.width + 1)
            rounds = max(
                1, round(128 / (1 + share.sum()) * float(np.exp(self.rng.normal(0, 0.01))))
            )
            at = np.round(rounds * share)
        drafted = 0 if plain or silent(self.faults, minute) else rounds * LAW.width
        return Probe(
            at=BEGIN + 60.0 * minute + 5,
            name=f"{kind}-{prompt}",
            kind=kind,
            prompt_tokens=prompt,
            new_tokens=128,
            seconds=rounds * self.seconds(minute, prompt=prompt, plain=plain) * noise,
            plain=plain,
            acceptance=Acceptance(
                rounds=rounds if drafted else 0,
                drafted=drafted,
                accepted=int(at.sum()),
                accepted_at=tuple(int(n) for n in at) if drafted else (),
            ),
            at_once=float(self.at_once[minute]),
        )

    def probes(self, every: int = 10, *, plain: bool = True) -> list[Probe]:
        """All fixed prompts, every so many minutes, with and without speculation."""
        found = []
        for minute in range(0, len(self.at_once), every):
            for kind, prompt in PROBES:
                found.append(self.probe(minute, kind, prompt))
                if plain and prompt < 1000:
                    found.append(self.probe(minute, kind, prompt, plain=True))
        return found


def expit(odds: np.ndarray) -> np.ndarray:
    """Probability of log odds."""
    return 1 / (1 + np.exp(-odds))


def step_each() -> float:
    """Seconds that one request more adds to a round: its draft tokens are verified too."""
    return LAW.step_each * (1 + LAW.width / 8)


def growth(minutes: np.ndarray, begin: int, length: int) -> np.ndarray:
    """0 before `begin`, 1 after `length` more minutes, linear between; 0 where it never begins."""
    return np.clip((minutes - begin) / max(length, 1), 0, 1) if begin >= 0 else minutes * 0.0


def after(minutes: Any, begin: int) -> Any:
    """Whether a fault is there."""
    return (minutes >= begin) & (begin >= 0)


def dead(faults: Faults, minutes: np.ndarray) -> np.ndarray:
    """Whether the draft is noise."""
    return after(minutes, faults.noise_from) & (minutes < faults.noise_until)


def silent(faults: Faults, minute: Any) -> Any:
    """Whether nothing is drafted."""
    return after(minute, faults.silent_from)


def harm(faults: Faults, prompt: np.ndarray, minute: np.ndarray, uptime: np.ndarray) -> np.ndarray:
    """Log odds that context and a stale draft take off."""
    taken = LAW.context_slope * np.maximum(0, np.log2(prompt / 512))
    stale = faults.stale_rate * uptime[minute] / 60
    return taken + np.where(after(minute, faults.stale_from), stale, 0.0)


def ar1(rng: np.random.Generator, n: int, rho: float) -> np.ndarray:
    """A stationary AR(1) series with unit variance."""
    noise = rng.normal(size=n)
    noise[1:] *= np.sqrt(1 - rho**2)
    series, last = [], 0.0
    for shock in noise.tolist():
        last = rho * last + shock
        series.append(last)
    return np.array(series)


def arrivals(faults: Faults, minutes: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Requests of each minute."""
    n = len(minutes)
    day = 1 + LAW.daily * np.sin(2 * np.pi * (minutes / 1440 + rng.random()))
    rate = LAW.requests * day * np.exp(LAW.wander * ar1(rng, n, 0.95))
    if LAW.bursts:
        rate = np.where(rng.random(n) < 0.01, 3 * rate, rate)
        idle = np.convolve(rng.random(n) < 0.005, np.ones(8))[:n] > 0
        rate = np.where(idle, 0.02 * rate, rate)
    idle = after(minutes, faults.idle_from) & (minutes < faults.idle_from + faults.idle_minutes)
    count = rng.poisson(np.where(idle, 0.0, rate))
    if faults.load_from >= 0:
        # rounds of a request, and with them the requests that are decoded at once, hardly vary
        full = MOST_AT_ONCE / (LAW.step_base + step_each() * MOST_AT_ONCE) * 60
        grown = full / (LAW.answer * 1.2 / 2.35)
        share = growth(minutes, faults.load_from, 60)
        count = rng.poisson(np.exp((1 - share) * np.log(rate) + share * np.log(grown)))
    return np.asarray(count)


@dataclass(frozen=True)
class Traffic:
    """Requests of a run, one entry each, and how their drafts fared."""

    minute: np.ndarray
    prompt: np.ndarray
    rounds: np.ndarray
    at: np.ndarray
    """`[requests, width]`: rounds that accepted each position."""

    @property
    def new(self) -> np.ndarray:
        """Output tokens."""
        return np.asarray(self.rounds + self.at.sum(1))


def kinds_of(
    faults: Faults, time: np.ndarray, minute: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """Log odds of each request's kind: by a mixture that wanders, and by drift."""
    kinds = np.array(list(KINDS.values()))
    wander = np.stack([ar1(rng, len(time), 0.98) for _ in kinds], 1)
    share = np.exp(np.log(LAW.mixture) + 0.2 * wander)
    share /= share.sum(1, keepdims=True)
    drawn = rng.random(len(minute))[:, None]
    kind = kinds[(drawn > share.cumsum(1)[minute]).sum(1).clip(0, 2)]
    drift = growth(time, faults.drift_from, faults.drift_minutes) * DRIFTED
    drift = drift * (1 - growth(time, faults.recovers_from, faults.drift_minutes))
    return np.where(rng.random(len(minute)) < drift[minute], HARD, kind)


def traffic(
    faults: Faults, time: np.ndarray, uptime: np.ndarray, rng: np.random.Generator
) -> Traffic:
    """Requests, their prompts and answers, and what their drafts got."""
    minute = np.repeat(time, arrivals(faults, time, rng))
    n = len(minute)
    kind = kinds_of(faults, time, minute, rng)
    longer = growth(time, faults.context_from, faults.context_minutes)
    middle = LAW.prompt * (LONG_PROMPTS / LAW.prompt) ** longer
    prompt = np.maximum(LAW.shared + 1, middle[minute] * np.exp(0.5 * rng.normal(size=n)))
    answer = np.maximum(8, LAW.answer * np.exp(0.6 * rng.normal(size=n)))
    sampled = (rng.random(n) < LAW.sampled) | after(minute, faults.sampled_from)
    talent = LAW.talent * rng.normal(size=n)
    odds = kind + talent - 0.8 * sampled - harm(faults, prompt, minute, uptime)
    p = np.where(dead(faults, minute), 0.01, expit(odds))
    p = np.where(silent(faults, minute), 0.0, p)
    reach = p[:, None] ** np.arange(1, LAW.width + 1)
    rounds = np.maximum(1, np.round(answer / (1 + reach.sum(1)))).astype(int)
    at = np.minimum.accumulate(rng.binomial(rounds[:, None], reach), axis=1)
    return Traffic(minute, prompt, rounds, at)


def machine_of(faults: Faults, time: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """How many times as slow the machine and the build are, by minute."""
    near = after(time, faults.neighbour_from) & (time < faults.neighbour_from + 10)
    slow = np.where(near, 1.20, 1.0)
    slow = slow * np.where(after(time, faults.build_from), faults.build_slower, 1.0)
    return np.asarray(slow * np.exp(0.015 * ar1(rng, len(time), 0.8)))


def simulate(minutes: int, seed: int, faults: Faults = QUIET) -> Run:
    """Counters at the end of each minute, as one who scrapes every minute reads them."""
    rng = np.random.default_rng(seed)
    time = np.arange(minutes)
    starts = sorted({0, *faults.restarts, *([faults.build_from] if faults.build_from >= 0 else [])})
    life = np.searchsorted(starts, time, side="right") - 1
    # the first start lies hours back; a draft becomes stale from the fault on
    first = time + 300 if faults.stale_from < 0 else np.maximum(time - faults.stale_from, 0)
    uptime = np.where(life == 0, first, time - np.asarray(starts)[life])
    sent = traffic(faults, time, uptime, rng)
    minute, n, quiet = sent.minute, len(sent.minute), silent(faults, sent.minute)
    machine = machine_of(faults, time, rng)
    cold = (uptime[minute] < 2) & (minute > 5)
    hit = (rng.random(n) < 0.9) & ~cold & ~after(minute, faults.cache_from)
    cached = np.where(hit, LAW.shared, 0)
    count = np.maximum(np.bincount(minute, minlength=minutes), 1)
    slow = machine * (1 + np.bincount(minute, sent.prompt, minutes) / count / 102_400)
    # Little's law: at_once = rounds / 60 · (base + each · at_once) · slow
    busy = np.bincount(minute, sent.rounds, minutes) / 60 * slow
    at_once = np.minimum(busy * LAW.step_base / np.maximum(1 - busy * step_each(), 0.05), 64.0)
    step = (LAW.step_base + step_each() * at_once) * slow
    table = {
        "requests": np.ones(n),
        "prompt_tokens": sent.prompt.astype(int),
        "cached_prompt_tokens": cached,
        "new_tokens": sent.new,
        "rounds": np.where(quiet, 0, sent.rounds),
        "drafted": np.where(quiet, 0, sent.rounds * LAW.width),
        "accepted": sent.at.sum(1),
        "decode_seconds": sent.rounds * step[minute] / sent.new,
        "decode_steps": np.ones(n),
    }
    replica = rng.integers(faults.replicas, size=n)
    which = rng.integers(faults.replicas, size=minutes)
    columns = [*table.values(), *(sent.at[:, i] for i in range(LAW.width))]
    samples = read(columns, list(table), faults, minute, replica, which, life, starts, at_once)
    return Run(faults, samples, at_once, machine, uptime, rng)


def read(
    columns: list[np.ndarray],
    names: list[str],
    faults: Faults,
    minute: np.ndarray,
    replica: np.ndarray,
    which: np.ndarray,
    life: np.ndarray,
    starts: list[int],
    at_once: np.ndarray,
) -> list[Counters]:
    """Counters since the last start, of the replica that answers the scrape of each minute."""
    minutes, samples = len(which), []
    sums = {}
    for r in range(faults.replicas):
        of = replica == r
        each = np.stack(
            [np.bincount(minute[of], np.asarray(c)[of].astype(float), minutes) for c in columns], 1
        )
        total = each.cumsum(0) + 1000.0 * r
        before = np.vstack([np.zeros(each.shape[1]), total])
        base = np.asarray(starts)[life]
        sums[r] = total - np.where((life > 0)[:, None], before[base], 0)
    for m in range(minutes):
        if after(m, faults.gap_from) and m < faults.gap_from + 60:
            continue
        row = sums[int(which[m])][m]
        made: dict[str, Any] = {
            name: float(value) if name == "decode_seconds" else int(value)
            for name, value in zip(names, row, strict=False)
        }
        begun = BEGIN - 18_000 if life[m] == 0 else BEGIN + 60.0 * starts[life[m]]
        samples.append(
            Counters(
                at=BEGIN + 60.0 * (m + 1),
                started=begun + int(which[m]) if faults.says_start else None,
                version="2" if after(m, faults.build_from) else "1",
                accepted_at=tuple(int(v) for v in row[len(names) :]),
                running=round(float(at_once[m])),
                waiting=0,
                **made,
            )
        )
    return samples
