"""Hybrid against its oracle: what it would take to write a text if the best drafter of each round,
and how many of its tokens will be kept, were known before (2601.11580, "Oracle Combine").

    python -m draftwell.components.replay.oracle BUNDLE

`Hearing` asks each drafter at every place of a text what it would propose there, over the pair's
models. A round from a place may verify any beginning of one drafter's proposal that is kept whole;
the cheapest way through the text is the oracle's, and no choice of chains is faster: alternatives
for a token, which hybrid adds by default, may keep one token more. The passes that hybrid makes
for the same text (`Watched`) are priced alike.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftwell.components.prompts.prompt import demo_prompts, ids_of
from draftwell.serving.artifacts.hardware_profile import HardwareProfile
from draftwell.serving.artifacts.pair_files import models_root
from draftwell.serving.bundle.bundle import open_bundle
from draftwell.serving.errors import DraftwellError
from draftwell.serving.runtime.acceptance.exact import Exact
from draftwell.serving.runtime.commands import Forward, Role, Step
from draftwell.serving.runtime.drafting.continuations import likeliest_chain
from draftwell.serving.runtime.drafting.draft_model import DraftModel
from draftwell.serving.runtime.drafting.expected_gain import RoundCosts
from draftwell.serving.runtime.drafting.head import HeadChain
from draftwell.serving.runtime.drafting.stopping import FixedLength
from draftwell.serving.runtime.drafting.suffix import SuffixIndex
from draftwell.serving.runtime.pair import LoadedPair, LoadSettings, load_pair
from draftwell.serving.runtime.protocols import Drafter
from draftwell.serving.runtime.session.session import Session
from draftwell.serving.runtime.strategies import StrategyResources
from draftwell.serving.runtime.strategies.lossless.hybrid import HEAD_SHARE, Hybrid
from draftwell.serving.runtime.types import Draft

TEXT = "text"
"""The drafter that continues the text's own end; the others have the names of their roles."""
TEXTS, TOKENS = 15, 40
MAKERS: Mapping[Role, Callable[[FixedLength], Drafter]] = {"head": HeadChain, "draft": DraftModel}


def oracle_time(
    kept: Mapping[str, Sequence[int]], costs: Mapping[str, RoundCosts], longest: int
) -> float:
    """The least that a text takes after its first token, in rounds of plain decoding.

    Args:
        kept: drafter → how many tokens of its proposal are the text's own, at each place.
        costs: drafter → of its rounds; that of `TEXT` has no steps.

    >>> costs = {TEXT: RoundCosts([1.0, 1.0, 1.0, 1.5], 0.0), "head": RoundCosts([1.0] * 4, 0.3)}
    >>> oracle_time({TEXT: [0, 2, 0, 0], "head": [1, 0, 0, 0]}, costs, longest=2)
    2.5
    """
    places = len(kept[TEXT])
    least = [0.0] * (places + 1)
    for place in reversed(range(places)):
        least[place] = min(
            costs[name].verify[length + 1]
            + length * costs[name].step
            + least[min(places, place + length + 1)]
            for name, counts in kept.items()
            for length in range(min(counts[place], longest) + 1)
        )
    return least[0]


class Hearing(Hybrid):
    """Plain decoding that asks every drafter of hybrid at each place what it would propose."""

    heard: dict[str, list[list[int]]]
    """Drafter → its proposal at each place, of the request that ran last."""

    def run(self, session: Session) -> Step[None]:
        longest, index = self.config.max_draft, SuffixIndex()
        drafters = {
            role: make(FixedLength(longest))
            for role, make in MAKERS.items()
            if role in session.lanes
        }
        self.heard = {name: [] for name in (TEXT, *drafters)}
        yield from session.prefill()
        while not session.text.finished:
            room = min(longest, session.draft_room(1))
            index.extend(session.text.ids)
            found = likeliest_chain(index.continuations(room), room)[0] if room else []
            self.heard[TEXT].append(list(found))
            for role, drafter in drafters.items():
                draft = yield from drafter.propose(session, room)
                self.heard[role].append(draft.tokens)
                lane = session.lanes[role]
                lane.rollback(min(lane.length, len(session.text.ids) - 1))
            rows = yield from session.verify(Draft())
            verdict = yield from Exact().judge(Draft(), rows, session.rng)
            session.commit(Draft(), verdict, rows)


class Watched(Hybrid):
    """Hybrid, whose passes are written down."""

    passes: list[Forward]
    """Of the request that ran last, the target's over the prompt left out."""

    def run(self, session: Session) -> Step[None]:
        self.passes = []
        yield from watched(super().run(session), self.passes.append)


def watched(
    steps: Generator[Any, Any, None], see: Callable[[Forward], None]
) -> Generator[Any, Any, None]:
    """A generator's commands, each pass shown to somebody."""
    reply: Any = None
    while True:
        try:
            command = steps.send(reply)
        except StopIteration:
            return
        if isinstance(command, Forward) and not (command.prefill and command.model == "target"):
            see(command)
        reply = yield command


def agreement_with(proposals: Sequence[Sequence[int]], output: Sequence[int]) -> list[int]:
    """How many tokens of each proposal are the output's own; the first is made after its first
    token.

    >>> agreement_with([[5, 6], [6, 9], []], [4, 5, 6, 7])
    [2, 1, 0]
    """
    found = []
    for place, tokens in enumerate(proposals, start=1):
        pairs = zip(tokens, output[place:], strict=False)
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        found.append(min(len(tokens), len(output) - place) if same is None else same)
    return found


def time_of(passes: Sequence[Forward], costs: Mapping[str, RoundCosts]) -> float:
    """What passes take, in rounds of plain decoding; what a model reads beyond a draft's steps is
    priced as reading."""
    total = 0.0
    for one in passes:
        if one.model == "target":
            total += costs[TEXT].verify[len(one.tokens)]
        else:
            mine = costs[one.model]
            total += mine.step * one.steps + mine.reading * max(0, len(one.tokens) - 1)
    return total


def prices(profile: HardwareProfile, longest: int, roles: Iterable[Role]) -> dict[str, RoundCosts]:
    """Drafter → costs of its rounds, as hybrid weighs them."""
    steps = {
        "head": profile.t_head or HEAD_SHARE * profile.verify_seconds(1),
        "draft": profile.t_draft or 0.0,
    }
    found = {TEXT: RoundCosts.of(profile, 0.0, longest)}
    for role in roles:
        found[role] = RoundCosts.of(profile, steps[role], longest, role)
    return found


@dataclass(frozen=True)
class OracleShare:
    """Hybrid and its oracle on some texts, in rounds of plain decoding.

    Args:
        plain: rounds of plain decoding, which are all tokens but the first.
        hybrid, oracle: what they take.
    """

    plain: float
    hybrid: float
    oracle: float

    def __add__(self, other: OracleShare) -> OracleShare:
        return OracleShare(
            self.plain + other.plain, self.hybrid + other.hybrid, self.oracle + other.oracle
        )

    @property
    def share(self) -> float:
        """Hybrid's speed over its oracle's."""
        return self.oracle / self.hybrid


def oracle_shares(
    pair: LoadedPair,
    resources: StrategyResources,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    parameters: Mapping[str, Any] | None = None,
) -> list[OracleShare]:
    """Of each greedy text, decoded twice: by hybrid, which learns from one to the next, and plainly
    with all its drafters asked at every place.

    Args:
        resources: what hybrid reads, with the profile that passes are priced by.
        prompts: token ids.
        parameters: of hybrid.
    Raises:
        RuntimeError: hybrid wrote another text than plain decoding.
    """
    config, resources = Hybrid.Config(**(parameters or {})), resources.private()
    hybrid, hearing = Watched(config, resources), Hearing(config, resources)
    profile = hybrid.artifact(HardwareProfile)
    costs = prices(profile, config.max_draft, set(hybrid.choose_models(pair.models)) - {"target"})
    engine, sampling, found = pair.engine(), pair.sampling(max_tokens=max_tokens), []
    for ids in prompts:
        output, plain = (engine.generate(ids, sampling, one).output for one in (hybrid, hearing))
        if output != plain:
            raise RuntimeError("hybrid is declared lossless, and wrote another text")
        kept = {name: agreement_with(heard, plain) for name, heard in hearing.heard.items()}
        least = oracle_time(kept, costs, config.max_draft)
        found.append(OracleShare(len(plain) - 1, time_of(hybrid.passes, costs), least))
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Print hybrid's share of its oracle's speed on shipped prompts."""
    parser = argparse.ArgumentParser(description="Hybrid's speed over its oracle's.")
    parser.add_argument("bundle", type=Path, help="with what hybrid reads (`make deploy`)")
    bundle = open_bundle(parser.parse_args(arguments).bundle)
    settings = LoadSettings.model_validate({"dtype": bundle.manifest.dtype})
    pair = load_pair(bundle.files(models_root()), settings, qualifier=False)
    resources = StrategyResources(bundle.artifacts(), pair.special_tokens)
    prompts = [ids_of(pair, prompt) for prompt in demo_prompts(TEXTS)]
    total = sum(oracle_shares(pair, resources, prompts, TOKENS), OracleShare(0, 0, 0))
    speeds = (total.plain / total.hybrid, total.plain / total.oracle)
    print("hybrid {:.2f} x plain, its oracle {:.2f} x: {:.2f}".format(*speeds, total.share))


if __name__ == "__main__":
    try:
        main()
    except DraftwellError as mistake:
        print(f"Error: {mistake}", file=sys.stderr)
        sys.exit(2)
