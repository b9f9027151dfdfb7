"""CSD: calibrated speculative decoding. Parts of Tables 1 and 3, and Figures 2 and 3."""

from __future__ import annotations

from collections.abc import Mapping

from draftwell.components.papers.cells import PLAIN, QUICK, Scale, sized
from draftwell.components.papers.formulas import token_acceptance
from draftwell.components.papers.tables import Headline, Paper, PaperTable, Row, quality_rows

GAMMA = 6
TABLE_1 = {
    "code": {"SD": 1.90, "Lossy SD": 2.04, "SWIFT": 1.10, "Lookahead": 0.91, "CSD": 2.33},
    "maths": {"SD": 1.74, "Lossy SD": 1.80, "SWIFT": 0.96, "Lookahead": 0.83, "CSD": 1.83},
}
"""HumanEval and GSM8K, Llama-3 70B/1B: speed over plain decoding."""
TABLE_3 = {
    "SD": (0.597, 1.00),
    "memory only": (0.716, 1.24),
    "gate only": (0.886, 1.48),
    "CSD": (0.679, 1.23),
}
"""HumanEval, γ 6: accepted / drafted tokens, speed over SD. The paper calls the share an acceptance
rate and does not define it: at γ 15 (Table 2) SD's is .399 in place of .597, which a rate per
judged token would not be, and both are what tokens of α about .86 give."""
UNIVERSAL = {"code": (2.45, 0.711), "maths": (1.80, 0.745)}
"""Table 4: CSD's speed over plain decoding and accepted / drafted tokens with a universal
calibration set, as our memory's is; with one of the task (MBPP for HumanEval) they are Table 1's
and 3's."""
SHARE_AT = {"code": (TABLE_3["SD"][0], GAMMA, "Table 3"), "maths": (0.462, 15, "Table 2")}
"""SD's accepted / drafted tokens, at this γ."""
REPLAYED_AT = 8
"""Draft passes in a target pass, of replays; what is counted here does not depend on it."""
EMPTY_GAIN = (0.636 + 0.07) / 0.636
"""Section 5.5, MATH500: accepted / drafted tokens without any initial calibration, over SD's: "a 7%
improvement in AR", read as points, as the paper says "16.0% (from 63.6% to 79.6%)" elsewhere."""
SHARES = (0.0, 0.1, 0.3)
"""Of the calibration that the memory starts from (Figure 3a); all of it is CSD's own row."""
OTHERS = {"λ 2": "min_count=2", "λ 20": "min_count=20", "τ 0.1": "tau=0.1", "τ 0.3": "tau=0.3"}
"""Settings beside the paper's λ 6 and τ .01 (Figures 3b and 3c)."""
SUMMARIES = {"SD": (1.49, 20.3), "Lossy SD": (1.55, 20.3), "CSD": (1.59, 20.3)}
"""Table 1, CNN/DailyMail, Llama-3 70B/1B: speed over plain decoding, ROUGE-L; CSD's are those of a
universal calibration set, too."""
SUMMARY_SHARE = 0.544
"""Table 4: CSD's accepted / drafted tokens on CNN/DailyMail with a universal calibration set."""
SUMMARY_SHARE_OF_SD = 0.232
"""Table 2: SD's there at γ 15."""
SUMMARY_PROMPTS = 16
"""Of a full run."""
NAMES = {"code": "HumanEval", "maths": "GSM8K"}
WHY = {
    "code": "The correction memory here comes from 2,000 prompts of nine kinds, a third as many as "
    "the paper's universal set, with a "
    "weaker pair. What a rescue gains depends on how concentrated the draft's errors are "
    '(Figure 2(a), below); the rows "memory '
    'only" and "gate only" show what each of its two conditions lets through by itself.',
    "maths": "SD accepts fewer tokens here than there (below), so there is more to rescue, and the "
    "rows of first choices say at what "
    "price. The correction memory comes from 2,000 prompts of nine kinds, a third as many "
    "as the paper's universal set.",
}
MEMORY_ONLY = (
    'Rows "memory only" get no verdict: the paper\'s values are with a memory of the task '
    "itself (MBPP), those of CSD with the "
    "universal one, and ours is mixed in both."
)


TOO_SHORT = (
    "The row of an empty memory gets no verdict: it learns from some hundred rejections "
    "here, of which few pairs come six times, "
    "the paper's from all of MATH500."
)


ROUNDS = (
    "Figure 4: the rule itself takes .01 to .02 % of the time in the paper, on GSM8K. It "
    'is part of the "rest" here, which has all '
    "that is outside passes, so its share is not resolved."
)


def from_share(share: float) -> str:
    """Role of CSD whose memory starts from a share of its calibration.

    >>> from_share(0.0), from_share(0.1)
    ('CSD from an empty memory', 'CSD from 10% of its calibration')
    """
    return f"CSD from {share:.0%} of its calibration" if share else "CSD from an empty memory"


def figure_2(scale: Scale) -> PaperTable:
    """Its part (b): how likely the target finds tokens that it rejects."""
    sd = f"vanilla_sd:num_speculative_tokens={GAMMA}"
    cell = sized(
        scale,
        name="csd-rejections",
        pair="smollm2-135m",
        data="maths",
        prompts=scale.replayed,
        replay=REPLAYED_AT,
        rejections=True,
        contenders={"SD": (sd,)},
    )
    row = Row("SD: accepted / drafted tokens (ours only)", None, "efficiency", "SD")
    why = (
        "Figure 2(b): in the paper the ratio of one pair spans several orders of "
        "magnitude, from near 1 to below 1e-10, so that how "
        "often it was seen does not tell whether to keep it. The paper draws at T = 1; "
        "here texts are greedy, where a rejected token's "
        "ratio is at most 1."
    )
    return PaperTable(
        "csd-figure-2",
        "Figure 2(b): the target's probability ratios of the most frequent rejected pairs",
        "Llama-3 70B & 1B, CNN/DailyMail and MATH, 28,000 samples",
        "smollm2-135m, greedy texts",
        cell,
        (row,),
        why,
        formulas=False,
    )


SWEEPS_WHY = (
    "The fewer pairs the memory starts from, the fewer tokens are rescued; a smaller λ "
    "or τ rescues more. In the paper a larger "
    "calibration helps little beyond 2,000 to 4,000 samples, and accuracy is best at τ "
    ".01 and λ 6. Whether rescued tokens are good "
    "ones, the paper judges by accuracy, which this target is too small for; here the "
    "share of the target's first choices "
    "stands in its place."
)


def figure_3(scale: Scale) -> PaperTable:
    """Its three sweeps; CSD with the paper's settings is a point of each."""
    empty, sd, csd = from_share(0.0), f"vanilla_sd:num_speculative_tokens={GAMMA}", ("csd",)
    swept = {from_share(share): (f"csd:calibration_share={share}",) for share in SHARES}
    swept |= {f"CSD, {words}": (f"csd:{setting}",) for words, setting in OTHERS.items()}
    cell = sized(
        scale,
        name="csd-sweeps",
        pair="smollm2-135m",
        pad_target=scale.pad_target,
        data="code",
        contenders={"SD": (sd,), "CSD": csd, **swept},
    )
    rows = [
        Row(
            (
                f"{empty}: accepted / drafted tokens over SD's (the paper's \"7% "
                'improvement", taken as points)'
            ),
            EMPTY_GAIN,
            "efficiency",
            empty,
            "SD",
            comparable=False,
        ),
        Row(
            "CSD: accepted / drafted tokens over SD's (ours only)", None, "efficiency", "CSD", "SD"
        ),
    ]
    rows += [
        Row(
            f"{role}: accepted / drafted tokens over CSD's (ours only)",
            None,
            "efficiency",
            role,
            "CSD",
        )
        for role in swept
    ]
    return PaperTable(
        "csd-figure-3",
        "Figure 3: the calibration's size, λ and τ",
        "Llama-3 70B & 1B, MATH500, 0 to 8,000 samples",
        f"smollm2-135m, target padded to {scale.padded}, HumanEval, {SHARES[0]:.0%} to "
        "100% of the shipped "
        "memory",
        cell,
        (*rows, *quality_rows("CSD", *swept)),
        SWEEPS_WHY,
        notes=(TOO_SHORT,),
        formulas=False,
    )


def summaries(scale: Scale) -> PaperTable:
    """Table 1 on CNN/DailyMail, whose measure of quality, ROUGE-L, a small target has, too."""
    cell = sized(
        scale,
        name="csd-summaries",
        pair="smollm2-135m",
        pad_target=scale.pad_target,
        data="summaries",
        prompts=scale.prompts if scale.name == QUICK.name else SUMMARY_PROMPTS,
        contenders={
            "SD": (f"vanilla_sd:num_speculative_tokens={GAMMA}",),
            "Lossy SD": (f"lossy_sd:tau=0.6:num_speculative_tokens={GAMMA}",),
            "CSD": ("csd",),
        },
    )
    base = SUMMARIES["SD"]
    rows = [
        Row(f"{method}: speed over plain", speed, "speed", method, PLAIN)
        for method, (speed, _) in SUMMARIES.items()
    ]
    for method in ("Lossy SD", "CSD"):
        speed, points = SUMMARIES[method]
        rows += [
            Row(f"{method}: speed over SD", speed / base[0], "speed", method, "SD"),
            Row(f"{method}: ROUGE-L over SD's", points / base[1], "rouge_l_ratio", method, "SD"),
        ]
    rows += [
        Row("CSD: accepted / drafted tokens", SUMMARY_SHARE, "efficiency", "CSD", neutral=None),
        *quality_rows("Lossy SD", "CSD"),
    ]
    why = (
        "The one task whose measure of quality a target of 135 M parameters can be held "
        "to, though a coarse one: as SPRINTER's tables "
        "show, ROUGE hardly sees which model writes, so the rows of first choices count "
        "for more. Summaries end at "
        f"{scale.max_tokens} tokens here, and articles are short (at most 2,400 characters "
        "with the instruction)."
    )
    return PaperTable(
        "csd-1-summaries",
        "Tables 1 and 4: CNN/DailyMail",
        "Llama-3 70B & 1B, two H20, CNN/DailyMail, 0-shot, greedy, γ 6, "
        "λ 6, τ .01, CSD's values with a universal calibration set (Table 4; the same in Table 1)",
        f"smollm2-135m, target padded to {scale.padded}, the same settings",
        cell,
        tuple(rows),
        why,
        acceptance=token_acceptance(SUMMARY_SHARE_OF_SD * 15, 15),
        acceptance_from=f"solved from {SUMMARY_SHARE_OF_SD:.1%} of drafted tokens at γ 15 of "
        "Table 2, "
        "taking tokens as "
        "independent",
    )


def rows_on(data: str, speeds: Mapping[str, float]) -> list[Row]:
    """What is compared on one data set; on HumanEval with Table 3."""
    rows = [
        Row(f"{method}: speed over plain", speed, "speed", method, PLAIN)
        for method, speed in speeds.items()
    ]
    rows += [
        Row(f"{method}: speed over SD", speeds[method] / speeds["SD"], "speed", method, "SD")
        for method in ("Lossy SD", "CSD")
    ]
    if data == "maths":
        rows.append(
            Row(
                "CSD: accepted / drafted tokens",
                UNIVERSAL[data][1],
                "efficiency",
                "CSD",
                neutral=None,
            )
        )
    if data == "code":
        for method, (acceptance, speed) in (
            TABLE_3 | {"CSD": (UNIVERSAL[data][1], speeds["CSD"] / speeds["SD"])}
        ).items():
            alike = method != "memory only"
            rows.append(
                Row(
                    f"{method}: accepted / drafted tokens",
                    acceptance,
                    "efficiency",
                    method,
                    neutral=None,
                    comparable=alike,
                )
            )
            if method not in ("SD", "CSD"):
                rows.append(
                    Row(
                        f"{method}: speed over SD",
                        speed,
                        "speed",
                        method,
                        "SD",
                        comparable=alike,
                    )
                )
    return [*rows, *quality_rows("Lossy SD", "memory only", "gate only", "CSD")]


def tables(scale: Scale) -> tuple[PaperTable, ...]:
    """Tables 1 and 3, one cell for each data set, and Figure 3."""
    found = []
    for data, specific in TABLE_1.items():
        speeds = specific | {"CSD": UNIVERSAL[data][0]}
        contenders = {
            "SD": (f"vanilla_sd:num_speculative_tokens={GAMMA}",),
            "Lossy SD": (f"lossy_sd:tau=0.6:num_speculative_tokens={GAMMA}",),
            "SWIFT": ("swift",),
            "Lookahead": ("lookahead",),
            "CSD": ("csd",),
            "memory only": ("csd:use_gate=false",),
            "gate only": ("csd:use_memory=false",),
        }
        cell = sized(
            scale,
            name=f"csd-{data}",
            pair="smollm2-135m",
            pad_target=scale.pad_target,
            data=data,
            contenders=contenders,
        )
        share, gamma, source = SHARE_AT[data]
        number = "Tables 1, 3 and 4" if data == "code" else "Tables 1 and 4"
        found.append(
            PaperTable(
                f"csd-1-{data}",
                f"{number}: {NAMES[data]}",
                f"Llama-3 70B & 1B, two H20, {NAMES[data]}, greedy, γ 6, λ 6, τ .01, CSD's "
                "values with a universal calibration set (Table 4; Table 1: "
                f"{specific['CSD']} times plain)",
                f"smollm2-135m, target padded to {scale.padded}, the same settings",
                cell,
                tuple(rows_on(data, speeds)),
                WHY[data],
                acceptance=token_acceptance(share * gamma, gamma),
                acceptance_from=(
                    f"solved from {share:.1%} of drafted tokens at γ {gamma} of {source}, "
                    "taking tokens as independent"
                ),
                notes=(MEMORY_ONLY,) if data == "code" else (),
                rounds="" if data == "code" else ROUNDS,
            )
        )
    return (*found, summaries(scale), figure_3(scale), figure_2(scale))


PAPER = Paper(
    "csd",
    "CSD: calibrated speculative decoding",
    tables,
    citation=(
        "Calibrated Speculative Decoding: Frequency-Guided Candidate Selection for Efficient "
        "Inference (Zhou et al.)"
    ),
    untestable=(
        (
            (
                "Accuracy on GSM8K, MATH500 and HumanEval (the tables have the share of the "
                "target's first choices in its place)"
            ),
            (
                "SmolLM2 135M is rarely right on them: no interval would tell a loss from "
                "noise; ROUGE-L on CNN/DailyMail is tested"
            ),
        ),
        (
            "Table 5, the half on RULER",
            (
                "its task is long contexts (the paper names no length); prompts here have at "
                "most 1,200 characters, and 2,400 with news"
            ),
        ),
    ),
    open=(
        "Table 1, MATH500, and the averages",
        "Table 1, SWIFT and Lookahead on CNN/DailyMail",
        "Table 1, Qwen-2.5 72B & 7B",
        "Table 3, the half on MATH500",
        "Table 5, the half on IFEval",
        "Table 2, SD and CSD at γ 15 (Fly and reflective verification are not implemented)",
        "Table 4, MATH500",
    ),
    headlines=(Headline("CSD over SD", "CSD: speed over SD"),),
    elsewhere=(
        (
            (
                "Figure 2(a), the share of rejections that the most frequent fifth of the "
                "pairs (draft's token, target's token) has"
            ),
            "57 % of the 62,481 rejections that the shipped memory was counted from "
            "(33,277 pairs, T = .6, 2,000 mixed prompts), in the paper "
            "69 % (T = 1, 28,000 samples of two tasks): concentrated as there, and less",
        ),
    ),
    inconsistencies=(
        (
            "Fastest CSD over plain decoding",
            (
                "2.33 times by Table 1 and the text, 2.45 on HumanEval in Table 4 (a universal "
                "calibration set)"
            ),
        ),
        (
            "Accuracy of CSD on HumanEval with its own calibration set",
            "79.3 in Table 1, 79.2 in Table 4",
        ),
    ),
    deviations=(
        "Answers have 64 tokens (quick runs: 16); the paper names no limit.",
        "The memory starts from the shipped one (2,000 mixed prompts) and grows online. "
        "The paper's for HumanEval is from MBPP's training "
        "set, for MATH500 from 8,000 samples, for the others from 2,000; CSD's rows have "
        "its values with a universal calibration set "
        "(Table 4; with its own: 2.33 times plain and 67.9 % on HumanEval, 1.83 times on GSM8K).",
        "Figure 3 is on MATH500 in the paper, on HumanEval here. Smaller calibration sets "
        "are drawn from the counts of ours: each "
        "rejection is kept by chance, as if fewer texts had been read.",
        "Prompts are zero-shot; the paper's GSM8K has eight examples. News are the "
        "articles of CNN/DailyMail in Spec-Bench, with its "
        "instruction.",
        (
            "The paper's acceptance rate is taken as accepted / drafted tokens, which falls "
            "with γ as its Tables 3 (γ 6) and 2 (γ 15) do."
        ),
        "No rescue of or against stop and special tokens; the memory is bounded at 65,536 pairs.",
    ),
)
