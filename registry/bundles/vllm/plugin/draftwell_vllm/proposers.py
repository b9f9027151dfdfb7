"""Custom proposers for vLLM (`method: custom_class`): a cascade of n-grams and, where one is named,
a draft model, one class a stop rule.

vLLM's interface says neither which request a row is nor what became of its draft. So a proposer
remembers what it drafted for a row and finds both in the row's text the next time: whether it is
the text that it drafted for, and how much of the draft stands in it. Drafts are proposed without
probabilities, which vLLM's rejection sampler takes for certain ones: outputs are the target's own,
greedy or sampled.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .ngrams import guess
from .settings import ProposerSettings, read_settings
from .stopping import HFDynamicRule, SpideRule, StopRule, SvipRule

log = logging.getLogger("vllm.draftwell")

TAIL = 8
"""Last tokens of a text by which a row is known again."""


class Drafted(NamedTuple):
    """What was proposed for a row."""

    length: int
    tail: tuple[int, ...]
    tokens: list[int]
    confidences: list[float]
    rule: StopRule


class Fixed:
    """Drafts `num_speculative_tokens` tokens as long as the text's n-grams say something; further
    classes stop earlier.

    Args:
        vllm_config: vLLM's; its speculative config has the longest draft, for each number of
            requests where it names lengths by batch size (vLLM leaves a class to heed them), its
            additional config the rest (`settings`).
    Raises:
        ValueError: settings that are wrong, or a draft or table that cannot be read.
    """

    def __init__(self, vllm_config: Any):
        speculative = vllm_config.speculative_config
        self.k = int(speculative.num_speculative_tokens)
        by_size = getattr(speculative, "num_speculative_tokens_per_batch_size", None) or ()
        self.lengths = sorted((int(first), min(int(k), self.k)) for first, _, k in by_size)
        self.max_model_len = int(vllm_config.model_config.max_model_len)
        self.settings = read_settings(getattr(vllm_config, "additional_config", None))
        self.rule = self.make_rule(self.settings, None)
        self.draft_rule = self.make_rule(self.settings, self.settings.table)
        self._model: Any = None  # vLLM takes an attribute `model` for layers of its own
        self._config = vllm_config
        self._drafted: dict[int, Drafted] = {}
        self._complained = False

    def make_rule(self, settings: ProposerSettings, table: str | None) -> StopRule:
        """The stop rule of one drafter.

        Args:
            table: file of an acceptance table to begin with.
        """
        return StopRule()

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """vLLM calls this once, with the target: load the draft model, where one is named."""
        if self.settings.draft is not None:
            from .draft_model import DraftModel

            config = self._config
            self._model = DraftModel(
                self.settings.draft,
                config.model_config.dtype,
                config.device_config.device,
                config.scheduler_config.max_num_seqs,
                vocabulary(config.model_config),
            )

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: Any,
        token_ids_cpu: Any,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """A draft for every row.

        Args:
            sampled_token_ids: of each row the tokens of this step; empty where the prompt is not
                read yet.
            num_tokens_no_spec: [rows] tokens of each row, those of this step included.
            token_ids_cpu: [rows, context] token ids.
            slot_mappings: not used.
        Returns:
            of each row at most `num_speculative_tokens` ids; empty where nothing is drafted, as
            where that failed: what is raised here would end vLLM.
        """
        before, self._drafted = self._drafted, {}
        longest = self.longest(len(sampled_token_ids))
        found: list[list[int]] = []
        for row, sampled in enumerate(sampled_token_ids):
            try:
                ids = token_ids_cpu[row, : int(num_tokens_no_spec[row])]
                found.append(
                    self._propose_row(row, ids, longest if sampled else 0, before.get(row))
                )
            except Exception:
                found.append([])
                if not self._complained:
                    self._complained = True
                    log.exception("a row gets no draft; this is said once")
        if self._model is not None:
            self._model.keep(len(found))
        return found

    def longest(self, rows: int) -> int:
        """The longest draft where so many requests are decoded at once. As in vLLM
        (`dynamic/utils.py`), numbers that no range names have the length of the range before
        them."""
        fitting = [k for first, k in self.lengths if first <= rows]
        return fitting[-1] if fitting else self.lengths[0][1] if self.lengths else self.k

    def _propose_row(self, row: int, ids: Any, longest: int, before: Drafted | None) -> list[int]:
        if before is not None:
            learn(before, ids)
        room = min(longest, self.max_model_len - len(ids))
        if room <= 0:
            return []
        drafted = self.draft(row, ids, room)
        if drafted.tokens:
            self._drafted[row] = drafted
        return drafted.tokens

    def draft(self, row: int, ids: Any, room: int) -> Drafted:
        """A draft of at most `room` tokens behind a row's text: of its n-grams, else of the draft
        model."""
        tokens, confidences = self._from_ngrams(ids[-self.settings.window :], room)
        rule = self.rule
        if not tokens and self._model is not None:
            rule = self.draft_rule
            tokens, confidences = self._model.draft(row, ids.tolist(), room, rule)
        return Drafted(len(ids), tail_of(ids), tokens, confidences, rule)

    def _from_ngrams(self, ids: Any, room: int) -> tuple[list[int], list[float]]:
        text = np.empty(len(ids) + room, dtype=np.int64)
        text[: len(ids)] = ids
        tokens: list[int] = []
        confidences: list[float] = []
        self.rule.start()
        for length in range(len(ids), len(ids) + room):
            found = guess(text[:length], self.settings.longest_ngram, self.settings.shortest_ngram)
            if found is None or not self.rule.continues(found.confidence, found.entropy):
                break
            text[length] = found.token
            tokens.append(found.token)
            confidences.append(found.confidence)
        return tokens, confidences


class HFDynamic(Fixed):
    """Stops at an unlikely token."""

    def make_rule(self, settings: ProposerSettings, table: str | None) -> StopRule:
        return HFDynamicRule() if settings.threshold is None else HFDynamicRule(settings.threshold)


class Svip(Fixed):
    """Stops at a token from a distribution of high entropy."""

    def make_rule(self, settings: ProposerSettings, table: str | None) -> StopRule:
        rule = SvipRule(entropy_scale=settings.entropy_scale)
        return (
            rule
            if settings.threshold is None
            else SvipRule(settings.threshold, settings.entropy_scale)
        )


class Spide(Fixed):
    """Stops where the estimated chance that the whole draft is kept falls to tau; the estimates
    learn from what the target keeps."""

    def make_rule(self, settings: ProposerSettings, table: str | None) -> StopRule:
        rule = SpideRule() if settings.tau is None else SpideRule(settings.tau)
        if table is None:
            return rule
        try:
            return SpideRule.of_table(json.loads(Path(table).read_text()), rule.tau)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{table} is no acceptance table ({type(error).__name__}): name its table.json"
            ) from error


def vocabulary(model_config: Any) -> int | None:
    """Size of the target's vocabulary; None where vLLM does not say."""
    size = getattr(model_config, "get_vocab_size", None)
    return (int(size()) or None) if callable(size) else None


def tail_of(ids: Any) -> tuple[int, ...]:
    """The last tokens of a text."""
    return tuple(int(token) for token in ids[-TAIL:])


def learn(drafted: Drafted, ids: Any) -> None:
    """Tell the rule what the target kept of a draft, where the row's text is still the one that it
    was made for and has grown."""
    if len(ids) <= drafted.length or tail_of(ids[: drafted.length]) != drafted.tail:
        return
    after = ids[drafted.length : drafted.length + len(drafted.tokens)].tolist()
    for token, now, confidence in zip(drafted.tokens, after, drafted.confidences, strict=False):
        drafted.rule.learn(confidence, token == now)
        if token != now:
            return
