"""One request in flight: its text, its counters, its random streams, and its lane on each model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from serving.runtime.failures import check_request
from serving.runtime.sampling import Streams
from serving.runtime.stats import Stats
from serving.runtime.types import Draft, Forward, Model, Output, Role, Rows, Sampling, Step, Text, Verdict


class Lane:
    """A model as one request sees it: a slot that holds the first `length` tokens of text and draft."""

    def __init__(self, role: Role, model: Model, slot: int, sampling: Sampling, stats: Stats, prompt_length: int = 0):
        self.role, self.model, self.slot, self.sampling, self.stats = role, model, slot, sampling, stats
        self.prompt_length = prompt_length
        self.length = 0
        self.branches: list[Lane] = []
        self.shared = 0  # of a branch: leading tokens that it has in common with the lane it leaves

    @property
    def chains(self) -> bool:
        """Whether `read` takes `steps`: the model can choose tokens by itself, and they are the ones that this request would."""
        asked = self.sampling
        altered = asked.penalises or asked.biases or asked.banned_token_ids
        return asked.greedy and not altered and getattr(self.model, "chains", False)

    def read(self, sequence: Sequence[int], keep: int = 1, steps: int = 1) -> Step[Rows]:
        """Feed what the slot has not seen of `sequence` (text, then draft) and return the rows of its last `keep` tokens.

        Args:
            steps: go on greedily until there are so many rows; the slot has then seen the token of every row but the last.
        """
        self.rollback(len(sequence) - keep)  # a row that is wanted again is computed again
        unseen = tuple(sequence[self.length :])
        prefill = self.length == 0
        if self.role == "target":
            self.stats.target_tokens += len(unseen)
            self.stats.prefill_calls += prefill
            self.stats.target_calls += not prefill
        elif self.role == "qualifier":
            self.stats.qualifier_calls += 1
        else:
            self.stats.draft_calls += steps
        output: Output = yield Forward(self.role, self.slot, unseen, keep, prefill, steps)
        self.length = len(sequence) + steps - 1
        written = sequence[self.prompt_length :] if self.sampling.penalises else ()
        return output.rows(self.sampling, written)

    def rollback(self, length: int) -> None:
        """Forget everything behind the first `length` tokens, if there is more."""
        for branch in self.branches:
            branch.shared = min(branch.shared, length)
        if length < self.length:
            self.model.rollback(self.slot, length)
            self.length = length


    def branch(self, number: int, length: int) -> Lane:
        """A lane beside this one that holds its first `length` tokens, for a further sequence; numbered from 0, opened when first
        asked for, closed with the session."""
        while len(self.branches) <= number:
            self.branches.append(Lane(self.role, self.model, self.model.open_branch(), self.sampling, self.stats, self.prompt_length))
        branch = self.branches[number]
        self.model.fork(self.slot, branch.slot, length, min(branch.shared, length))
        branch.length = branch.shared = length
        return branch

    def adopt(self, branch: Lane) -> None:
        """Hold what a branch holds: the text goes on with its tokens."""
        self.rollback(min(branch.shared, self.length))
        self.model.fork(branch.slot, self.slot, branch.length, self.length)
        self.length = branch.shared = branch.length

    def close(self) -> None:
        """Give back the slot and those of all branches."""
        for lane in [self, *self.branches]:
            lane.model.close(lane.slot)


@dataclass
class DraftSequence:
    """One of several drafts of a round.

    Args:
        draft: at least one token, deterministic (no rows).
        lane: the lane of the draft model that has read the draft's tokens, the last perhaps not.
    """

    draft: Draft
    lane: Lane


class Session:
    """What a strategy works with.

    Args:
        prompt: token ids, at least one.
        models: the pair's models by role; a slot is opened on each.
    Raises:
        InvalidRequest: an empty prompt, or a token outside the vocabulary.
        VocabularyMismatch: the models' vocabularies differ.
    """

    def __init__(self, prompt: Sequence[int], sampling: Sampling, models: Mapping[Role, Model]):
        self.text = Text(prompt, sampling)
        check_request(prompt, sampling, models)
        self.sampling = sampling
        self.rng = Streams(sampling.seed)
        self.stats = Stats()
        self.lanes: dict[Role, Lane] = {}
        try:
            for role, model in models.items():
                self.lanes[role] = Lane(role, model, model.open(), sampling, self.stats, len(prompt))
        except BaseException:
            self.close()
            raise

    @property
    def target(self) -> Lane:
        return self.lanes["target"]

    @property
    def draft(self) -> Lane:
        return self.lanes["draft"]

    @property
    def qualifier(self) -> Lane:
        return self.lanes["qualifier"]

    def prefill(self) -> Step[None]:
        """Read the prompt and sample the first token from the target, which gives the shortest time to first token."""
        rows = yield from self.target.read(self.text.ids)
        self.append_sampled(rows)

    def append_sampled(self, rows: Rows) -> None:
        """Append one token sampled from the target."""
        self.stats.sampled += self.text.append([rows.sample(0, self.rng.sample)])

    def verify(self, draft: Draft) -> Step[Rows]:
        """Target rows for every draft token and for the bonus token behind them: `len(draft) + 1` rows."""
        self.stats.target_calls += self.target.length == 0  # a prompt's forward that also verifies is a call
        return (yield from self.target.read(self.text.ids + draft.tokens, keep=len(draft) + 1))

    def commit(self, draft: Draft, verdict: Verdict) -> None:
        """Make a verdict's tokens final and roll every lane back behind a rejection."""
        kept = len(self.text.ids) + verdict.accepted
        tokens = draft.tokens[: verdict.accepted]
        self.text.append(tokens if verdict.token is None else [*tokens, verdict.token])
        self.stats.count(draft, verdict)
        if verdict.rejected:
            for lane in self.lanes.values():
                lane.rollback(kept)

    def close(self) -> None:
        """Give all slots back."""
        for lane in self.lanes.values():
            lane.close()
        self.lanes = {}
