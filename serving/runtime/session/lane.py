"""A model as one request sees it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from draftwell.serving.runtime.commands import Forward, Role, Step
from draftwell.serving.runtime.grammar.masks import GrammarMasks
from draftwell.serving.runtime.logits import Span
from draftwell.serving.runtime.model import Model, Recorder
from draftwell.serving.runtime.penalties import Penalties
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.session.stats import Stats
from draftwell.serving.runtime.slot_texts import SlotText
from draftwell.serving.runtime.trees import DraftTree
from draftwell.serving.runtime.types import Draft

if TYPE_CHECKING:
    from torch import Tensor


class Lane:
    """A model as one request sees it: a slot that holds the first `length` tokens of text and
    draft.

    Args:
        text: of the slot; what it holds was read by an earlier request.
    """

    def __init__(  # noqa: PLR0913
        self,
        role: Role,
        model: Model,
        slot: int,
        sampling: Sampling,
        stats: Stats,
        prompt_length: int = 0,
        prompt: Sequence[int] = (),
        text: SlotText | None = None,
        grammar: GrammarMasks | None = None,
    ):
        self.role, self.model, self.slot, self.sampling, self.stats = (
            role,
            model,
            slot,
            sampling,
            stats,
        )
        self.prompt_length = prompt_length
        self.text = text or SlotText()
        # `reused`: until this request has read something itself
        self.length = self.reused = len(self.text.tokens)
        # tokens in the slot, those after `length` read with sublayers skipped; 0: none were
        self._skimmed = 0
        self._skip: frozenset[int] = frozenset()
        self._tree_read: tuple[list[int], DraftTree, Span] | None = None  # until `settle`
        self.branches: list[Lane] = []
        self.shared = 0  # of a branch: leading tokens that it has in common with the lane it leaves
        self.grammar = grammar
        self.penalties = Penalties(sampling, prompt, grammar, spare=role != "target")
        # of the few requests whose distributions are kept (recording.py)
        self.recorder: Recorder | None = None

    @property
    def chains(self) -> bool:
        """Whether `read` takes `steps`: the model can choose tokens by itself, and they are the
        ones that this request would."""
        if self.recorder is not None:  # a chain skips the row after a bonus token
            return False
        asked = self.sampling
        altered = asked.penalises or asked.biases or asked.banned_token_ids
        return asked.greedy and not altered and self.model.chains

    @property
    def fresh(self) -> bool:
        """Whether this request has read nothing yet."""
        return self.length <= self.reused

    def read(
        self,
        sequence: Sequence[int],
        keep: int = 1,
        steps: int = 1,
        features: Tensor | None = None,
        *,
        sure: bool = True,
    ) -> Step[Span]:
        """Feed what the slot has not seen of `sequence` (text, then draft) and return the rows of
        its last `keep` tokens.

        Args:
            features: of a head: what those unseen tokens are paired with, as in `Forward`.
            steps: continue greedily until there are so many rows; the slot has then seen the token
                of every row but the last.
            sure: False: `features` are guesses, so that no later request may go on from what is
                read.
        """
        self.rollback(len(sequence) - keep)  # a row that is wanted again is computed again
        start, prefill = self.length, self.fresh
        unseen = tuple(sequence[start:])
        self.reused = 0
        if self.role == "target":
            self.stats.cached_tokens += start if prefill else 0
            self.stats.target_tokens += len(unseen)
            self.stats.prefill_calls += prefill
            self.stats.target_calls += not prefill
        elif self.role == "qualifier":
            self.stats.qualifier_calls += 1
        else:
            self.stats.draft_calls += steps
        kept = keep
        # also the rows of tokens that the model has not read yet, which nobody else asks for
        if self.recorder is not None:
            kept = max(keep, min(len(unseen), len(sequence) - self.prompt_length + 1))
        rates = 1 < kept == len(unseen) and len(sequence) <= self.prompt_length
        span: Span = yield Forward(
            self.role, self.slot, unseen, kept, prefill, steps, rates=rates, features=features
        )
        self.length = len(sequence) + steps - 1
        if sure and self.text.owner is not None:  # else nobody asks which tokens a chain chose
            self.text.extend(start, unseen if steps == 1 else (*unseen, *span.top[: steps - 1]))
        if self.recorder is not None:  # it may have come while the forward pass ran
            self.recorder.saw(self.role, sequence, span, steps)
        if kept > keep:
            span = span[-keep:]
        return self._under(span, sequence)

    def _under(self, span: Span, sequence: Sequence[int]) -> Span:
        """Rows up to the last token of `sequence`, as this request has them."""
        written = len(sequence) - self.prompt_length
        # else all rows are within the prompt
        asks = self.sampling.penalises and written >= 0
        changes = self.penalties.follow(sequence[self.prompt_length :]) if asks else None
        return self._numbered(span.under(self.sampling, changes), written, range(1 - len(span), 1))

    def _numbered(self, rows: Span, written: int, depths: Iterable[int]) -> Span:
        """Rows, which of a coupled request know the numbers of their tokens in the output.

        Args:
            depths: of each row: how many places after number `written` its token comes.
        """
        if not self.sampling.coupled:
            return rows
        return rows.before(written + depth for depth in depths)

    @property
    def skips(self) -> bool:
        """Whether `skim` may be called: the model can leave sublayers out."""
        return self.model.skips

    def skim(self, sequence: Sequence[int], skip: frozenset[int], keep: int = 1) -> Step[Span]:
        """As `read`, with sublayers skipped: the model drafts for itself (`Forward.skip`).

        Nothing of it counts as read: `rollback` forgets it whatever the length, and whatever reads
        next or skips others does that first.
        """
        if skip != self._skip:
            self.rollback(self.length)
        held = max(self.length, self._skimmed)
        self.stats.draft_calls += 1
        span: Span = yield Forward(self.role, self.slot, tuple(sequence[held:]), keep, skip=skip)
        self._skimmed, self._skip = len(sequence), skip
        return self._under(span, sequence)

    @property
    def trees(self) -> bool:
        """Whether `read_tree` takes trees with alternatives: the model reads them, and this
        request's rows do not depend on what was written before them (penalties, grammars)."""
        return self.model.trees and not self.sampling.penalises

    def read_tree(self, sequence: Sequence[int], tree: DraftTree) -> Step[Span]:
        """Feed what the slot has not seen of `sequence`, then a tree after it; rows after the
        sequence and after each token of the tree.

        `settle` must follow, which keeps one path of the tree.
        """
        self.rollback(len(sequence) - 1)
        start = self.length
        unseen = sequence[start:]
        before, self.reused = len(unseen), 0
        parents = (*range(-1, before - 1), *(before + parent for parent in tree.parents))
        self.stats.target_tokens += before + len(tree)
        self.stats.target_calls += 1
        span: Span = yield Forward(
            self.role, self.slot, (*unseen, *tree.tokens), len(tree) + 1, parents=parents
        )
        self.length = len(sequence) + len(tree)
        self.text.extend(start, unseen)
        self._tree_read = list(sequence), tree, span
        written = len(sequence) - self.prompt_length
        return self._numbered(span.under(self.sampling), written, (0, *tree.depths))

    def hidden_states(self, start: int, end: int) -> Tensor:
        """States `[end − start, width]` of positions that the slot holds, for a head (of a target
        that keeps them)."""
        states: Tensor = self.model.hidden_states(self.slot, start, end)  # type: ignore[attr-defined]
        return states

    def read_after(self, tree: DraftTree, features: Tensor, keep: int) -> Step[Span]:
        """Feed a head a tree after what its slot holds; rows after its last `keep` tokens. Whoever
        reads on rolls it back first.

        They are without penalties and grammar: only for requests whose target reads trees
        (`trees`).

        Args:
            features: as in `read`, one for each token.
        """
        self.stats.draft_calls += 1
        span: Span = yield Forward(
            self.role,
            self.slot,
            tuple(tree.tokens),
            keep,
            parents=tuple(tree.parents),
            features=features,
        )
        written = self.length - self.prompt_length
        self.length += len(tree)
        return self._numbered(span.under(self.sampling), written, tree.depths[-keep:])

    def settle(self, length: int, path: Sequence[int]) -> None:
        """After `read_tree` of a sequence of `length` tokens: keep these places of the tree, in
        order, and forget its other tokens."""
        self.model.keep(self.slot, length, path)  # type: ignore[attr-defined]  # of a model with `trees`
        self.length = length + len(path)
        if self._tree_read is not None:
            self.text.extend(length, [self._tree_read[1].tokens[place] for place in path])
        # as though the path had been the draft
        if self.recorder is not None and self._tree_read is not None:
            sequence, tree, span = self._tree_read
            self.recorder.saw(
                self.role,
                sequence + [tree.tokens[i] for i in path],
                span.at([0, *(i + 1 for i in path)]),
                1,
            )
        self._tree_read = None

    def rollback(self, length: int) -> None:
        """Forget everything after the first `length` tokens, if there is more."""
        for branch in self.branches:
            branch.shared = min(branch.shared, length)
        self.text.cut(length)
        if length < self.length or self._skimmed:
            self.length, self._skimmed = min(length, self.length), 0
            self.model.rollback(self.slot, self.length)

    def branch(self, number: int, length: int) -> Lane:
        """A lane next to this one that holds its first `length` tokens, for a further sequence;
        numbered from 0, opened when first asked for, closed with the session."""
        while len(self.branches) <= number:
            slot, prompt = self.model.open_branch(), self.penalties.prompt
            self.branches.append(
                Lane(
                    self.role,
                    self.model,
                    slot,
                    self.sampling,
                    self.stats,
                    self.prompt_length,
                    prompt,
                    SlotText(self.text.owner),
                    self.grammar,
                )
            )
            self.branches[-1].recorder = self.recorder
        branch = self.branches[number]
        self.model.fork(self.slot, branch.slot, length, min(branch.shared, length))
        branch.length = branch.shared = length
        branch.text.follow(self.text, length)
        branch._skimmed = 0
        return branch

    def adopt(self, branch: Lane) -> None:
        """Hold what a branch holds: the text continues with its tokens."""
        self.rollback(min(branch.shared, self.length))
        self.model.fork(branch.slot, self.slot, branch.length, self.length)
        self.length = branch.shared = branch.length
        self.text.follow(branch.text, branch.length)

    def forget(self) -> None:
        """Let nobody go on from what the slot holds: something went wrong."""
        self.text.owner = None

    def close(self) -> None:
        """Give back the slot and those of all branches."""
        with ExitStack() as closing:
            for lane in [self, *self.branches]:
                closing.callback(lane.model.close, lane.slot)


@dataclass
class DraftSequence:
    """One of several drafts of a round.

    Args:
        draft: at least one token, deterministic (no rows).
        lane: the lane of the draft model that has read the draft's tokens, the last perhaps not.
    """

    draft: Draft
    lane: Lane
