"""The lossless strategies with settings that tests enumerate."""

from __future__ import annotations

VARIANTS = [
    ("autoregressive", {}),
    ("vanilla_sd", {"num_speculative_tokens": 1}),
    ("vanilla_sd", {"num_speculative_tokens": 3}),
    ("svip", {}),
    ("draft_verify", {"threshold": 0.5}),
    ("adaedl", {"threshold": 0.55, "max_draft": 3}),
    ("specdec_pp", {}),
    ("specdec_pp", {"min_draft": 1, "max_draft": 3}),
    ("hf_dynamic", {}),
    ("hf_dynamic", {"heuristic": True}),
    ("prompt_lookup", {}),
    ("spide", {"tau": 0.4, "max_draft": 3}),
    ("spide", {"tau": 0.4, "max_draft": 3, "parallel": False}),
    ("spide", {"tau": 0.4, "max_draft": 3, "overlap_tau": 0.5}),
    ("spide", {"dynamic": False, "num_speculative_tokens": 2, "max_draft": 3}),
    ("pearl", {"num_speculative_tokens": 1}),
    ("pearl", {"num_speculative_tokens": 2}),
    ("pearl", {}),
    *[("duo_decoding", {"num_speculative_tokens": gamma}) for gamma in (1, 2, 3, 4, 6)],
    ("duo_decoding", {"max_sequences": 1}),
    ("lookahead", {}),
    ("lookahead", {"window": 2, "ngram": 2, "guesses": 3}),
    ("lookahead", {"window": 3, "ngram": 4, "guesses": 2, "pool_from_text": False}),
    ("swift", {"threshold": 0.3}),
    ("swift", {"threshold": 0.0, "max_draft": 2, "interval": 1, "window": 2}),
    ("medusa", {}),
    ("medusa", {"nodes": 2}),
]
