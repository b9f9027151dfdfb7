"""Strategies for `model.generate(..., custom_generate=...)` of transformers, over the caller's own
modules.

`generate` prepares everything as for its own methods (5.17 and newer) and hands a callable the
input ids, processors, stopping criteria and generation config. What changes logits in a way that
the engine does not know is refused, never ignored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from draftwell.serving.errors import DraftwellError, InvalidRequest
from draftwell.serving.runtime.commands import Role
from draftwell.serving.runtime.engine.engine import Engine, Job
from draftwell.serving.runtime.model import Model
from draftwell.serving.runtime.model_files import context_within
from draftwell.serving.runtime.models.transformers_model import ATTENTION, TransformersModel
from draftwell.serving.runtime.models.unbatched_model import UnbatchedModel, row_by_row
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.strategies import Strategy, StrategyResources, build_strategy
from draftwell.serving.runtime.vocabulary import end_token, not_shared, shared_ids

WARPERS = frozenset({"TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper"})
"""Processors that `Sampling` says the same as."""
CRITERIA = frozenset({"MaxLengthCriteria", "EosTokenCriteria"})
EXTRAS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")


def draftwell_generate(
    strategy: str | Strategy = "vanilla_sd",
    *,
    assistant_model: Any = None,
    resources: StrategyResources | None = None,
    streamer: Any = None,
    seed: int | None = None,
    **parameters: Any,
) -> CustomGenerate:
    """What `custom_generate` takes: one of Draftwell's strategies.

    Args:
        strategy: its name with its settings as `parameters`, or a strategy.
        assistant_model: the draft, a transformers module; `generate` would keep its own argument of
            this name to itself. Ids that it has no rows for are never drafted.
        resources: artifacts of strategies that need them.
        streamer: as `generate` takes one, which it would keep to itself as well; for one prompt.
        seed: of sampled requests; None draws one from torch's generator, so that
            `torch.manual_seed` decides.

    >>> draftwell_generate("prompt_lookup", prompt_lookup_num_tokens=5).strategy.name
    'prompt_lookup'
    """
    if isinstance(strategy, str):
        strategy = build_strategy(strategy, parameters, resources)
    elif parameters:
        raise DraftwellError(
            (
                "a strategy that is built already takes no settings "
                f"({', '.join(parameters)}): give its name instead"
            ),
            code="parameters_of_a_built_strategy",
        )
    return CustomGenerate(strategy, assistant_model, streamer, seed)


class CustomGenerate:
    """The callable; keeps nothing between calls but what its strategy has learnt."""

    def __init__(
        self,
        strategy: Strategy,
        assistant_model: Any,
        streamer: Any,
        seed: int | None,
    ):
        self.strategy, self.assistant_model, self.streamer = strategy, assistant_model, streamer
        self.seed = seed

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: Any = None,
        stopping_criteria: Any = None,
        generation_config: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        """Decode `input_ids` `[batch, length]`.

        Returns:
            `[batch, longest]` ids with the prompts before them, or a `GenerateDecoderOnlyOutput`
            with `return_dict_in_generate`.
        Raises:
            DraftwellError: something is asked for that the engine cannot do; the line names it.
        """
        config = generation_config
        refuse(config, logits_processor or (), stopping_criteria or (), model_kwargs)
        prompts = unpadded(input_ids, model_kwargs.get("attention_mask"))
        if self.streamer is not None and len(prompts) > 1:
            raise InvalidRequest(
                f"a streamer takes one prompt, not {len(prompts)}: leave it out, or ask one by one",
                code="streamer_of_many",
            )
        requests = [
            self.sampling(config, config.max_length - input_ids.shape[1], row)
            for row in range(len(prompts))
        ]
        context = max(
            len(prompt) + request.max_tokens
            for prompt, request in zip(prompts, requests, strict=True)
        )
        with self.models(model, len(prompts), context) as models:
            outputs = self.decode(models, prompts, requests, input_ids)
        sequences: Any = padded(input_ids, outputs, pad_token(config))
        if not config.return_dict_in_generate:
            return sequences
        from transformers.generation.utils import GenerateDecoderOnlyOutput

        return GenerateDecoderOnlyOutput(sequences=sequences)

    def sampling(self, config: Any, max_tokens: int, row: int) -> Sampling:
        """A row's sampling parameters, those of its generation config."""
        stops = config.eos_token_id
        ids = (
            []
            if stops is None
            else [stops]
            if isinstance(stops, int)
            else [int(stop) for stop in stops]
        )
        common: dict[str, Any] = {"max_tokens": max_tokens, "stop_token_ids": frozenset(ids)}
        if not config.do_sample:
            return Sampling(**common)
        drawn = int(torch.randint(2**62, (1,))) if self.seed is None else self.seed + row
        return Sampling(
            **common,
            seed=drawn,
            temperature=1.0 if config.temperature is None else float(config.temperature),
            top_k=config.top_k or 0,
            top_p=1.0 if config.top_p is None else float(config.top_p),
        )

    @contextmanager
    def models(self, target: Any, slots: int, context: int) -> Iterator[dict[Role, Model]]:
        """The modules wrapped in the slot interface; afterwards they are as they were."""
        modules: dict[Role, Any] = {"target": target}
        if "draft" in self.strategy.roles:
            if self.assistant_model is None:
                raise DraftwellError(
                    f"strategy {self.strategy.name} needs a draft: give assistant_model to "
                    "draftwell_generate(…), which "
                    "generate(…) keeps to itself",
                    code="model_missing",
                )
            modules["draft"] = self.assistant_model
        before = {
            role: (module.config._attn_implementation, module.training)
            for role, module in modules.items()
        }
        try:
            contexts = {
                role: context if role == "target" else context_within(module.config, context)
                for role, module in modules.items()
            }
            rows = target.config.get_text_config().vocab_size
            yield {
                role: over_slots(module, rows, slots=slots, max_context=contexts[role])
                for role, module in modules.items()
            }
        finally:
            for role, (attention, training) in before.items():
                if modules[role].config._attn_implementation == ATTENTION != attention:
                    modules[role].set_attn_implementation(attention)
                modules[role].train(training)

    def decode(
        self,
        models: Mapping[Role, Model],
        prompts: Sequence[Sequence[int]],
        requests: Sequence[Sampling],
        input_ids: Tensor,
    ) -> list[list[int]]:
        """Outputs of all rows, decoded together."""
        engine = Engine(models)
        jobs: list[Job] = []
        try:
            for prompt, request in zip(prompts, requests, strict=True):
                jobs.append(engine.submit(prompt, request, self.strategy))
            if self.streamer is not None:
                self.streamer.put(input_ids.cpu())
            while not all(job.finished for job in jobs):
                engine.step()
                if self.streamer is not None:
                    for emitted in jobs[0].new_tokens():
                        self.streamer.put(torch.tensor([emitted.id]))
            if self.streamer is not None:
                self.streamer.end()
        finally:
            for job in jobs:
                engine.cancel(job)
            engine.close()
        for job in jobs:
            if job.error:
                raise job.error
        return [job.output for job in jobs]


def over_slots(module: Any, rows: int, **settings: Any) -> Model:
    """A module that computes with its own weights, beside a target of `rows` ids: no copy is made,
    and what the caller changes counts."""
    config = module.config.get_text_config()
    by_row = row_by_row(config, settings.get("max_context"))
    kind = UnbatchedModel if by_row else TransformersModel
    lacking = not_shared({}, rows, {}, config.vocab_size)
    model = kind(module, vocab_size=rows, head_tokens=shared_ids(lacking, rows), **settings)
    model.stand_ins = dict.fromkeys(lacking, end_token(module))
    return model


def refuse(
    config: Any, processors: Sequence[Any], criteria: Sequence[Any], model_kwargs: Mapping[str, Any]
) -> None:
    """Refuse what would be ignored otherwise."""
    names = [
        type(p).__name__
        for p in processors
        if not (config.do_sample and type(p).__name__ in WARPERS)
    ]
    names += [type(c).__name__ for c in criteria if type(c).__name__ not in CRITERIA]
    names += [name for name in EXTRAS if getattr(config, name, None)]
    names += [
        name for name in ("inputs_embeds", "encoder_outputs") if model_kwargs.get(name) is not None
    ]
    if (config.num_beams or 1) > 1:
        names.append("num_beams")
    cache = model_kwargs.get("past_key_values")
    if cache is not None and cache.get_seq_length() > 0:
        names.append("a filled past_key_values")
    if names:
        raise DraftwellError(
            (
                f"Draftwell's strategies do not know {', '.join(names)}: leave that out, or "
                "leave custom_generate out"
            ),
            code="unsupported_option",
        )


def unpadded(input_ids: Tensor, mask: Tensor | None) -> list[list[int]]:
    """Each row's tokens without padding."""
    rows: list[list[int]] = input_ids.tolist()
    if mask is None:
        return rows
    return [
        [token for token, kept in zip(row, keep, strict=True) if kept]
        for row, keep in zip(rows, mask.tolist(), strict=True)
    ]


def padded(input_ids: Tensor, outputs: Sequence[Sequence[int]], pad: int | None) -> Tensor:
    """`[batch, longest]`: prompts as they came, outputs after them, the shorter ones filled up with
    `pad`."""
    longest = max(map(len, outputs))
    tail = [[*output, *[0 if pad is None else pad] * (longest - len(output))] for output in outputs]
    return torch.cat(
        [input_ids, torch.tensor(tail, dtype=input_ids.dtype, device=input_ids.device)], dim=1
    )


def pad_token(config: Any) -> int | None:
    """The id that fills up, as `generate` has prepared it: where none is set it is the first
    end-of-text id."""
    prepared = getattr(config, "_pad_token_tensor", None)
    return config.pad_token_id if prepared is None else int(prepared)
