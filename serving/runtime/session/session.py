"""One request in flight: its text, its counters, its random streams, and its lane on each model."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack

from draftwell.serving.runtime.commands import Role, Step
from draftwell.serving.runtime.failures import check_request
from draftwell.serving.runtime.grammar.masks import GrammarMasks
from draftwell.serving.runtime.logits import Rating, Span
from draftwell.serving.runtime.model import Model, Recorder
from draftwell.serving.runtime.random_streams import Streams
from draftwell.serving.runtime.requests import Sampling, Text
from draftwell.serving.runtime.session.lane import Lane
from draftwell.serving.runtime.session.stats import Stats
from draftwell.serving.runtime.slot_texts import SlotText
from draftwell.serving.runtime.trees import DraftTree, TreeVerdict
from draftwell.serving.runtime.types import Draft, Emitted, Origin, Verdict

UNLIMITED = sys.maxsize
Follow = Callable[[DraftTree, list[int], Span], None]
"""What drafters that read the target's rows are called with after a verification: the tree, the
path kept, and the rows."""


class Session:
    """What a strategy works with.

    Args:
        prompt: token ids, at least one.
        models: the pair's models by role; a slot is opened on each.
        draft_limit: draft tokens a verification at most, 0 for plain decoding. A busy server
            changes it between forward passes; schedules read it when a draft begins, so it never
            looks at the tokens that it cuts, and any strategy stays as exact as it is. What is
            drafted also has to fit into the context of every model but the target: a text that
            outgrows one is decoded plainly.
        owner: requests of the same owner go on from what slots hold of each other's prompts and
            answers; None: nothing is shared.
    Raises:
        InvalidRequest: an empty prompt, or a token outside the vocabulary.
        VocabularyMismatch: the models' vocabularies differ.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        models: Mapping[Role, Model],
        draft_limit: int = UNLIMITED,
        owner: Hashable = None,
    ):
        self.draft_limit, self.owner = draft_limit, owner
        self.draft_context = min(
            (model.max_context for role, model in models.items() if role != "target"),
            default=UNLIMITED,
        )
        self.text = Text(prompt, sampling)
        check_request(prompt, sampling, models)
        self.sampling = sampling
        self.rng = Streams(sampling.seed)
        self.stats = Stats()
        self.recorded = False
        self.probed_at = -1
        """`stats.verdicts` when a server last asked for a draft that is only to be recorded."""
        self.given: Callable[[Session, Follow | None], Step[bool]] | None = None
        """Drafts that come with the request, before its strategy's own (strategies/given.py)."""
        self.origins: list[Origin] = []  # of the output's tokens
        # theirs too, where asked for; after the output while a strategy trusts its draft
        self.ratings: list[Rating] = []
        # None: the first token, which nothing predicts
        self.prompt_ratings: list[Rating | None] = []
        self.grammar = (
            GrammarMasks(sampling.grammar, sampling.stop_token_ids) if sampling.grammar else None
        )
        self.lanes: dict[Role, Lane] = {}
        try:
            for role, model in models.items():
                self.lanes[role] = self._lane(role, model, owner)
        except BaseException:
            self.close()
            raise

    def _lane(self, role: Role, model: Model, owner: Hashable) -> Lane:
        """Take a slot on a model."""
        prompt = self.text.ids
        # its first pair has the prompt's second token, and rests on the first
        unpaired = role == "head"
        text = None if owner is None else SlotText((owner, prompt[0]) if unpaired else owner)
        slot = model.open() if text is None else model.open(text, prompt[unpaired:])
        return Lane(
            role,
            model,
            slot,
            self.sampling,
            self.stats,
            len(prompt) - unpaired,
            prompt[:],
            text,
            self.grammar,
        )

    @property
    def target(self) -> Lane:
        return self.lanes["target"]

    @property
    def draft(self) -> Lane:
        return self.lanes["draft"]

    @property
    def qualifier(self) -> Lane:
        return self.lanes["qualifier"]

    @property
    def head(self) -> Lane:
        return self.lanes["head"]

    def prefill(self) -> Step[Span]:
        """Read the prompt and sample the first token from the target, which gives the shortest time
        to first token."""
        return (yield from self.decode_plainly())

    def decode_plainly(self) -> Step[Span]:
        """One token from the target, without a draft; the row that it was drawn from."""
        rows = yield from self.target.read(self.text.ids)
        yield from self.append_sampled(rows)
        return rows

    @property
    def longest_draft(self) -> int:
        """Tokens that may be drafted after the text: `draft_limit`, or what the drafting models'
        contexts leave. 0: decode plainly."""
        return max(0, min(self.draft_limit, self.draft_context - len(self.text.ids)))

    def draft_room(self, taken: int) -> int:
        """How long a draft may be after `taken` unverified tokens: what the budget and the contexts
        leave, at most `draft_limit`."""
        room = self.draft_context - len(self.text.ids)
        return max(0, min(min(self.text.remaining, room) - taken, self.draft_limit))

    def follow_prediction(self, follow: Follow | None = None) -> Step[bool]:
        """One round whose draft is the client's prediction, or what the grammar leaves no choice
        about, where nothing is pending; False: there is none, or nothing is known here.

        Args:
            follow: as in `serial_trees`.
        """
        return False if self.given is None else (yield from self.given(self, follow))

    @property
    def verified_room(self) -> int:
        """How long a draft may be that no model makes, so that one more token fits: what the budget
        and the target's context leave."""
        context = self.target.model.max_context - len(self.text.ids)
        return max(0, min(self.text.remaining, context) - 1)

    def tree_room(self) -> int:
        """Tokens that a tree may have altogether: what `draft_limit` and the target's context
        leave, for each takes a position there."""
        return max(0, min(self.draft_limit, self.target.model.max_context - len(self.text.ids)))

    def append_sampled(self, rows: Span) -> Step[None]:
        """Append one token sampled from the target."""
        token = (yield from rows.draw(0, self.rng.sample)).token
        self.stats.sampled += self.append([token], ["target"], rows)
        self.stats.verdicts += 1

    def append(
        self, tokens: Sequence[int], origins: Sequence[Origin], rows: Span | None = None
    ) -> int:
        """Make tokens final, up to the first stop token or the budget; return how many were taken.

        Args:
            origins: one for each token.
            rows: the target's, the first of them for the first token that has no rating yet; None
                where the target has not read so far, because the draft is trusted: `verify` or
                `rate_rest` makes up for it.
        """
        taken = self.text.append(tokens)
        self.origins += origins[:taken]
        if rows is not None:
            self._rate(rows)
        return taken

    def verify(self, draft: Draft) -> Step[Span]:
        """Target rows for every draft token and for the bonus token after them: `len(draft) + 1`
        rows."""
        # a prompt's forward pass that also verifies is a call
        self.stats.target_calls += self.target.fresh
        count, unrated = len(draft) + 1, self.unrated
        rows = yield from self.target.read(self.text.ids + draft.tokens, keep=unrated + count)
        if not unrated:
            return rows
        self._rate(rows)
        return rows[unrated:]

    def verify_tree(self, tree: DraftTree) -> Step[Span]:
        """Target rows after the text and after each token of a tree: `len(tree) + 1` rows."""
        if tree.is_chain:
            return (yield from self.verify(tree.draft([])))
        return (yield from self.target.read_tree(self.text.ids, tree))

    def commit_tree(self, tree: DraftTree, verdict: TreeVerdict, rows: Span) -> None:
        """As `commit`, of the path that a rule kept. A position counts as judged once, however many
        alternatives were tested there."""
        if not tree.is_chain:
            self.target.settle(len(self.text.ids), verdict.path)
        kept = len(verdict.path)
        path = rows.at([0, *(place + 1 for place in verdict.path)])
        self.commit(
            tree.draft(verdict.path), Verdict(kept, verdict.token, kept + verdict.rejected), path
        )

    def commit(self, draft: Draft, verdict: Verdict, rows: Span) -> None:
        """Make a verdict's tokens final and roll every lane back after a rejection.

        Args:
            rows: the target's, for the draft's tokens and the one after them.
        """
        kept = len(self.text.ids) + verdict.accepted
        tokens = draft.tokens[: verdict.accepted]
        self.append(
            tokens if verdict.token is None else [*tokens, verdict.token], verdict.origins, rows
        )
        self.stats.count(draft, verdict)
        if verdict.rejected:
            for lane in self.lanes.values():
                lane.rollback(kept)

    def record(self, recorder: Recorder | None) -> None:
        """Let somebody see what draft and target say from here on, or nobody any more."""
        self.recorded = recorder is not None
        for role in ("target", "draft"):
            if role in self.lanes:
                for lane in (self.lanes[role], *self.lanes[role].branches):
                    lane.recorder = recorder

    @property
    def unrated(self) -> int:
        """Output tokens whose rating was asked for and is not known yet."""
        return 0 if self.sampling.logprobs is None else len(self.origins) - len(self.ratings)

    def emitted(self, start: int) -> list[Emitted]:
        """Final tokens from output position `start` on, up to the first that still waits for its
        rating."""
        known = len(self.origins) - self.unrated
        ratings = self.ratings[start:known] if self.ratings else [None] * (known - start)
        tokens = self.text.ids[self.text.prompt_length + start : self.text.prompt_length + known]
        return [
            Emitted(*token)
            for token in zip(tokens, self.origins[start:known], ratings, strict=True)
        ]

    def rate_rest(self) -> Step[None]:
        """Rate what the target has not read, with one more forward pass if there is anything."""
        if self.unrated:
            self._rate((yield from self.target.read(self.text.ids[:-1], keep=self.unrated)))

    def rate_prompt(self, rows: Span, start: int) -> None:
        """Rate prompt tokens by rows of which the first has read the prompt up to its token
        `start`."""
        if not self.prompt_ratings:
            self.prompt_ratings.append(None)
        for row, token in enumerate(
            self.text.ids[start + 1 : min(start + 1 + len(rows), self.text.prompt_length)]
        ):
            self.prompt_ratings.append(rows.rating(row, token, self.sampling.logprobs or 0))

    def _rate(self, rows: Span) -> None:
        if self.sampling.logprobs is None:
            return
        for row, token in enumerate(self.text.ids[self.text.prompt_length + len(self.ratings) :]):
            self.ratings.append(rows.rating(row, token, self.sampling.logprobs))

    def forget(self) -> None:
        """Let no later request go on from what the slots hold."""
        for lane in self.lanes.values():
            lane.forget()

    def close(self) -> None:
        """Give all slots back, each of them even if another cannot be."""
        lanes, self.lanes = list(self.lanes.values()), {}
        with ExitStack() as closing:
            for lane in lanes:
                closing.callback(lane.close)
