"""What a tuner measures: strategies that decode the same prompts in turn and keep what they have
learnt from one rung to the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from draftwell.components.bench.answers.rouge import mean_rouge_l
from draftwell.components.bench.interleaved import WARMUP_TOKENS, Progress
from draftwell.components.bench.runner import Generation, StrategyContender, interleaved
from draftwell.components.bench.target_agreement import TargetAgreement, agreement
from draftwell.components.prompts.prompt import Prompt, ids_of
from draftwell.serving.runtime.pair import LoadedPair
from draftwell.serving.runtime.strategies import StrategyChoice, StrategyResources


@dataclass(frozen=True)
class Measured:
    """What was measured of one choice: for every prompt, in order, seconds of the complete request,
    the output, and target calls."""

    seconds: list[float]
    outputs: list[list[int]]
    calls: list[int]

    @property
    def tokens(self) -> list[int]:
        """Emitted tokens of every prompt."""
        return [len(output) for output in self.outputs]

    @property
    def pace(self) -> float:
        """Seconds per emitted token, over all prompts."""
        return sum(self.seconds) / sum(self.tokens)

    @property
    def calls_per_token(self) -> float:
        """Target calls per emitted token, over all prompts."""
        return sum(self.calls) / sum(self.tokens)

    def __add__(self, more: Measured) -> Measured:
        """The same choice on further prompts."""
        return Measured(
            self.seconds + more.seconds, self.outputs + more.outputs, self.calls + more.calls
        )


class Evaluate(Protocol):
    """Measures choices on prompts, interleaved, and returns one `Measured` for each choice in
    order.

    `fresh` contenders have learnt nothing from earlier calls; the others continue from where they
    were.
    """

    def __call__(
        self,
        choices: Sequence[StrategyChoice],
        prompts: Sequence[Prompt],
        *,
        max_tokens: int | None = None,
        fresh: bool = False,
    ) -> Sequence[Measured]: ...


@dataclass(frozen=True)
class Quality:
    """How good outputs are.

    Args:
        share: of emitted tokens, those that are the target's argmax after the same prefix, 0..1.
        rouge_l: mean ROUGE-L against the prompts' references, 0 to 100; None where no prompt has
            one.
        surprisal: of sampled outputs, nats a token by which the target finds them less likely than
            samples of its own (`target_agreement.agreement`): about 0 for a lossless strategy,
            below for one that prefers likely tokens; None of greedy ones.
    """

    share: float
    rouge_l: float | None = None
    surprisal: float | None = None


class QualityOf(Protocol):
    """Judges outputs."""

    def __call__(self, prompts: Sequence[Prompt], measured: Measured) -> Quality: ...


@dataclass
class Evaluator:
    """Measures strategies of a pair; every choice has online state of its own, which lives as long
    as the evaluator.

    Args:
        resources: artifacts; each contender works on copies.
        max_tokens: tokens to emit per prompt at most, where a call names no other number.
        seed: of the first prompt's tokens; every further prompt has the next one, the same for all
            choices and calls.
        temperature: of all requests.
        progress: called with (done, total, strategy) within each call.
    """

    pair: LoadedPair
    resources: StrategyResources
    max_tokens: int = 64
    seed: int = 0
    temperature: float = 0.0
    progress: Progress | None = None
    _contenders: dict[StrategyChoice, StrategyContender] = field(default_factory=dict, init=False)

    def __call__(
        self,
        choices: Sequence[StrategyChoice],
        prompts: Sequence[Prompt],
        *,
        max_tokens: int | None = None,
        fresh: bool = False,
    ) -> list[Measured]:
        sampling = self.pair.sampling(
            max_tokens=max_tokens or self.max_tokens, temperature=self.temperature, seed=self.seed
        )
        contenders = [
            self._contender(choice, ids_of(self.pair, prompts[0]), fresh) for choice in choices
        ]
        runs = interleaved(self.pair, contenders, prompts, sampling, progress=self.report)
        return [as_measured(generations) for generations in runs]

    def report(self, done: int, total: int, label: str) -> None:
        """Pass progress on, with the strategy's name alone."""
        if self.progress:
            self.progress(done, total, label.partition(" ")[0])

    def _contender(
        self, choice: StrategyChoice, ids: Sequence[int], fresh: bool
    ) -> StrategyContender:
        """A choice's contender, warmed up when it is new."""
        known = self._contenders.get(choice)
        if known is None:
            known = self._contenders[choice] = StrategyContender(
                self.pair, self.resources, choice, choice.key
            )
            known.generate(
                ids, self.pair.sampling(max_tokens=WARMUP_TOKENS, temperature=self.temperature)
            )
            known.reset()
        elif fresh:
            known.reset()
        return known


def as_measured(runs: Sequence[Generation]) -> Measured:
    """Generations of one choice as plain lists."""
    return Measured(
        [run.seconds for run in runs],
        [list(run.tokens) for run in runs],
        [run.stats.target_calls for run in runs],
    )


class QualityReader:
    """Judges outputs by the target's own pass over them; a prompt's output is read once.

    Args:
        temperature: of the outputs.
    """

    def __init__(self, pair: LoadedPair, temperature: float = 0.0):
        self.pair, self.temperature = pair, temperature
        self._known: dict[tuple[tuple[int, ...], tuple[int, ...]], TargetAgreement] = {}

    def __call__(self, prompts: Sequence[Prompt], measured: Measured) -> Quality:
        read = (
            self._read(prompt, output)
            for prompt, output in zip(prompts, measured.outputs, strict=True)
        )
        found = sum(read, TargetAgreement(0, 0, 0.0))
        points = mean_rouge_l(
            [self.pair.decode(output) for output in measured.outputs],
            [prompt.reference for prompt in prompts],
        )
        return Quality(
            found.matches / found.tokens,
            None if points is None else 100 * points,
            found.kl if self.temperature > 0 else None,
        )

    def _read(self, prompt: Prompt, output: Sequence[int]) -> TargetAgreement:
        ids = ids_of(self.pair, prompt)
        what = (tuple(ids), tuple(output))
        if what not in self._known:
            self._known[what] = agreement(self.pair, ids, output, self.temperature)
        return self._known[what]
