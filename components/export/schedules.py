"""Draft lengths by load in the formats of engines: vLLM's `num_speculative_tokens_per_batch_size`,
SGLang's `--speculative-adaptive-config` and TensorRT-LLM's `draft_len_schedule`, written and read.

Read from: vLLM 0.32.0, `vllm/v1/spec_decode/dynamic/utils.py`; SGLang,
`python/sglang/srt/speculative/adaptive_spec_params.py` (015c872628e328b530880bcf95ae91222604b225)
and `adaptive_step_router.py` (a12239f6ac74d804d169ee5d3cfed3c49fa7162c): a key is the lowest load
at which its lengths hold; TensorRT-LLM's pull request 10860 and `tensorrt_llm/llmapi/llm_args.py`
after it, as in 1.3.0rc8 and later: a key is the highest load at which its length holds. Up to
1.3.0rc7 (pull request 8194) it is the lowest.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from draftwell.serving.errors import DraftwellError
from draftwell.serving.files import read_text

VLLM, SGLANG, TENSORRT_LLM = (
    "num_speculative_tokens_per_batch_size",
    "candidate_steps",
    "draft_len_schedule",
)
"""Keys by which a file is known."""
METHODS = {
    "eagle3": "eagle3",
    "eagle": "eagle3",
    "draft_model": "draft_model",
    "drafttarget": "draft_model",
    "standalone": "draft_model",
    "ngram": "ngram",
}
"""Names of methods in the files, in lower case, as vLLM calls them."""
Table = dict[int, tuple[int, ...]]
ENDLESS = 1 << 31
"""Requests at once, of what holds at every higher load."""


class LengthsByLoad(NamedTuple):
    """What a schedule says.

    Args:
        engine: whose format it is.
        method: as vLLM calls it; None where the file does not say.
        table: highest load → lengths that may be drafted up to there, ascending; 0: none. The last
            holds beyond, too.
    """

    engine: str
    method: str | None
    table: Table

    def at(self, load: int) -> tuple[int, ...]:
        """The lengths at so many requests at once."""
        reaching = [lengths for highest, lengths in self.table.items() if highest >= load]
        return reaching[0] if reaching else self.table[max(self.table)]

    @property
    def lengths(self) -> tuple[int, ...]:
        """All lengths above 0, ascending."""
        return tuple(sorted({k for lengths in self.table.values() for k in lengths} - {0}))


def sglang_adaptive(levels: Sequence[tuple[int, Sequence[int]]]) -> dict[str, Any]:
    """SGLang's adaptive JSON: it moves among the given lengths by what is accepted. A key is the
    lowest load of its lengths; between two measured loads those of the higher one hold, as in
    vLLM's schedule.

    Args:
        levels: (requests at once, lengths that the measurement leaves open), ascending.

    >>> sglang_adaptive([(1, (3, 5)), (16, (0,))])
    {'strategy': 'ema', '1': {'candidate_steps': [3, 5]}, '2': {'candidate_steps': [0]}}
    """
    lowest = [1, *(at_once + 1 for at_once, _ in levels)]
    return {
        "strategy": "ema",
        **{
            str(load): {SGLANG: sorted(lengths)}
            for load, (_, lengths) in zip(lowest, levels, strict=False)
        },
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
        TENSORRT_LLM: {str(at_once): min(k, longest) for at_once, k in levels},
    }


def read_schedule(file: Path) -> LengthsByLoad:
    """The draft lengths by load in a file of one of the three engines, JSON or YAML; vLLM's and
    TensorRT-LLM's also within the `speculative_config` of their other options.

    Raises:
        DraftwellError: it cannot be read, or is none of these (`bad_schedule`); one line.
    """
    try:
        text = read_text(file)
        found = yaml.safe_load(text) if file.suffix in (".yaml", ".yml") else json.loads(text)
    except OSError as error:
        raise bad_schedule(file, f"it cannot be read, {error.strerror}") from error
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        raise bad_schedule(file, "it is neither JSON nor (.yaml) YAML") from error
    if isinstance(found, Mapping):
        found = found.get("speculative_config") or found.get("speculative-config") or found
    try:
        if isinstance(found, Sequence) and not isinstance(found, str):
            return of_vllm({VLLM: found})
        if not isinstance(found, Mapping):
            raise ValueError(f"it names none of {VLLM}, {SGLANG} and {TENSORRT_LLM}")
        if VLLM in found:
            return of_vllm(found)
        if TENSORRT_LLM in found:
            return of_tensorrt_llm(found)
        return of_sglang(found)
    except (TypeError, ValueError, AttributeError) as error:
        raise bad_schedule(file, str(error)) from error


def of_vllm(config: Mapping[str, Any]) -> LengthsByLoad:
    """Of vLLM's speculative config: in a gap the length before it holds, and none exceeds
    `num_speculative_tokens`."""
    if not all(isinstance(part, Sequence) and len(part) == 3 for part in config[VLLM]):
        raise ValueError("a range is no list of first load, last load and length")
    parts = sorted(
        (whole(first, 1), whole(last, 1), whole(k, 0)) for first, last, k in config[VLLM]
    )
    if not parts or parts[0][0] != 1:
        raise ValueError("its first range does not begin at 1")
    for (first, last, _), (following, *_) in pairwise([*parts, (ENDLESS, 0, 0)]):
        if not first <= last < following:
            raise ValueError("its ranges overlap or run backwards")
    ends = [first - 1 for first, *_ in parts[1:]] + [parts[-1][1]]
    longest = whole(config.get("num_speculative_tokens") or ENDLESS, 1)
    table: Table = {end: (min(k, longest),) for end, (*_, k) in zip(ends, parts, strict=True)}
    return LengthsByLoad("vLLM", method_of(config.get("method")), table)


def of_tensorrt_llm(config: Mapping[str, Any]) -> LengthsByLoad:
    """Of TensorRT-LLM's speculative config: nothing is drafted beyond the last load."""
    longest = whole(config.get("max_draft_len") or ENDLESS, 1)
    given = {
        whole(load, 1): (min(whole(k, 0), longest),) for load, k in config[TENSORRT_LLM].items()
    }
    if not given:
        raise ValueError(f"its {TENSORRT_LLM} is empty")
    table: Table = {**dict(sorted(given.items())), ENDLESS: (0,)}
    return LengthsByLoad("TensorRT-LLM", method_of(config.get("decoding_type")), table)


def of_sglang(config: Mapping[str, Any]) -> LengthsByLoad:
    """Of SGLang's adaptive config, which only EAGLE heads have."""
    if config.get("strategy", "ema") != "ema":
        raise ValueError(f"its strategy {config['strategy']!r} names no lengths by load")
    given = {
        int(load): tuple(sorted({whole(k, 0) for k in entry[SGLANG]}))
        for load, entry in config.items()
        if isinstance(load, str) and load.isdigit() and SGLANG in entry
    }
    if not given or not all(given.values()):
        raise ValueError(f"it names none of {VLLM}, {SGLANG} by load and {TENSORRT_LLM}")
    loads = sorted(given)
    ends = [load - 1 for load in loads[1:]] + [ENDLESS]
    return LengthsByLoad(
        "SGLang",
        "eagle3",
        {end: given[load] for load, end in zip(loads, ends, strict=True)},
    )


def whole(value: Any, least: int) -> int:
    """A whole number, also as text; nothing that a format would read otherwise."""
    text = "" if isinstance(value, bool) else str(value)
    if not re.fullmatch(r"[0-9]{1,12}", text) or int(text) < least:
        raise ValueError(f"{value!r} is no whole number from {least} on")
    return int(text)


def method_of(said: Any) -> str | None:
    """vLLM's name of a method; None where none is named.

    Raises:
        ValueError: one that is not tuned here.
    """
    if said is None:
        return None
    if str(said).lower() not in METHODS:
        raise ValueError(f"its method {said} is not tuned here: {', '.join(METHODS.values())} are")
    return METHODS[str(said).lower()]


def bad_schedule(file: Path, what: str) -> DraftwellError:
    """What is wrong with a file, in one line."""
    told = " ".join(what.split())
    return DraftwellError(
        f"{file} is no schedule of draft lengths: {told}: name a file of vLLM, SGLang or "
        "TensorRT-LLM",
        code="bad_schedule",
    )
