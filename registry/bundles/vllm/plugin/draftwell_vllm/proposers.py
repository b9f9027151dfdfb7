"""Custom proposers for vLLM's first model runner (`method: custom_class`), one class a stop rule:
the adapter between its interface and `drafting`.

vLLM's interface says neither which request a row is nor what became of its draft. Drafts are
proposed without probabilities, which vLLM's rejection sampler takes for certain ones: outputs are
the target's own, greedy or sampled.

vLLM's second model runner has no place for a class: it makes its drafts on the GPU, all of one
length, while the step before is still computed (`vllm/v1/worker/gpu/spec_decode/__init__.py`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .drafting import Drafter
from .settings import ProposerSettings, read_settings
from .stopping import HFDynamicRule, SpideRule, StopRule, SvipRule


class Fixed(Drafter):
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
        by_size = getattr(speculative, "num_speculative_tokens_per_batch_size", None) or ()
        settings = read_settings(getattr(vllm_config, "additional_config", None))
        super().__init__(
            int(speculative.num_speculative_tokens),
            [(int(first), int(k)) for first, _, k in by_size],
            int(vllm_config.model_config.max_model_len),
            self.make_rule(settings, None),
            self.make_rule(settings, settings.table),
        )
        self.settings, self._config = settings, vllm_config

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
            of each row at most `num_speculative_tokens` ids.
        """
        rows = range(len(sampled_token_ids))
        texts = [token_ids_cpu[row, : int(num_tokens_no_spec[row])] for row in rows]
        return self.draft_rows(texts, [bool(sampled) for sampled in sampled_token_ids])


class HFDynamic(Fixed):
    """Stops at an unlikely token."""

    def make_rule(self, settings: ProposerSettings, table: str | None) -> StopRule:
        return HFDynamicRule() if settings.threshold is None else HFDynamicRule(settings.threshold)


class Svip(Fixed):
    """Stops at a token from a distribution of high entropy."""

    def make_rule(self, settings: ProposerSettings, table: str | None) -> StopRule:
        return SvipRule() if settings.threshold is None else SvipRule(settings.threshold)


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
