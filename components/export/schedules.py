"""Draft lengths by load in the formats of engines: SGLang's `--speculative-adaptive-config` and
TensorRT-LLM's `draft_len_schedule`. vLLM's `num_speculative_tokens_per_batch_size` is part of its
speculative config.

Read from: `python/sglang/srt/speculative/adaptive_spec_params.py`
(015c872628e328b530880bcf95ae91222604b225), TensorRT-LLM's pull request 10860 and
`tensorrt_llm/llmapi/llm_args.py` after it, as in TensorRT-LLM 1.3.0rc8 and later: a key is the
highest load at which its length holds. Up to 1.3.0rc7 (pull request 8194) it is the lowest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def sglang_adaptive(levels: Sequence[tuple[int, Sequence[int]]]) -> dict[str, Any]:
    """SGLang's adaptive JSON: it moves among the given lengths by what is accepted, and takes those
    of the closest load.

    Args:
        levels: (requests at once, lengths that the measurement leaves open), ascending.

    >>> sglang_adaptive([(1, (3, 5)), (16, (0,))])
    {'strategy': 'ema', '1': {'candidate_steps': [3, 5]}, '16': {'candidate_steps': [0]}}
    """
    return {
        "strategy": "ema",
        **{str(at_once): {"candidate_steps": sorted(lengths)} for at_once, lengths in levels},
    }


def tensorrt_llm_schedule(levels: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """`draft_len_schedule` of TensorRT-LLM 1.3.0rc8 and later, with its `max_draft_len`: each
    length holds up to that load, none beyond the last.

    It requires the length of the lowest load to be the longest: others are cut to it.

    Args:
        levels: (requests at once, length), ascending from 1 request.
    Returns:
        empty where the lowest load speculates not at all.

    >>> tensorrt_llm_schedule([(1, 4), (4, 2), (16, 0)])
    {'max_draft_len': 4, 'draft_len_schedule': {'1': 4, '4': 2, '16': 0}}
    """
    longest = levels[0][1]
    if longest == 0:
        return {}
    return {
        "max_draft_len": longest,
        "draft_len_schedule": {str(at_once): min(k, longest) for at_once, k in levels},
    }
