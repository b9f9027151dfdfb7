"""What to do about each cause, and what would tell two causes apart."""

from __future__ import annotations

import json

from draftwell.components.watch.schema import Cause

REMEDIES: dict[Cause, str] = {
    "drift_of_traffic": "calibrate, tune or distil on the prompts that are served now, and let the "
    "gate judge the result",
    "context_length": "draft fewer tokens or none for long prompts: serve them by an engine of "
    "their own, or train the draft on prompts of this length",
    "stale_draft": "restart the engine, which brings acceptance back, and report it to the "
    "engine's developers: a draft should not become worse with uptime",
    "dead_draft": "check which draft is loaded, and that it belongs to the target; until then "
    "switch speculation off",
    "load_crossover": "switch speculation off at high load",
    "build_change": "return to the former version or options, or bench and gate the new one, and "
    "make a new baseline",
    "prefix_cache": "check that the prefix cache is on and large enough, that the system prompt "
    "still begins with the same tokens, and that requests reach the replica that knows them",
    "machine": "look for what else runs there: neighbours, clocks and heat; the draft is as good "
    "as before",
    "metrics_lost": "check the engine, and the address and the key of its metrics; several "
    "replicas behind one address are watched each at its own",
}

TELLING: dict[tuple[Cause, ...], str] = {
    ("drift_of_traffic", "stale_draft"): "the same fixed prompts, before and now: if their "
    "acceptance fell too, the draft is stale; a restart that helps says the same",
    ("context_length", "drift_of_traffic"): "a fixed prompt in two lengths, a short one and one as "
    "long as the prompts now: if the long one is accepted less, it is the context",
    (
        "dead_draft",
        "drift_of_traffic",
    ): "fixed prompts of the former kinds: if they are accepted as before, it is the traffic",
    ("machine", "build_change"): "the engine's options before and after its restart, and the same "
    "engine on another machine",
    ("prefix_cache", "drift_of_traffic"): "a long fixed prompt sent twice: if the second answer "
    "does not begin sooner, it is the cache",
}


def switch_off_above(at_once: int, width: int) -> str:
    """Remedy of a load crossover, with vLLM's option.

    Args:
        at_once: requests up to which speculation is worth its cost; 0: at no load.
        width: tokens of a draft; 0: not known.

    >>> switch_off_above(11, 4).split(": ", 1)[1]
    '{"num_speculative_tokens_per_batch_size": [[1, 11, 4], [12, 100000, 0]]}'
    """
    if at_once < 1:
        return "switch speculation off: plain decoding is faster at every load that was measured"
    schedule = [[1, at_once, width or "K"], [at_once + 1, 100_000, 0]]
    option = json.dumps({"num_speculative_tokens_per_batch_size": schedule})
    return (
        f"switch speculation off above {at_once} requests at once, in vLLM by its speculative "
        f"config: {option}"
    )
