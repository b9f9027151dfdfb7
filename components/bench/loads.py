"""Strategies and peers at several numbers of requests at once, in one interleaved run.

Groups of prompts are sent at once; a contender decodes a group before the next contender does, and
all decode it before the next group comes. At temperature 0 the answers of each are compared with
those of our plain decoding, one at a time.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any, Protocol

from draftwell.components.bench.bench import gamma_of, with_plain
from draftwell.components.bench.engines.figures import figure_of
from draftwell.components.bench.engines.measure import (
    Beside,
    Group,
    Side,
    decode_together,
    groups_of,
    places_of,
    side_of,
)
from draftwell.components.bench.interleaved import (
    REFERENCE,
    WARMUP_TOKENS,
    Progress,
    leaving_out,
    take_turns,
)
from draftwell.components.bench.peers.group import PAUSE, ProcessPeer
from draftwell.components.bench.peers.loading import open_peers
from draftwell.components.bench.runner import Config, labels_of
from draftwell.components.bench.settings import BenchSettings
from draftwell.components.engines.port import Decoded
from draftwell.components.prompts.prompt import Prompt, ids_of
from draftwell.components.report.machine import describe_machine, using_threads
from draftwell.components.report.tables import number, rich_table
from draftwell.serving.number_format import weights_of
from draftwell.serving.runtime.pair import LoadedPair
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.strategies import StrategyResources, build_strategy

if TYPE_CHECKING:
    from rich.table import Table

COLUMNS = ("contender", "at once", "tokens/s", "ratio", "interval", "first token, ms", "same texts")


class Decoder(Protocol):
    """Decodes a group of prompts that are sent at once."""

    label: str

    def decode(self, prompts: Group, sampling: Sampling) -> Decoded:
        """As `Engine.decode` of `components/engines/port.py`."""


class OwnDecoder:
    """A strategy of ours; its own table, where it has one, limits its drafts beside others."""

    def __init__(self, pair: LoadedPair, resources: StrategyResources, config: Config, label: str):
        self.pair, self.label = pair, label
        self.strategy = build_strategy(config.name, dict(config.parameters), resources)

    def decode(self, prompts: Group, sampling: Sampling) -> Decoded:
        return decode_together(self.pair.engine(), self.strategy, prompts, sampling)


class PeerDecoder:
    """A peer's engine, which waits until our own threads sleep."""

    def __init__(self, peer: ProcessPeer):
        self.engine, self.label = peer.engine, peer.label

    def decode(self, prompts: Group, sampling: Sampling) -> Decoded:
        time.sleep(PAUSE)
        return self.engine.decode(prompts, sampling)


def measure_levels(  # noqa: PLR0913
    pair: LoadedPair,
    source: LoadedPair,
    resources: StrategyResources,
    configs: Sequence[Config],
    prompts: Sequence[Prompt],
    levels: Sequence[int],
    settings: BenchSettings,
    *,
    left_out: dict[str, str] | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Speed, time to the first token and equal answers of every config and peer at every level.

    Args:
        pair: loaded with as many slots as the highest level has requests.
        source: the same pair with its modules, in whole weights, which peers read; they round them
            as `pair` does.
        levels: requests at once, in ascending order.
    Returns:
        plain JSON: `pair`, `machine`, `settings`, `versions` and `notes` of peers, `left_out`, and
        `rows`: dicts with `label`, `at_once`, `groups`, `prompts`, `tokens_per_second`,
        `first_token_ms` (median), `ratio`, `low`, `high` (to our plain decoding at that level), and
        `identical` (greedy answers that are those of our plain decoding at the first level).
    """
    encoded = [ids_of(pair, prompt) for prompt in prompts]
    sampling = pair.sampling(
        max_tokens=settings.max_tokens, temperature=settings.temperature, seed=settings.seed
    )
    decoders = own_decoders(pair, resources, with_plain(configs), left_out)
    rows: list[dict[str, Any]] = []
    plain: dict[tuple[int, ...], list[int]] = {}
    with (
        using_threads(settings.threads),
        open_peers(
            source,
            settings.peers,
            gamma=gamma_of(configs),
            context=max(map(len, encoded)) + settings.max_tokens,
            slots=max(levels),
            weights=weights_of(pair.dtype),
            head=resources.artifacts.get("eagle3_head"),
            left_out=left_out,
        ) as peers,
    ):
        found = [one for group in peers.values() for one in group.contenders]
        decoders += [PeerDecoder(one) for one in found if isinstance(one, ProcessPeer)]
        for level in levels:
            groups = groups_of(encoded, level, -(-len(encoded) // level))
            sides = measure_groups(decoders, groups, sampling, settings.runs, left_out, progress)
            if not plain:
                plain = answers_of(groups, sides[REFERENCE])
            rows += [
                row_of(label, groups, side, sides[REFERENCE], plain, greedy=sampling.greedy)
                for label, side in sides.items()
            ]
    report: dict[str, Any] = {"rows": rows, "left_out": left_out or {}}
    report["versions"] = {name: peer.version for name, peer in peers.items()}
    report["notes"] = [note for peer in peers.values() for note in peer.notes]
    return report | conditions_of(pair, encoded, settings)


def conditions_of(
    pair: LoadedPair, encoded: Sequence[Sequence[int]], settings: BenchSettings
) -> dict[str, Any]:
    """What was measured, and where."""
    return {
        "pair": pair.name,
        "machine": describe_machine(pair),
        "settings": {
            "prompts": len(encoded),
            "dtype": pair.dtype,
            "longest_prompt": max(map(len, encoded)),
            **settings.model_dump(include={"max_tokens", "temperature", "runs", "seed"}),
        },
    }


def own_decoders(
    pair: LoadedPair,
    resources: StrategyResources,
    configs: Sequence[Config],
    left_out: dict[str, str] | None,
) -> list[Decoder]:
    """Our strategies; online state stays as it is."""
    own = replace(resources, deterministic=True)
    decoders: list[Decoder] = []
    for label, config in zip(labels_of(configs), configs, strict=True):
        with leaving_out(label, left_out):
            decoders.append(OwnDecoder(pair, own, config, label))
    return decoders


def measure_groups(
    decoders: Sequence[Decoder],
    groups: Sequence[Group],
    sampling: Sampling,
    runs: int,
    left_out: dict[str, str] | None,
    progress: Progress | None,
) -> dict[str, Side]:
    """What each decoder did with all groups, after a few tokens that are not measured; of several
    runs of a group the fastest counts."""
    short = replace(sampling, max_tokens=min(sampling.max_tokens, WARMUP_TOKENS))
    turns = {}
    for one in decoders:
        if one.label not in (left_out or {}):
            with leaving_out(one.label, left_out):
                one.decode(groups[0], short)
                turns[one.label] = partial(decode_place, one, groups, sampling)
    found = take_turns(turns, len(groups), runs, left_out=left_out, progress=progress)
    return {
        label: side_of([min(each, key=lambda one: one.seconds) for each in decoded])
        for label, decoded in found.items()
    }


def decode_place(
    decoder: Decoder, groups: Sequence[Group], sampling: Sampling, place: int
) -> Decoded:
    """The group at a place, whose prompts have seeds of their own."""
    seed = sampling.seed + place * len(groups[0])
    return decoder.decode(groups[place], replace(sampling, seed=seed))


def answers_of(groups: Sequence[Group], side: Side) -> dict[tuple[int, ...], list[int]]:
    """Prompt → its answer."""
    return {
        tuple(ids): output
        for group, outputs in zip(groups, side.outputs, strict=True)
        for ids, output in zip(group, outputs, strict=True)
    }


def row_of(
    label: str,
    groups: Sequence[Group],
    side: Side,
    reference: Side,
    plain: Mapping[tuple[int, ...], list[int]],
    *,
    greedy: bool,
) -> dict[str, Any]:
    """A decoder's figures at one level."""
    places, own = places_of(groups), answers_of(groups, side)
    figure = figure_of(
        label, Beside(at_once=len(groups[0]), plain=reference, other=side, prompts=places)
    )
    return {
        "label": label,
        "at_once": len(groups[0]),
        "groups": len(groups),
        "prompts": len(own),
        "tokens_per_second": sum(side.tokens) / sum(side.seconds),
        "first_token_ms": 1e3 * median(one for group in side.first_token_seconds for one in group),
        "ratio": figure.ratio,
        "low": figure.low,
        "high": figure.high,
        "identical": sum(plain[ids] == output for ids, output in own.items()) if greedy else None,
    }


def level_table(report: Mapping[str, Any]) -> Table:
    """The report as a table for the terminal."""
    settings, machine = report["settings"], report["machine"]
    rows = [
        [
            row["label"],
            str(row["at_once"]),
            number(row["tokens_per_second"], ".1f"),
            number(row["ratio"], ".2f"),
            f"{row['low']:.2f}–{row['high']:.2f}",
            number(row["first_token_ms"], ".0f"),
            "–" if row["identical"] is None else f"{row['identical']} of {row['prompts']}",
        ]
        for row in report["rows"]
    ]
    caption = (
        f"{report['pair']}, {settings['dtype']}, {settings['prompts']} prompts of at most "
        f"{settings['longest_prompt']} tokens, up to {settings['max_tokens']} new ones, "
        f"temperature {settings['temperature']:g}, {machine['cpu']}, {machine['threads']} threads"
    )
    return rich_table(COLUMNS, rows, caption, "Requests at once")
