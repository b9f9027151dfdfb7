"""DuoDecoding: draft and target on hardware of their own. Parts of Tables 1 to 4, and the time to
the first token."""

from __future__ import annotations

from collections.abc import Mapping

from draftwell.components.papers.cells import PLAIN, PLAIN_SHARE, Scale, sized
from draftwell.components.papers.tables import (
    EQUAL_PLAIN,
    Headline,
    Metric,
    Paper,
    PaperTable,
    Row,
    drafts_early,
)

TABLE_1 = {
    "code": {"SpS": 1.50, "PLD": 1.24, "Lookahead": 1.32, "DuoDec": 1.60},
    "maths": {"SpS": 1.42, "PLD": 1.48, "Lookahead": 1.49, "DuoDec": 1.54},
}
"""Vicuna 7B & 68M: speed over plain decoding."""
TABLE_2 = {1: 89.06 / 89.52, 2: 84.15 / 89.52, 3: 80.54 / 89.52}
"""Code, Llama-2 7B: static number of sequences → speed over the dynamic number."""
TABLE_3 = {-2: 87.47 / 89.06, -1: 89.00 / 89.06, 1: 88.00 / 89.06, 2: 87.11 / 89.06}
"""Code, Llama-2 7B, one sequence: tokens more than the measured budget γ → speed over γ's."""
GAMMA = 24
"""The paper's budget (section 4.4.1)."""
TABLE_4: dict[Metric, float] = {
    "one_kept": 0.348,
    "one_lost": 0.230,
    "several_kept": 0.087,
    "several_lost": 0.335,
}
"""Share of rounds; its "actual = 1" is that the draft's first choice is accepted. It names neither
data nor model."""
FIRST_TOKEN = (
    "Rows of the time to the first token get no verdict: SpS samples it from the target's "
    "reading of the prompt alone, and "
    "DuoDec drafts a single token beside that reading. In the paper both draft before the "
    'first token, as our row "SpS, '
    'drafting first" does.'
)
TTFT = {"DuoDec": 0.83}
"""Section 4.3: over SpS's."""
TTFT_OVER_PLAIN = {"SpS, drafting first": 1.6, "DuoDec": 1.35}
TTFT_WORDS = {"SpS, drafting first": "1.5 to 1.7", "DuoDec": "1.3 to 1.4"}
"""Section 4.3: the middle of 1.5 to 1.7, and of 1.3 to 1.4."""
FIRST = "SpS, drafting first"
LONGEST_DRAFT = 5
"""Of SpS: no longer draft is the best one where half of the tokens are accepted."""
WHY = (
    "The paper's setting, a draft on the CPU next to a target on a GPU, is not measured "
    "here: both models compute on disjoint cores of "
    "one processor and share its memory, so the overlap saves less than on two devices. "
    "SpS runs on the same cores. "
    "DuoDec's rounds are shorter than SpS's (Figure 4, with HumanEval) and there are more "
    'of them (target calls, under "Every '
    'contender"): a round brings no bonus token, and drafts no more than the target '
    "verifies in about one pass."
)
EQUAL_CORES = ("SpS", "DuoDec")
"""Each model on its own share of the cores; PLD and Lookahead draft without a model and have
all."""
ALL_CORES = "SpS, all cores"
NAMES = {"code": "HumanEval", "maths": "GSM8K"}


CHOICES = {
    "one_kept": "one sequence, its first token kept",
    "one_lost": "one sequence, its first token lost",
    "several_kept": "several, the likeliest one's first token kept",
    "several_lost": "several, the likeliest one's first token lost",
}
UNEQUAL_FIRST = (
    'Rows "time to the first token over plain\'s" get no verdict: plain decoding reads the '
    "prompt with all cores, the "
    "others' target with one."
)


OTHER_LIMIT = (
    "Rows of static sequences, and of one sequence with tokens more or less, get no "
    "verdict: the paper takes a pass over γ "
    "tokens to last as long as one over a single token. Here a pass over 24 tokens takes a "
    "multiple of that, so shorter "
    "sequences win, and what bounds a measured length is how many tokens the target "
    "verifies in about one pass; the draft "
    "is far from busy."
)
ROUNDS = (
    "Figure 4 (no values in the text): a round of SD takes much longer than a token of "
    "plain decoding, a substantial part of it the "
    "draft model's, and handles 5 tokens; one of DuoDec takes about as long as a token, "
    "and handles 24."
)
DYNAMIC, ONE = f"DuoDec, γ {GAMMA}", "one sequence"


def always(count: int) -> str:
    """Role of a static number of sequences."""
    return f"always {count} sequence{'s' if count > 1 else ''}, γ {GAMMA}"


def longer(more: int) -> str:
    """Role of one sequence of so many tokens more than measured.

    >>> longer(-2), longer(1)
    ('one sequence, 2 tokens shorter', 'one sequence, 1 token longer')
    """
    return (
        f"{ONE}, {abs(more)} token{'s' if abs(more) > 1 else ''} "
        f"{'longer' if more > 0 else 'shorter'}"
    )


def contenders_on(scale: Scale, data: str) -> dict[str, tuple[str, ...]]:
    """Who decodes a data set; HumanEval also by the settings of Tables 2 and 3."""
    contenders = {
        "SpS": tuple(
            f"vanilla_sd@1+1:num_speculative_tokens={gamma}"
            for gamma in scale.gammas
            if gamma <= LONGEST_DRAFT
        ),
        FIRST: (f"vanilla_sd@1+1:draft_first=true:num_speculative_tokens={LONGEST_DRAFT}",),
        ALL_CORES: tuple(
            f"vanilla_sd:num_speculative_tokens={gamma}"
            for gamma in scale.gammas_all
            if gamma <= LONGEST_DRAFT
        ),
        "PLD": ("prompt_lookup",),
        "Lookahead": ("lookahead",),
        "DuoDec": ("duo_decoding",),
    }
    if data == "code":
        set_gamma = f"duo_decoding:num_speculative_tokens={GAMMA}"
        one = "duo_decoding:max_sequences=1:static_sequences=true"
        contenders |= {
            DYNAMIC: (set_gamma,),
            **{
                always(n): (f"{set_gamma}:max_sequences={n}:static_sequences=true",)
                for n in TABLE_2
            },
            ONE: (one,),
            **{longer(more): (f"{one}:budget_offset={more}",) for more in TABLE_3},
        }
    return contenders


def first_token_rows() -> list[Row]:
    """Of Table 1: times to the first token."""
    rows = [
        Row(
            f"DuoDec: time to the first token over {FIRST}'s",
            TTFT["DuoDec"],
            "ttft",
            "DuoDec",
            FIRST,
            comparable=False,
        ),
        Row(
            "DuoDec: time to the first token over SpS's",
            TTFT["DuoDec"],
            "ttft",
            "DuoDec",
            "SpS",
            comparable=False,
        ),
    ]
    return rows + [
        Row(
            f"{role}: time to the first token over plain's (there {TTFT_WORDS[role]})",
            value,
            "ttft",
            role,
            PLAIN,
            comparable=False,
        )
        for role, value in TTFT_OVER_PLAIN.items()
    ]


def rows_on(data: str, speeds: Mapping[str, float]) -> list[Row]:
    """What is compared on one data set, Tables 2 and 3 on HumanEval alone."""
    rows = [
        Row(
            f"{method}: speed over plain{', equal cores' if method in EQUAL_CORES else ''}",
            speed,
            "speed",
            method,
            PLAIN_SHARE if method in EQUAL_CORES else PLAIN,
            flattered=method == "DuoDec",
        )
        for method, speed in speeds.items()
    ]
    rows += [
        Row(f"{ALL_CORES}: speed over plain", speeds["SpS"], "speed", ALL_CORES, PLAIN),
        Row(
            "DuoDec: speed over SpS",
            speeds["DuoDec"] / speeds["SpS"],
            "speed",
            "DuoDec",
            "SpS",
            flattered=True,
        ),
    ]
    rows += first_token_rows()
    rows += [
        Row(f"rounds with {CHOICES[metric]}", share, metric, "DuoDec", neutral=None)
        for metric, share in TABLE_4.items()
    ]
    if data == "code":
        rows += [
            Row(
                f"{always(n)}: speed over a dynamic number's",
                speed,
                "speed",
                always(n),
                DYNAMIC,
                comparable=False,
            )
            for n, speed in TABLE_2.items()
        ]
        rows += [
            Row(
                f"{longer(more)}: speed over the measured length's",
                speed,
                "speed",
                longer(more),
                ONE,
                comparable=False,
            )
            for more, speed in TABLE_3.items()
        ]
    return rows


def tables(scale: Scale) -> tuple[PaperTable, ...]:
    """Tables 1 to 4, one cell for each data set."""
    found = []
    for data, speeds in TABLE_1.items():
        notes = (
            EQUAL_PLAIN,
            drafts_early("DuoDec", "SpS"),
            FIRST_TOKEN,
            UNEQUAL_FIRST,
            *((OTHER_LIMIT,) if data == "code" else ()),
        )
        cell = sized(
            scale,
            name=f"duodecoding-{data}",
            pair="smollm2-135m",
            pad_target=scale.pad_target,
            data=data,
            contenders=contenders_on(scale, data),
        )
        found.append(
            PaperTable(
                f"duodecoding-1-{data}",
                f"Tables 1{' to' if data == 'code' else ' and'} 4: {NAMES[data]}",
                (
                    "Vicuna 7B on an A800, 68M on a 16-core Xeon (Tables 2 and 3: Llama-2 7B); "
                    "it names no temperature"
                ),
                (
                    f"smollm2-135m, target padded to {scale.padded}, equal cores, the draft in "
                    "ONNX Runtime"
                ),
                cell,
                tuple(rows_on(data, speeds)),
                WHY,
                notes=notes,
                rounds=ROUNDS if data == "code" else "",
            )
        )
    return tuple(found)


PAPER = Paper(
    "duodecoding",
    "DuoDecoding: heterogeneous devices, dynamic sequences",
    tables,
    citation=(
        "DuoDecoding: Hardware-aware Heterogeneous Speculative Decoding with Dynamic "
        "Multi-Sequence Drafting (Lv et al.)"
    ),
    open=(
        "The paper's setting, a draft on the CPU next to a target on a GPU",
        "Table 1, Llama-2 7B, the lower half",
        "Table 1, the other five tasks and the averages",
        "Table 1, REST (it needs a datastore)",
        "Tables 2 and 3, the other three tasks",
        "Figure 1 (eight draft passes next to a verification, by context)",
        "Figure 3 by task, Figure 5 on translation",
    ),
    deviations=(
        "Answers have 64 tokens (quick runs: 16); the paper names no limit.",
        "A round has γ tokens in all, shared evenly by its sequences: a dynamic number of "
        "them is rounded down to a divisor of γ (5 "
        "sequences at γ 24 become 4 of 6 tokens), a measured γ to a number with several "
        "divisors, and with a static number tokens that "
        "cannot be shared evenly are not drafted (5 sequences at γ 24 have 4 tokens each).",
        "With a measured γ no sequence is longer than what the target verifies in at most "
        "1.25 times the time of one token; the paper "
        "takes that as given for every length. Rows with the paper's γ of 24 have no such limit.",
        (
            "Ranked candidates are tested with p renormalised between them; the paper's "
            "Algorithm 2 never updates p."
        ),
        (
            "The first token comes from the target's reading of the prompt; the paper's SpS "
            'drafts before it, as "SpS, drafting first" does.'
        ),
        (
            "Table 4 counts rounds in which nothing of the last round was rejected: in the "
            "others no first token is judged."
        ),
        "The budget γ is measured; the published code has a constant.",
        "The draft computes in float32 in ONNX Runtime; the paper's is quantised for llama.cpp.",
    ),
    inconsistencies=(
        (
            'A dynamic number of sequences "consistently outperforms" static ones',
            "on MT-bench two static sequences are faster in Table "
            "2, 102.30 tokens per second against 101.67",
        ),
        (
            "Table 1, prompt lookup in translation",
            "1.26 times plain; its tokens per second give 55.14 / 45.62 = 1.21",
        ),
        (
            "Llama-2 7B over plain decoding",
            "2.61 on average in Table 1 and 2.57 in the text; 3.35 and 3.31 on GSM8K; 3.15 "
            "and 3.00 in "
            "translation",
        ),
        (
            '"In 56.5% of cases where the sequence number is 1" the first draft token is rejected',
            "by Table 4 56.5 % is of all cases, and 40 % of those with one sequence (.230 of .578)",
        ),
    ),
    headlines=(Headline("DuoDecoding over SpS, equal cores", "DuoDec: speed over SpS"),),
)
