"""Training data: features and labels of a trace's draft tokens, split by prompt.

A trace can be large: 2,000 prompts × 96 tokens × 4 prefix kinds are 768,000 rows of 1,152 state
dimensions. So it is read in small parts into one matrix of the trace's own float16. Subsets of it
(folds, tasks) are lists of row numbers, and only the rows that are being fitted are converted to
float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

import numpy as np

from draftwell.components.collect.repeated_prompts import first_of_the_same, prompts_of
from draftwell.components.collect.trace_columns import check_finite, column, matrix, scalars, texts
from draftwell.components.train.settings import LabelKind
from draftwell.serving.artifacts.verifier import SCALARS
from draftwell.serving.errors import DraftwellError
from draftwell.serving.recording.trace import TraceSet

if TYPE_CHECKING:
    import pyarrow as pa

NUMBERS = ("ratio", "confidence")
TEXTS = ("prompt_id", "kind")
STATES = ("before", "after")
CHANCES = ("draft_p", "draft_q", "temperature")
READ_BY_VERIFIERS = (*(scalar.column for scalar in SCALARS), *(f"hidden_{name}" for name in STATES))
COLUMNS = tuple(dict.fromkeys((*TEXTS, *NUMBERS, *CHANCES, *READ_BY_VERIFIERS)))
TEST_SHARE = 0.2
FOLDS = 3
LEAST_PROMPTS = 3
BLOCK = 8192
"""Rows that are converted at once."""


@dataclass(frozen=True)
class Examples:
    """Draft tokens with the draft's features and the target's verdict.

    Args:
        parts: name of a feature group → `[all rows, width]`, states in float16 and the others in
            float32; shared by everything that is taken from these examples. Groups that the trace
            lacks are absent.
        ratio: `[rows]` float32, q̄(x)/p̄(x), inf where the target gives x no probability.
        confidence: `[rows]` float32, C: the baseline's score.
        prompt: `[rows]` ids of the prompts; of several with the same tokens, the first one's.
        kind: `[rows]` of the prefix; None: not recorded, "" for a row without.
        accepted: `[rows]` float32 in [0, 1], probability that the target keeps x at the trace's
            temperature; None: not known.
        temperature: highest of the traces, None: not recorded.
        rows: `[rows]` row of each example in `parts`; None: all of them, in order.
    """

    parts: dict[str, np.ndarray]
    ratio: np.ndarray
    confidence: np.ndarray
    prompt: np.ndarray
    kind: np.ndarray | None = None
    accepted: np.ndarray | None = None
    rows: np.ndarray | None = None
    temperature: float | None = None

    def __len__(self) -> int:
        return len(self.ratio)

    def take(self, rows: np.ndarray) -> Examples:
        """The examples of a boolean or index array; features are not copied."""
        places = (np.arange(len(self)) if self.rows is None else self.rows)[rows]
        kind, accepted = (
            None if column is None else column[rows] for column in (self.kind, self.accepted)
        )
        return Examples(
            self.parts,
            self.ratio[rows],
            self.confidence[rows],
            self.prompt[rows],
            kind,
            accepted,
            places,
            self.temperature,
        )

    def blocks(self, names: tuple[str, ...]) -> Iterator[np.ndarray]:
        """Blocks `[at most 8192, width]` float32 in order: the groups joined along the width, in
        the order that `Verifier` reads them."""
        for start in range(0, len(self), BLOCK):
            place = (
                slice(start, start + BLOCK)
                if self.rows is None
                else self.rows[start : start + BLOCK]
            )
            yield np.concatenate(
                [self.parts[name][place] for name in names], axis=1, dtype=np.float32
            )

    def features(self, names: tuple[str, ...]) -> np.ndarray:
        """All blocks in one matrix `[rows, width]` float32."""
        matrix = np.empty((len(self), sum(self.parts[name].shape[1] for name in names)), np.float32)
        for number, block in enumerate(self.blocks(names)):
            matrix[number * BLOCK : number * BLOCK + len(block)] = block
        return matrix


def read_examples(trace: TraceSet | pa.Table) -> Examples:
    """All draft tokens of a trace.

    Raises:
        DraftwellError: the trace is empty (`empty_trace`), or has values that are not finite.
    """
    count = trace.num_rows
    parts: dict[str, np.ndarray] = {"scalars": np.empty((count, len(SCALARS)), np.float32)}
    numbers: list[np.ndarray] = []
    labels: list[list[np.ndarray]] = []
    absent: set[str] = set()
    place, hottest = 0, None
    for table in trace.batches(COLUMNS) if isinstance(trace, TraceSet) else [trace]:
        end = place + table.num_rows
        ratio, confidence = (column(table, name) for name in NUMBERS)
        parts["scalars"][place:end] = scalars(table)
        for name in STATES:
            states = matrix(table, f"hidden_{name}") if table.num_rows else None
            if states is None:
                absent |= {name} if table.num_rows else set()
                continue
            check_finite(f"hidden_{name}", states)
            if name not in parts:
                parts[name] = np.empty((count, states.shape[1]), np.float16)
            if parts[name].shape[1] != states.shape[1]:
                raise DraftwellError(
                    f"the trace holds states of different sizes in hidden_{name}: collect it again",
                    code="bad_trace",
                )
            parts[name][place:end] = states
        check_finite(", ".join(scalar.column for scalar in SCALARS), parts["scalars"][place:end])
        check_finite("ratio", np.where(np.isposinf(ratio), 0.0, ratio))
        accepted, temperature = chances(table)
        hottest = temperature if hottest is None else max(hottest, temperature or 0.0)
        numbers.append(np.stack([ratio, confidence, accepted]))
        labels.append([texts(table, name) for name in TEXTS])
        place = end
    if place == 0:
        raise DraftwellError(
            "the trace holds no rows to learn from: collect one with `draftwell step collect`",
            code="empty_trace",
        )
    ratio, confidence, accepted = np.concatenate(numbers, axis=1)
    prompt, kind = (np.concatenate(column) for column in zip(*labels, strict=True))
    names, places = np.unique(prompt, return_inverse=True)
    same = first_of_the_same(trace)
    prompt = np.array([same.get(name, name) for name in names.tolist()])[places]
    return Examples(
        {name: part[:place] for name, part in parts.items() if name not in absent},
        ratio,
        confidence,
        prompt,
        kind,
        None if np.isnan(accepted).any() else accepted,
        temperature=hottest,
    )


def chances(table: pa.Table) -> tuple[np.ndarray, float | None]:
    """`[rows]` float32 min(1, p/q) of the draft tokens, NaN where a table lacks it, and the highest
    temperature, None where it does."""
    if not set(CHANCES) <= set(table.column_names) or not table.num_rows:
        return np.full(table.num_rows, np.nan, np.float32), None
    p, q, temperature = (column(table, name) for name in CHANCES)
    return np.minimum(1.0, p / np.maximum(q, 1e-12)).astype(np.float32), float(temperature.max())


@dataclass(frozen=True)
class VerifierLabel:
    """What a verifier predicts of a draft token: a target in [0, 1] for each example, and which
    tokens it should reject.

    Args:
        ratio: lambda, of the label `ratio` alone.
    """

    kind: LabelKind = LabelKind.RATIO
    ratio: float = 1.2

    def targets(self, examples: Examples) -> np.ndarray:
        """`[rows]` float32: 1 for an acceptable token, 0 for another, something between for the
        label `soft`.

        Raises:
            DraftwellError: labels that the trace does not give: the target's argmax is known of
                temperature 0 alone (`sampled_trace`), and old traces may lack probabilities
                (`no_probabilities`).
        """
        if self.kind is LabelKind.RATIO:
            return (examples.ratio <= self.ratio).astype(np.float32)
        if self.kind is LabelKind.ARGMAX and examples.temperature:
            raise DraftwellError(
                f"the trace was sampled at temperature {examples.temperature:g}, where the "
                "target's argmax is not known: "
                "collect one at temperature 0, or train with --set label=soft",
                code="sampled_trace",
            )
        if examples.accepted is None:
            raise DraftwellError(
                (
                    f"the trace lacks draft_p and draft_q, which the label {self.kind.value} "
                    "is made of: collect it again"
                ),
                code="no_probabilities",
            )
        return examples.accepted

    def rejected(self, examples: Examples) -> np.ndarray:
        """`[rows]` float64: how much each token counts in eta_FP, where it should be rejected:
        q̄/p̄ > 1 as in the paper, else 1 − target."""
        if self.kind is LabelKind.RATIO:
            return (examples.ratio > 1).astype(np.float64)
        return 1.0 - self.targets(examples).astype(np.float64)

    def __str__(self) -> str:
        return f"λ = {self.ratio:g}" if self.kind is LabelKind.RATIO else self.kind.value


class OfPrompts(Protocol):
    """What is split by prompt: `prompt` holds the id of each row's prompt."""

    @property
    def prompt(self) -> np.ndarray: ...

    def take(self, rows: np.ndarray) -> Self: ...

    def __len__(self) -> int: ...


Rows = TypeVar("Rows", bound=OfPrompts)


def split_by_prompt(examples: Rows, seed: int) -> tuple[Rows, Rows]:
    """Training examples, and a fifth as test examples, without a common prompt: neighbouring
    positions are too similar to be split.

    Raises:
        DraftwellError: fewer than three prompts (`too_few_prompts`).
    """
    names = shuffled_prompts(examples, seed)
    held = np.isin(examples.prompt, names[: max(1, round(TEST_SHARE * len(names)))])
    return examples.take(~held), examples.take(held)


def read_train_and_test(
    trace: TraceSet | pa.Table,
    test: TraceSet | pa.Table | None,
    seed: int,
    read: Callable[[Any], Rows],
) -> tuple[Rows, Rows, list[str]]:
    """Training examples, test examples, and the ids of test prompts that are left out because
    `trace` has them too.

    Args:
        test: None holds out a fifth of the prompts of `trace`.
        read: makes examples of a trace.
    Raises:
        DraftwellError: no test prompt is left (`test_prompts_known`), or as in `read` and
            `split_by_prompt`.
    """
    if test is None:
        return *split_by_prompt(read(trace), seed), []
    known = sorted(prompts_in_both(trace, test))
    tested = read(test)
    unseen = tested.take(~np.isin(tested.prompt, known))
    if not len(unseen):
        raise DraftwellError(
            (
                "every prompt of the test trace is in the training trace: collect a test trace "
                "of other prompts"
            ),
            code="test_prompts_known",
        )
    return read(trace), unseen, known


def folds(examples: Examples, seed: int) -> list[np.ndarray]:
    """Three masks `[rows]` (two for two prompts) that divide the prompts; each is held out once."""
    names = shuffled_prompts(examples, seed, 2)
    count = min(FOLDS, len(names))
    return [np.isin(examples.prompt, names[number::count]) for number in range(count)]


def shuffled_prompts(examples: OfPrompts, seed: int, least: int = LEAST_PROMPTS) -> np.ndarray:
    """The prompts' ids in random order."""
    names = np.unique(examples.prompt)
    if len(names) < least:
        raise DraftwellError(
            f"training needs a trace of at least {least} prompts to be tested on unseen "
            "ones, this trace has "
            f"{len(names)}: collect more",
            code="too_few_prompts",
        )
    shuffled: np.ndarray = np.random.default_rng(seed).permutation(names)
    return shuffled


def prompts_in_both(trace: TraceSet | pa.Table, other: TraceSet | pa.Table) -> set[str]:
    """Ids of the other trace's prompts that this trace holds too, compared by tokens: ids of
    different files may be equal."""
    seen = {tokens for _, tokens in prompts_of(trace)}
    return {name for name, tokens in prompts_of(other) if tokens in seen}
