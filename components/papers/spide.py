"""SPIDE: serial and parallel intertwined. Tables 1, 2 and 5, and MT-bench by counts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import mean

from draftwell.components.papers.cell_file import CellFile
from draftwell.components.papers.cells import FULL, PLAIN, PLAIN_SHARE, Scale, sized
from draftwell.components.papers.confidence import FIGURE_4, FIGURE_4_PAIR
from draftwell.components.papers.estimates import Measured, pace
from draftwell.components.papers.formulas import leviathan_speedup, token_acceptance
from draftwell.components.papers.gain import by_papers_conditions, gain_steps, spides_formula
from draftwell.components.papers.predictions import CLOSE
from draftwell.components.papers.tables import (
    EQUAL_PLAIN,
    Headline,
    Paper,
    PaperTable,
    PublishedPair,
    Row,
    drafts_early,
)
from draftwell.components.report.tables import markdown, span

METHODS = ("SD", "SVIP", "D&V", "PEARL", "SPIDE")
THEIR_PAIRS = (
    "Vicuna 68M & 13B",
    "Vicuna 160M & 33B",
    "Pythia 160M & 12B",
    "DeepSeek 1.3B & 33B",
    "TinyLlama 1.1B & CodeLlama 34B",
    "Qwen3 1.7B & 32B",
)
Values = tuple[float, float, float]
"""Speed over plain decoding, target calls over SD's, MAT."""
TABLE_1: dict[str, tuple[Values, ...]] = {
    "SD": (
        (1.76, 1.00, 1.91),
        (1.97, 1.00, 2.29),
        (1.56, 1.00, 3.30),
        (2.79, 1.00, 8.25),
        (2.33, 1.00, 5.65),
        (1.60, 1.00, 3.65),
    ),
    "SVIP": (
        (1.86, 1.02, 1.84),
        (2.10, 0.94, 2.43),
        (1.70, 0.90, 3.82),
        (3.04, 0.92, 9.10),
        (2.77, 0.64, 9.57),
        (1.53, 1.07, 3.45),
    ),
    "D&V": (
        (1.88, 1.03, 1.86),
        (2.22, 0.97, 2.55),
        (1.88, 0.96, 3.69),
        (3.16, 0.90, 9.44),
        (2.89, 0.84, 9.44),
        (1.76, 0.95, 3.88),
    ),
    "PEARL": (
        (1.99, 1.27, 1.93),
        (2.42, 1.30, 2.86),
        (2.65, 1.35, 6.44),
        (4.41, 1.77, 23.26),
        (3.65, 1.58, 14.68),
        (2.48, 1.80, 8.47),
    ),
    "SPIDE": (
        (2.38, 0.95, 2.54),
        (2.66, 0.91, 3.52),
        (2.83, 0.84, 7.89),
        (4.52, 1.26, 24.83),
        (3.86, 1.20, 14.94),
        (2.64, 1.26, 9.14),
    ),
}
"""HumanEval: method → values of `THEIR_PAIRS`."""
TABLE_2: dict[str, tuple[Values, ...]] = {
    "SD": (
        (1.64, 1.00, 2.08),
        (2.27, 1.00, 4.26),
        (1.35, 1.00, 2.79),
        (2.30, 1.00, 6.59),
        (2.52, 1.00, 7.04),
        (1.34, 1.00, 3.09),
    ),
    "SVIP": (
        (1.65, 1.05, 1.95),
        (2.57, 0.99, 4.43),
        (1.42, 0.87, 3.39),
        (2.56, 1.03, 6.50),
        (2.91, 0.53, 14.52),
        (1.46, 0.98, 3.34),
    ),
    "D&V": (
        (1.60, 1.09, 1.88),
        (2.44, 1.07, 4.10),
        (1.58, 0.91, 3.78),
        (2.61, 1.09, 6.81),
        (2.76, 0.86, 12.89),
        (1.52, 1.03, 3.88),
    ),
    "PEARL": (
        (2.01, 1.33, 2.13),
        (3.22, 1.47, 5.41),
        (2.62, 1.23, 5.90),
        (3.77, 1.68, 14.05),
        (4.45, 1.57, 42.57),
        (2.22, 1.65, 5.11),
    ),
    "SPIDE": (
        (2.41, 1.02, 2.98),
        (3.76, 1.09, 6.89),
        (2.86, 0.75, 7.65),
        (3.99, 1.25, 15.11),
        (4.56, 1.40, 44.96),
        (2.53, 1.05, 5.91),
    ),
}
"""GSM8K, likewise."""
MT_BENCH: dict[str, tuple[Values, ...]] = {
    "SD": (
        (1.52, 1.00, 1.68),
        (1.38, 1.00, 2.77),
        (1.29, 1.00, 2.14),
        (1.47, 1.00, 4.92),
        (1.47, 1.00, 3.45),
        (1.24, 1.00, 2.56),
    ),
    "SVIP": (
        (1.51, 0.98, 1.61),
        (1.54, 0.89, 3.21),
        (1.44, 1.09, 3.76),
        (1.63, 1.11, 5.13),
        (1.65, 0.69, 5.40),
        (1.40, 1.08, 3.46),
    ),
    "D&V": (
        (1.65, 1.07, 1.87),
        (1.51, 0.93, 2.95),
        (1.53, 0.97, 4.34),
        (1.68, 1.02, 4.87),
        (1.90, 0.87, 7.21),
        (1.43, 0.97, 3.71),
    ),
    "PEARL": (
        (1.84, 1.29, 2.05),
        (1.77, 1.46, 4.70),
        (2.09, 1.29, 8.29),
        (2.25, 1.66, 7.89),
        (2.25, 1.61, 9.84),
        (2.00, 1.76, 8.56),
    ),
    "SPIDE": (
        (2.17, 1.09, 2.58),
        (1.90, 1.05, 5.47),
        (2.20, 0.78, 10.02),
        (2.39, 1.19, 9.01),
        (2.43, 1.29, 11.22),
        (2.18, 1.11, 10.18),
    ),
}
"""MT-bench, the printed averages of its eight kinds: Table 4 and Tables 12 to 16, likewise. Those
of D&V are not the means of its kinds in Tables 4, 12, 13 and 15 (1.53, 1.56, 1.62 and 1.81); some
others differ by up to .04."""
MT_BENCH_TABLES = (4, 12, 13, 14, 15, 16)
"""Number of the table that each of `THEIR_PAIRS` has there."""
TABLE_5_MATHS: dict[str, dict[int, float]] = {
    "without dynamic drafting": {2: 2.45, 3: 3.29},
    "without parallel verification": {2: 1.63, 3: 2.92},
}
"""GSM8K: part → index in `THEIR_PAIRS` → speed over plain decoding."""
TABLE_5: dict[str, tuple[float, ...]] = {
    "without dynamic drafting": (2.15, 2.36, 2.48, 3.83, 3.16, 2.08),
    "without parallel verification": (2.05, 2.27, 1.96, 3.41, 3.07, 1.94),
}
"""HumanEval: speed over plain decoding of SPIDE without one of its parts."""
TABLE_17 = (6, 5, 5, 11, 8, 5)
"""The γ at which SD is fastest on `THEIR_PAIRS`; the paper says of no data set, so it stands for
all."""
TABLE_18 = (20, 11, 6, 7, 6, 4)
"""s of `THEIR_PAIRS`: draft passes in the time of a target pass, rounded down."""
TABLE_18_TAU = {
    "code": (0.6, 0.5, 0.9, 0.7, 0.6, 0.9),
    "maths": (0.7, 0.8, 0.7, 0.7, 0.7, 0.8),
    "chat": (0.7, 0.7, 0.8, 0.8, 0.7, 0.9),
}
"""τ of `THEIR_PAIRS` at which SPIDE is fastest."""
TAU = 0.7
"""SPIDE's threshold in the rows that are not of its fastest one: the most frequent of Table 18,
which every run measures."""
OURS = {
    "smollm2-135m-near-copy-29": 0.91,
    "smollm2-135m": 0.5,
    "smollm2-135m-near-copy-27": 0.78,
    "smollm2-135m-near-copy-24": 0.64,
    "smollm2-135m-near-copy-int8": 0.99,
}
"""Our pairs, the most telling first → how often the draft's first choice is the target's: near
copies by the comments of their files in `registry/pairs/`, the distilled draft by its benches,
about."""
ACCEPTANCE_FROM = "solved from its MAT of {:g} at γ {} of Table 17, taking tokens as independent"
ALL_CORES = "SD, all cores"
LONGER = {
    "smollm2-135m-near-copy-29": ((2, 5, 8), (5, 8)),
    "smollm2-135m-near-copy-int8": ((5, 8, 12), (5, 8, 12)),
}
"""Pair → SD's draft lengths on equal and on all cores in a full run, where longer drafts than usual
may be the fastest."""
WHY = (
    "SPIDE and PEARL gain by drafting while the target verifies, which pays where the two "
    "do not slow each other. The ratio to SD also "
    "depends on acceptance, on c, what a draft pass costs next to a target pass, on what a "
    "pass over several tokens costs, and on how "
    'near SD is to what its formula allows. The table "From our gain to the paper\'s" '
    "replaces our conditions by the paper's, one at "
    "a time."
)
OTHER_GAMMA = (
    "Rows of target calls and MAT over SD's get no verdict where speeds are measured: both "
    "depend on SD's γ, and those of the "
    "paper's γ are among the counted tables."
)
PAPERS_GAMMA = (
    'Rows "at γ" compare with SD at the paper\'s γ, other rows and the table "Every '
    'contender" with our fastest SD. SPIDE '
    "is judged at the paper's τ."
)
ONE_TAU = (
    f"Rows at τ {TAU} get no verdict: the paper's value is that of its fastest τ, as the rows "
    "without one are."
)
UNTUNED = (
    "SVIP and D&V run with the settings of their own papers (threshold .3 and at most 40 "
    "tokens; threshold .8 at first) and get no "
    "verdict where speeds are measured: the paper says that its settings are the best "
    '"described in their papers or found in our '
    'experiments". The counted tables try several.'
)
NEARLY = 0.02
"""Share by which a setting may be slower than the fastest and count as fast."""
NAMES = {"code": "HumanEval", "maths": "GSM8K", "chat": "MT-bench"}


COUNTED = (
    "Target calls and accepted tokens are counted by replays of the strategies' own code "
    "on traces, exactly for these texts, and "
    "depend on no machine but for rounding. Speeds are predicted from them: a target pass "
    "is charged s + 0.25 draft passes, however "
    "many tokens it verifies, and no model slows the other: what SPIDE could gain at this "
    "acceptance and the paper's ratio of "
    "costs. They were not measured and get no verdict. The fastest settings are the "
    "fastest by these predictions; where several "
    "are about as fast, counts of the one that is called fastest say little of the others. "
    "SPIDE's MAT is the same at every τ: it "
    "counts tokens between corrections, wherever drafts end."
)
FIRST_CHOICES = (
    "Shares by confidence get no verdict: they are counted at every position of the texts "
    "(the draft's first choice, and "
    "whether it is the target's token), the paper's among the tokens that SPIDE drafted "
    "and the target judged. Figure 4 "
    "does not name its data; HumanEval is what Figure 5 has. Confidence 1 begins at 1 − "
    "1/512 here, where bfloat16 rounds "
    "to 1."
)
FIRST_TURNS = (
    "Of MT-bench the first turns are counted, the paper's figures are of whole conversations."
)
SERIAL, STATIC = "without parallel verification", "without dynamic drafting"
MEASURED_ON_MATHS = ("smollm2-135m-near-copy-29", "smollm2-135m")
"""Pairs whose speeds are measured on GSM8K, too; of the others target calls are counted there, so
that all fits into six hours."""
WITHOUT_PARTS = ("smollm2-135m-near-copy-29",)
"""Pairs of which SPIDE is also measured without each of its parts (Table 5)."""
COUNTED_ON_CHAT = ("smollm2-135m-near-copy-29", "smollm2-135m")
"""Pairs that are also counted on MT-bench's first turns."""
COUNTED_GAMMAS = range(1, 17)
"""Draft lengths of vanilla SD in counted tables: those of the paper's Table 17 reach from 3 to
13."""
THRESHOLDS = {
    "SVIP": tuple(f"svip:threshold={part / 10}" for part in range(2, 11)),
    "D&V": tuple(
        f"draft_verify:threshold={part / 10}:max_draft={longest}"
        for longest in (8, 16, 24)
        for part in (1, 2, 4, 6, 8)
    ),
}
"""Of the serial rivals, whose optimal parameters are "described in their papers or found in our
experiments", and which, the paper does not say: how unsure a draft may be, and how long."""
UNTUNED_RIVALS = tuple(THRESHOLDS)
"""Rivals that are measured with one setting only: their speeds get no verdict."""
TABLE_ABLATIONS = {
    "its table starts empty": "calibrated=false",
    "its table stays as calibrated": "learns=false",
}
"""Acceptance tables of SPIDE without calibration, and without online counts; its own row has both,
where the pair ships a table."""
SHIPS_A_TABLE = ("smollm2-135m",)


def acceptance_of(values: dict[str, tuple[Values, ...]], theirs: int) -> float:
    """Chance that SD accepts a token of one of `THEIR_PAIRS`, by its MAT and its γ."""
    return token_acceptance(values["SD"][theirs][2], TABLE_17[theirs])


def nearest(acceptance: float) -> int:
    """The one of `THEIR_PAIRS` whose acceptance on both data sets is nearest in sum; two pairs of
    ours may have the same.

    >>> [THEIR_PAIRS[nearest(acceptance)] for acceptance in (0.64, 0.91)]
    ['Vicuna 68M & 13B', 'DeepSeek 1.3B & 33B']
    """
    return min(
        range(len(THEIR_PAIRS)),
        key=lambda theirs: sum(
            abs(acceptance_of(values, theirs) - acceptance) for values in (TABLE_1, TABLE_2)
        ),
    )


def pair_words(scale: Scale, pair: str) -> str:
    """Our pair in words; the padding belongs in every table."""
    return f"{pair}, target padded to {scale.padded}, equal cores"


def contenders(scale: Scale, pair: str, *, ablations: bool) -> dict[str, tuple[str, ...]]:
    """Role → specs; everything that drafts with a model runs on equal cores, and SD also on all."""
    middle = scale.gammas[len(scale.gammas) // 2]
    equal, every = (
        LONGER[pair]
        if pair in LONGER and len(scale.gammas) > 1
        else (scale.gammas, scale.gammas_all)
    )
    found = {
        "SD": tuple(f"vanilla_sd@1+1:num_speculative_tokens={gamma}" for gamma in equal),
        ALL_CORES: tuple(f"vanilla_sd:num_speculative_tokens={gamma}" for gamma in every),
        "SVIP": ("svip@1+1",),
        "D&V": ("draft_verify@1+1",),
        "PEARL": ("pearl@1+1",),
        "SPIDE": tuple(f"spide@1+1:tau={tau}" for tau in scale.taus),
    }
    parts = {
        STATIC: (f"spide@1+1:dynamic=false:num_speculative_tokens={middle}",),
        SERIAL: tuple(f"spide@1+1:parallel=false:tau={tau}" for tau in scale.taus),
    }
    return found | parts if ablations else found


def rows(values: dict[str, tuple[Values, ...]], theirs: int, best_tau: float) -> tuple[Row, ...]:
    """Every method's speed; the others' also against SD; SPIDE's also at one τ that is not chosen
    by speed.

    Args:
        best_tau: the paper's τ, which its values are of.
    """
    found = [
        Row(f"{ALL_CORES}: speed over plain", values["SD"][theirs][0], "speed", ALL_CORES, PLAIN)
    ]
    for method in METHODS:
        speed, calls, mat = values[method][theirs]
        base_speed, _, base_mat = values["SD"][theirs]
        how = {"comparable": method not in UNTUNED_RIVALS, "flattered": method == "PEARL"}
        found.append(
            Row(
                f"{method}: speed over plain, equal cores",
                speed,
                "speed",
                method,
                PLAIN_SHARE,
                **how,
            )
        )
        if method != "SD":
            found += [
                Row(f"{method}: speed over SD", speed / base_speed, "speed", method, "SD", **how),
                Row(
                    f"{method}: target calls over SD's",
                    calls,
                    "calls",
                    method,
                    "SD",
                    comparable=False,
                ),
                Row(
                    f"{method}: MAT over SD's",
                    mat / base_mat,
                    "mat",
                    method,
                    "SD",
                    comparable=False,
                ),
            ]
    found.append(
        Row("SPIDE: speed over SD with all cores (ours only)", None, "speed", "SPIDE", ALL_CORES)
    )
    at = f"SPIDE at τ {TAU}" + (
        "" if best_tau == TAU else f" (the paper's value is at τ {best_tau})"
    )
    (speed, calls, _), (base_speed, *_), spec = (
        values["SPIDE"][theirs],
        values["SD"][theirs],
        f"spide@1+1:tau={TAU}",
    )
    found += [
        Row(f"{at}: speed over SD", speed / base_speed, "speed", spec, "SD", comparable=False),
        Row(f"{at}: target calls over SD's", calls, "calls", spec, "SD", comparable=False),
    ]
    return tuple(found)


def ablation_rows(theirs: int) -> tuple[Row, ...]:
    """Table 5, as ratios to complete SPIDE and to SD."""
    return tuple(
        Row(
            f"{part}: speed over {name}",
            values[theirs] / TABLE_1[role][theirs][0],
            "speed",
            part,
            role,
        )
        for part, values in TABLE_5.items()
        for role, name in (("SPIDE", "complete SPIDE"), ("SD", "SD"))
    )


def tables(scale: Scale) -> tuple[PaperTable, ...]:
    """Tables 1, 2 and 5, one or two cells for each pair; without parts of SPIDE one pair."""
    found = []
    for pair, acceptance in OURS.items():
        theirs, ablations = nearest(acceptance), pair in WITHOUT_PARTS
        for number, data, values in (
            (1, "code", TABLE_1),
            *(((2, "maths", TABLE_2),) if pair in MEASURED_ON_MATHS else ()),
        ):
            cell = sized(
                scale,
                name=f"spide-{data}-{pair}",
                pair=pair,
                pad_target=scale.pad_target,
                data=data,
                contenders=contenders(scale, pair, ablations=ablations and number == 1),
            )
            tau = TABLE_18_TAU[data][theirs]
            made = rows(values, theirs, tau) + (
                ablation_rows(theirs) if ablations and number == 1 else ()
            )
            found.append(
                PaperTable(
                    f"spide-{number}-{pair}",
                    (
                        "Table "
                        f"{number}{' with Table 5' if ablations and number == 1 else ''}, "
                        f"{NAMES[data]}: {THEIR_PAIRS[theirs]} beside {pair}"
                    ),
                    f"{THEIR_PAIRS[theirs]}, SD at γ {TABLE_17[theirs]}, SPIDE at τ {tau} "
                    f"and s {TABLE_18[theirs]}, four RTX 3090, bfloat16, "
                    "greedy",
                    pair_words(scale, pair),
                    cell,
                    made,
                    WHY,
                    acceptance=acceptance_of(values, theirs),
                    acceptance_from=ACCEPTANCE_FROM.format(
                        values["SD"][theirs][2], TABLE_17[theirs]
                    ),
                    cost=1 / TABLE_18[theirs],
                    notes=(EQUAL_PLAIN, OTHER_GAMMA, ONE_TAU, UNTUNED, drafts_early("PEARL", "SD")),
                    pair=published(values, theirs, tau),
                )
            )
    return tuple(found)


def published(values: dict[str, tuple[Values, ...]], theirs: int, tau: float) -> PublishedPair:
    """One of `THEIR_PAIRS` on one data set, as its tables give it."""
    return PublishedPair(
        acceptance_of(values, theirs),
        TABLE_17[theirs],
        tau,
        TABLE_18[theirs],
        own_formula(values, theirs),
        values["SPIDE"][theirs][0] / values["SD"][theirs][0],
    )


def own_formula(values: dict[str, tuple[Values, ...]], theirs: int) -> float:
    """The paper's SD over what Leviathan's formula gives for its acceptance, its γ and c = 1 / s,
    which is c's upper end.

    >>> round(own_formula(TABLE_1, 3), 2)
    0.78
    """
    predicted = leviathan_speedup(
        acceptance_of(values, theirs), TABLE_17[theirs], 1 / TABLE_18[theirs]
    )
    return values["SD"][theirs][0] / predicted


def own_formulas() -> str:
    """For each of the paper's pairs: how near its SD and its SPIDE are to their formulas, and what
    these say of SPIDE's gain."""
    lines, shares, falls = [], [], []
    for theirs, name in enumerate(THEIR_PAIRS):
        for data, values in (("code", TABLE_1), ("maths", TABLE_2)):
            pair, (speed, _, run) = (
                published(values, theirs, TABLE_18_TAU[data][theirs]),
                values["SPIDE"][theirs],
            )
            shares.append(speed / spides_formula(pair))
            falls += [pair.sd_share] if abs(shares[-1] - 1) <= CLOSE else []
            shown = (
                pair.alpha,
                run / (1 + run),
                pair.sd_share,
                shares[-1],
                by_papers_conditions(pair),
                pair.gain,
            )
            lines.append([f"{name}, {NAMES[data]}", *(f"{value:.2f}" for value in shown)])
    near = [share for share in shares if abs(share - 1) <= CLOSE]
    dynamic = [TABLE_1["SPIDE"][theirs][0] / speed for theirs, speed in enumerate(TABLE_5[STATIC])]
    enough = sum(
        worth * own_formula(TABLE_1, theirs) >= 1 - NEARLY for theirs, worth in enumerate(dynamic)
    )
    return (
        "### The paper's SD and SPIDE over their formulas\n\n"
        "From its own tables: acceptance solved from SD's MAT, γ of Table 17, τ and c = 1 "
        "/ s of Table 18 (s is rounded down, so c is "
        "at most that, and shares are at most these); SD by Leviathan's formula, SPIDE by "
        "Algorithm 1 where every token has this "
        f"chance, both at the paper's settings. Its SPIDE reaches {min(near):.2f} to "
        f"{max(near):.2f} of its formula in {len(near)} of "
        f"{len(shares)} rows (in the other one acceptance is .95 by SD's MAT and .87 by "
        "SPIDE's, so that γ may be another there), its "
        f"SD {min(falls):.2f} to {max(falls):.2f} of its own. So in those rows the gain is "
        "larger than the formulas give mainly "
        "because SD is slower than its formula. Dynamic drafting, which SPIDE's formula "
        "lacks, may make up for a loss of SPIDE's of "
        f"the same kind: by Table 5 it is worth {min(dynamic):.2f} to {max(dynamic):.2f}, "
        f"as much as SD's loss with {enough} of "
        f"{len(THEIR_PAIRS)} pairs. Acceptance by SPIDE's MAT is that of drafts without "
        "end, MAT / (1 + MAT).\n\n"
        + markdown(
            (
                "pair",
                "acceptance by SD's MAT",
                "by SPIDE's MAT",
                "SD over its formula",
                "SPIDE over its formula",
                "SPIDE over SD by the formulas",
                "the paper's SPIDE over SD",
            ),
            lines,
        )
    )


def best_settings(cells: Mapping[str, CellFile]) -> str:
    """Tables 17 and 18 next to ours: γ and τ by the counted cells, s by the measured ones."""
    lines, inside = [], [0, 0]
    for pair, acceptance in OURS.items():
        theirs = nearest(acceptance)
        for data, name in NAMES.items():
            counts, timed = (
                cells.get(f"spide-counts-{data}-{pair}"),
                cells.get(f"spide-{data}-{pair}"),
            )
            if counts is not None:
                measured = counts.measured()
                costs = None if timed is None else timed.costs
                ratio = (
                    "–"
                    if costs is None or costs.busy is None
                    else f"{min(costs.busy[1].values()) / costs.busy[0]:.1f}"
                )
                best = (
                    nearly_best(measured, "SD", "num_speculative_tokens"),
                    nearly_best(measured, "SPIDE", "tau"),
                )
                papers = TABLE_17[theirs], TABLE_18_TAU[data][theirs]
                inside = [
                    count + (min(ours) <= one <= max(ours))
                    for count, one, ours in zip(inside, papers, best, strict=True)
                ]
                settings = [
                    text
                    for one, ours in zip(papers, best, strict=True)
                    for text in (str(one), span(ours, "g"))
                ]
                lines.append(
                    [
                        f"{pair}, {name}",
                        THEIR_PAIRS[theirs],
                        *settings,
                        str(TABLE_18[theirs]),
                        ratio,
                    ]
                )
    return (
        ""
        if not lines
        else (
            "\n### Tables 17 and 18: the fastest settings\n\n"
            "Ours are those whose speed, predicted from counts at the paper's s, is "
            f"within {NEARLY:.0%} of the fastest; γ was tried from "
            f"{COUNTED_GAMMAS[0]} to {COUNTED_GAMMAS[-1]}, so that a range may go on "
            f"beyond {COUNTED_GAMMAS[-1]}. The paper's γ is in our "
            f"range in {inside[0]} of {len(lines)} rows, its τ in {inside[1]}; where it is "
            "not, our τ are lower. s is measured while both "
            "models compute, the shortest target pass over a draft pass, where the pair "
            "was measured (its target is padded then).\n\n"
            + markdown(
                ("here", "there", "γ there", "γ here", "τ there", "τ here", "s there", "s here"),
                lines,
            )
        )
    )


def nearly_best(measured: Measured, role: str, parameter: str) -> list[float]:
    """Values of a parameter at which a role is about as fast as with its fastest."""
    entries = [measured.entries[label] for label in measured.labels[role]]
    paces = [pace(entry.per_prompt) for entry in entries]
    return [
        float(entry.parameters[parameter])
        for entry, one in zip(entries, paces, strict=True)
        if one <= (1 + NEARLY) * min(paces)
    ]


def summary(cells: Mapping[str, CellFile]) -> str:
    """What its formulas say of the paper's gain for the pairs that stand beside measured ones of
    ours, and of ours."""
    pairs, lost = [], []
    for table in tables(FULL):
        file = cells.get(table.cell.name)
        steps = gain_steps(file, table.pair) if file and table.pair else []
        if steps and table.pair:
            pairs.append(table.pair)
            lost.append(steps[2][1] / steps[1][1])
    if not pairs:
        return ""
    ranges = [
        span(values)
        for values in (
            [by_papers_conditions(pair) for pair in pairs],
            [pair.gain for pair in pairs],
            [pair.gain * pair.sd_share / by_papers_conditions(pair) for pair in pairs],
            [pair.sd_share for pair in pairs],
            lost,
        )
    ]
    return (
        "**SPIDE's gain.** With the paper's own acceptance, costs and settings the "
        "formulas give {} times SD for the pairs that stand "
        "beside ours; the paper reports {}. Its SPIDE reaches {} of what they say, its SD "
        "{}. Here the two models share one memory and "
        "slow each other, which takes a factor of {} from the gain.".format(*ranges)
    )


def appendix(cells: Mapping[str, CellFile]) -> str:
    """What follows from the paper's own figures, and its fastest settings next to ours."""
    return own_formulas() + best_settings(cells)


def counted(scale: Scale) -> tuple[PaperTable, ...]:
    """Target calls and MAT on traces of our pairs, at the ratio of costs of the paper's pair next
    to each."""
    found = []
    for pair, acceptance in OURS.items():
        theirs = nearest(acceptance)
        found += [
            counted_table(
                scale,
                pair,
                theirs,
                1,
                "code",
                TABLE_1,
                {name: part[theirs] for name, part in TABLE_5.items()},
            ),
            counted_table(
                scale,
                pair,
                theirs,
                2,
                "maths",
                TABLE_2,
                {name: part[theirs] for name, part in TABLE_5_MATHS.items() if theirs in part},
            ),
        ]
        if pair in COUNTED_ON_CHAT:
            found.append(
                counted_table(scale, pair, theirs, MT_BENCH_TABLES[theirs], "chat", MT_BENCH, {})
            )
    return tuple(found)


def ablations_of(pair: str) -> dict[str, tuple[str, ...]]:
    """Our own ablations of SPIDE's table, at every τ, where the pair ships one."""
    return {
        f"SPIDE, {words}": tuple(f"spide:{setting}:tau={part / 10}" for part in range(1, 10))
        for words, setting in TABLE_ABLATIONS.items()
        if pair in SHIPS_A_TABLE
    }


def counted_rows(
    theirs: int,
    tau: float,
    values: dict[str, tuple[Values, ...]],
    parts: dict[str, float],
    ablations: Iterable[str],
) -> list[Row]:
    """Of one of the counted tables: calls and MAT, then what they predict.

    Args:
        theirs: the paper's pair.
        parts: part of SPIDE that Table 5 leaves out → its speed over plain decoding.
        ablations: roles of our own.
    """
    base_mat, spide = values["SD"][theirs][2], f"spide:tau={tau}"
    gamma, sd = TABLE_17[theirs], f"vanilla_sd:num_speculative_tokens={TABLE_17[theirs]}"
    made = [
        Row(
            f"SPIDE at τ {tau}: target calls over SD's at γ {gamma}",
            values["SPIDE"][theirs][1],
            "calls",
            spide,
            sd,
        ),
        Row(
            f"SPIDE at τ {tau}: MAT over SD's at γ {gamma}",
            values["SPIDE"][theirs][2] / base_mat,
            "mat",
            spide,
            sd,
        ),
    ]
    for method in METHODS[1:]:
        _, calls, mat = values[method][theirs]
        made.append(
            Row(
                f"{method}: target calls over SD's at γ {gamma}",
                calls,
                "calls",
                method,
                sd,
                comparable=method != "SPIDE",
            )
        )
        if method != "SPIDE":  # whose MAT does not depend on τ
            made.append(
                Row(f"{method}: MAT over SD's at γ {gamma}", mat / base_mat, "mat", method, sd)
            )
    return made + predicted_rows(theirs, values, parts, ablations)


def predicted_rows(
    theirs: int,
    values: dict[str, tuple[Values, ...]],
    parts: dict[str, float],
    ablations: Iterable[str],
) -> list[Row]:
    """Speeds that a counted table predicts; arguments as those of `counted_rows`."""
    made = [
        Row(
            f"{method}: speed over plain, predicted",
            values[method][theirs][0],
            "speed",
            method,
            PLAIN,
            comparable=False,
        )
        for method in METHODS
    ]
    made.append(
        Row(
            "SPIDE: speed over SD, predicted",
            values["SPIDE"][theirs][0] / values["SD"][theirs][0],
            "speed",
            "SPIDE",
            "SD",
            comparable=False,
        )
    )
    for role in ablations:
        made += [
            Row(
                f"{role}: speed over SD, predicted (ours only)",
                None,
                "speed",
                role,
                "SD",
                comparable=False,
            ),
            Row(f"{role}: target calls over SD's (ours only)", None, "calls", role, "SD"),
        ]
    for part, speed in parts.items():
        made += [
            Row(
                f"{part}: speed over {name}, predicted",
                speed / values[role][theirs][0],
                "speed",
                part,
                role,
                comparable=False,
            )
            for role, name in (("SPIDE", "complete SPIDE"), ("SD", "SD"))
        ]
    return made


def counted_table(
    scale: Scale,
    pair: str,
    theirs: int,
    number: int,
    data: str,
    values: dict[str, tuple[Values, ...]],
    parts: dict[str, float],
) -> PaperTable:
    """One of them; `parts`: part that Table 5 leaves out → its speed over plain decoding."""
    tau = TABLE_18_TAU[data][theirs]
    without = {
        SERIAL: tuple(f"spide:parallel=false:tau={part / 10}" for part in range(1, 10)),
        STATIC: (f"spide:dynamic=false:num_speculative_tokens={TABLE_17[theirs]}",),
    }
    ablations = ablations_of(pair)
    cell = sized(
        scale,
        name=f"spide-counts-{data}-{pair}",
        pair=pair,
        data=data,
        prompts=scale.replayed,
        replay=TABLE_18[theirs],
        contenders={
            "SD": tuple(f"vanilla_sd:num_speculative_tokens={gamma}" for gamma in COUNTED_GAMMAS),
            **THRESHOLDS,
            "PEARL": ("pearl",),
            "SPIDE": tuple(f"spide:tau={part / 10}" for part in range(1, 10)),
            **{part: specs for part, specs in without.items() if part in parts},
            **ablations,
        },
    )
    confidence = FIGURE_4 if data == "code" and THEIR_PAIRS[theirs] == FIGURE_4_PAIR else {}
    return PaperTable(
        f"spide-counts-{number}-{pair}",
        (
            f"Table {number}, counted{', with Figure 4' if confidence else ''}, {NAMES[data]}: "
            f"{THEIR_PAIRS[theirs]} beside {pair}"
        ),
        (
            f"{THEIR_PAIRS[theirs]}, SD at γ {TABLE_17[theirs]}, SPIDE at τ {tau} and s "
            f"{TABLE_18[theirs]}, bfloat16, greedy"
        ),
        f"{pair}, not padded, replayed on its texts with s {TABLE_18[theirs]}",
        cell,
        tuple(counted_rows(theirs, tau, values, parts, ablations)),
        COUNTED,
        acceptance=acceptance_of(values, theirs),
        acceptance_from=ACCEPTANCE_FROM.format(values["SD"][theirs][2], TABLE_17[theirs]),
        notes=(
            PAPERS_GAMMA,
            *((FIRST_TURNS,) if data == "chat" else (FIRST_CHOICES,) if confidence else ()),
        ),
        formulas=False,
        confidence=confidence,
        pair=published(values, theirs, tau),
    )


def averages() -> dict[str, float]:
    """Section 4.2's averages over the paper's six pairs and two data sets, from its own Tables 1
    and 2.

    >>> [round(value, 3) for value in averages().values()]
    [3.25, 1.677, 1.082, 0.837]
    """
    rows = [
        (values["SPIDE"][i], values["SD"][i], values["PEARL"][i])
        for values in (TABLE_1, TABLE_2)
        for i in range(len(THEIR_PAIRS))
    ]
    calls, pearl = mean(spide[1] for spide, _, _ in rows), mean(pearl[1] for _, _, pearl in rows)
    return {
        "over plain": mean(spide[0] for spide, _, _ in rows),
        "over SD": mean(spide[0] / sd[0] for spide, sd, _ in rows),
        "calls over SD's": calls,
        "less of PEARL's further calls": 1 - (calls - 1) / (pearl - 1),
    }


def averages_found() -> str:
    """The same in words."""
    plain, sd, calls, less = averages().values()
    return (
        f"they are those of its Tables 1 and 2 (arithmetic, nothing was run): {plain:.2f} "
        f"times plain decoding, {sd - 1:+.1%} over SD, "
        f"{calls - 1:+.1%} target calls, {less:.1%} fewer of PEARL's further calls; the "
        "last is of averages"
    )


PAPER = Paper(
    "spide",
    "SPIDE: serial and parallel intertwined speculative decoding",
    lambda scale: tables(scale) + counted(scale),
    citation="SPIDE: Serial and Parallel Intertwined Speculative Decoding (Xu et al.)",
    untestable=(
        (
            "Tables 3 and 7–11 (MGSM), in full",
            "SmolLM2 135M answers in English only; the languages would measure the tokenizer",
        ),
        ("Absolute tokens per second", "other machines and models of 12 to 34 B parameters"),
    ),
    inconsistencies=(
        (
            (
                "The averages of section 4.2 (3.25 times plain, +67.7 % over SD, +8.2 % target "
                "calls, 83.7 % fewer of PEARL's)"
            ),
            averages_found(),
        ),
        (
            "Tables 19 and 20 (target calls) as a source of Table 1's costs",
            "the paper contradicts itself: the ratios of Table 19, HumanEval, are those of "
            "Table 2, GSM8K, for five of six pairs (Vicuna 68M: "
            "SPIDE 58786 / 57633 = 1.02, in Table 1 0.95), Qwen3's are Table 1's but for "
            "SVIP; Table 20's are Table 2's. The rows \"target "
            "calls over SD's\" have the costs of Tables 1 and 2",
        ),
        (
            "Table 5 where it differs from Tables 1 and 2",
            "SVIP, Vicuna 68M: 1.99 there, 1.86 in Table 1; D&V on GSM8K: 1.49 and 2.47 "
            "there, 1.58 and 2.61 in Table 2; the rows have Tables 1 and 2",
        ),
        (
            "Averages on MT-bench",
            "D&V's 1.65, 1.51, 1.53 and 1.90 in Tables 4, 12, 13 and 15 are not the means "
            "of its eight kinds there, "
            "1.53, 1.56, 1.62 and 1.81, and some others differ by up to .04; the rows have "
            "the printed ones",
        ),
    ),
    open=(
        (
            "Vicuna 160M & 33B and Qwen3 1.7B & 32B of Tables 1, 2 and 5: no pair of ours is "
            "next to them"
        ),
        "Table 2, measured speeds of near-copy-27, -24 and -int8 (their target calls are counted)",
        (
            "Table 5, measured speeds of all pairs but near-copy-29, and its GSM8K half (both "
            "are predicted from counts)"
        ),
        "Tables 4 and 12–16 (MT-bench): measured speeds, and the counts of other pairs",
    ),
    headlines=(
        Headline(
            "SPIDE over plain decoding, equal cores (its time computed)",
            "SPIDE: speed over plain, equal cores",
        ),
        Headline("SPIDE over SD, equal cores", "SPIDE: speed over SD"),
        Headline("SPIDE over SD with all cores", "SPIDE: speed over SD with all cores (ours only)"),
    ),
    deviations=(
        "Answers have 64 tokens (quick runs: 16), the paper's up to 1024 on HumanEval and "
        "256 on GSM8K: the prompt's reading by "
        "both models weighs more in whole requests here, and the draft model's in decoding "
        "alone, too, except with PEARL.",
        (
            "12 prompts of each set (counted tables 32; quick runs 2 and 4); the paper has 164 "
            "of HumanEval and 100 of GSM8K."
        ),
        (
            "SD's γ and SPIDE's τ are the fastest of those tried on the same prompts, as in "
            "the paper: such a best is a little optimistic."
        ),
        "Without dynamic drafting the draft length is fixed at 5 where speeds are "
        "measured; the paper takes the γ that is best for SD, as "
        "the counted tables do.",
        "The acceptance table of near-copy pairs starts empty here, and a bin without "
        "counts from a prior (its midpoint); smollm2-135m has "
        "the shipped one, which then learns on; its counted tables also have SPIDE with a "
        "table that starts empty, and with the "
        "shipped one as it is. The paper calls the cold start "
        "negligible, since rates are stable after some 500 draft tokens; a contender of "
        "ours emits 768 tokens in all, so most of a run is "
        "what the paper leaves out.",
        (
            "Figures 3 and 5 have no values in the text; Figure 4 has some of the same pair as "
            "Figure 3. Our pairs stand in one picture."
        ),
        "Figures 6 and 7 have no values in the text. Of complete SPIDE (Figure 6) it says "
        "that a larger τ is faster and costs more target "
        "calls, and .5 to .9 a good balance; of SPIDE without parallel verification "
        "(Figure 7), that a smaller τ is faster with light "
        "drafts and that others depend little on it. By our counts complete SPIDE is "
        "within 3 % of its fastest from τ .5 to .9 with "
        "near-copy-29, and slower with a larger τ with smollm2-135m, whose draft is light; "
        "without parallel verification smaller τ are "
        "faster with both. Speeds are measured at four thresholds and three draft lengths, "
        "which stand under each Table 1; the counted "
        "tables have nine and sixteen (Table 17 has five for each pair).",
        "In the counted tables the fastest of nine settings of SVIP and fifteen of D&V "
        "(five thresholds, three longest drafts) counts; "
        "where speeds are measured they have those of their own papers.",
        "s varies with the number of tokens that are verified; the paper fixes one s for a pair.",
        "MAT counts accepted tokens per token sampled from the target behind a draft (all "
        "but the first token of a text, except with "
        "PEARL, which drafts before it). The paper's acceptance is the α at which a round "
        "of γ drafts "
        "accepts MAT tokens, α(1 − α^γ)/(1 − α), with γ of Table 17, which names no data set.",
        "Each pair of ours stands next to the paper's of nearest acceptance, on both data "
        "sets together: Vicuna 68M & 13B twice: "
        "next to smollm2-135m, whose draft is even cheaper (c .023, Vicuna's 1/20 at "
        "most), and next to that of its acceptance "
        "(near-copy-24).",
    ),
    summary=summary,
    appendix=appendix,
)
