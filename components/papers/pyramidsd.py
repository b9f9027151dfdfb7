"""PyramidSD: a qualifier between draft and target. The speeds of its abstract, Figure 2 and Table
2."""

from __future__ import annotations

from draftwell.components.papers.cells import PLAIN, QUICK, Scale, sized
from draftwell.components.papers.tables import Headline, Paper, PaperTable, Row, quality_rows

SD, FSD, PSD_A = 65.01, 83.11, 93.71
"""Table 2: fastest tokens per second (γ 5; τ .5, γ 15; τ .5, 20 qualified and 5 drafted tokens).
The fastest PSD_A is 1.44 × SD, as section 4.2 says."""
TABLE_2_FSD = {(5, 0.3): 71.16, (5, 0.5): 72.09, (15, 0.3): 71.74, (15, 0.5): 83.11}
"""(γ, τ) → tokens per second."""
TABLE_2_PSD_A = {(3, 5, 0.3): 62.0, (3, 5, 0.5): 65.08, (5, 20, 0.3): 81.01, (5, 20, 0.5): 93.71}
"""(draft, qualified tokens, τ_T) → tokens per second."""
PSD_F = 1.91
"""Abstract: fastest speed over SD; Table 3, which would have it, is not in our copy of the text."""
BEST = {"FSD": FSD / SD, "PSD_A": PSD_A / SD, "PSD_F": PSD_F}
"""Fastest speed over SD."""
SHARES = "1 : 3 : 8"
"""Parameters of draft, qualifier and target, to each other: there 1, 3 and 8 B, here by padding."""
SEEDS = 5
"""The paper evaluates "each prompt using five pre-determined QA samples", read here as five
seeds."""
PROMPTS = 8
"""Of a full run with so many seeds each."""
PAPERS_LENGTHS = ((3, 5), (5, 20))
"""(draft, qualified) tokens of a round: short, and those of the paper's fastest PSD_A."""
PAPERS_GAMMAS = (5, 15)
"""Of fuzzy SD: SD's fastest, and its own."""
PAPERS_TAUS = (0.3, 0.5)
"""The second is that of the paper's fastest PSD_A and fuzzy SD."""
DIVERGENCE = (
    "The paper names no divergence; its thresholds are taken to mean that of the published "
    "code of fuzzy SD, which it adopts "
    "(`fsd_js`)."
)
OTHER_DRAFT = (
    "No row gets a verdict: with heads over a part of the vocabulary `fsd_js` is infinite. "
    "The divergence here is the true "
    "Jensen-Shannon one, which is smaller at the same distributions, so that the same "
    "threshold lets more through. The paper's "
    'SD and fuzzy SD draft with the qualifier, as the rows "qualifier drafts" do.'
)
THEIRS = "Llama 3.2 1B & 3B, Llama 3.1 8B, RTX 4090, CommonsenseQA, T = .7"
BY_QUALIFIER = ", qualifier drafts"
LONGEST_DRAFT = 5
"""Of SD with the draft model: no longer draft is the best one where half of the tokens are
accepted."""
LENGTHS = ((5, 10), (3, 5))
"""(draft, qualified) tokens of a round."""
TAUS = (0.3, 0.5)


def tables(scale: Scale) -> tuple[PaperTable, ...]:
    """SD, fuzzy SD and both pyramids at temperature .7: near copies with the paper's divergence and
    costs, and the shipped pair."""
    return near_copies(scale), shipped(scale)


def at_settings() -> list[tuple[str, str, float, str]]:
    """(method, settings in words, tokens per second, spec) of Table 2 at the settings of the near
    copies."""
    fuzzy = "fuzzy_sd:drafter=qualifier:divergence=fsd_js:num_speculative_tokens"
    assisted = "pyramid_assisted:num_draft_tokens"
    return [
        *(
            ("FSD", f"γ {gamma}, τ {tau}", speed, f"{fuzzy}={gamma}:tau={tau}")
            for (gamma, tau), speed in TABLE_2_FSD.items()
        ),
        *(
            (
                "PSD_A",
                f"l_D {draft}, l_Q {qualified}, τ_T {tau}",
                speed,
                f"{assisted}={draft}:num_speculative_tokens={qualified}:divergence=fsd_js:tau_target={tau}",
            )
            for (draft, qualified, tau), speed in TABLE_2_PSD_A.items()
        ),
    ]


NEAR_COPIES_WHY = (
    "Sizes to each other, thresholds and SD's draft (the qualifier) are as in the "
    "paper. The models are not: draft and qualifier "
    "are the target with some layers left out. Most answers end before 20 tokens here "
    "(the paper's may have 2048), so rounds of 15 "
    "or 20 tokens hardly pay. The paper has no value for plain decoding."
)


def near_copy_rows() -> tuple[Row, ...]:
    """What is compared of the near copies."""
    against, fuzzy, qualifier_sd = (
        f"SD{BY_QUALIFIER}",
        f"FSD{BY_QUALIFIER}",
        "vanilla_sd:drafter=qualifier:num_speculative_tokens",
    )
    return (
        *(
            Row(
                f"{method}: fastest speed over {against}",
                speed,
                "speed",
                fuzzy if method == "FSD" else method,
                against,
            )
            for method, speed in BEST.items()
        ),
        Row(f"PSD_A: fastest speed over {fuzzy}", PSD_A / FSD, "speed", "PSD_A", fuzzy),
        *(
            Row(
                f"{method} at {words}: speed over {against} at γ 5",
                speed / SD,
                "speed",
                spec,
                f"{qualifier_sd}=5",
            )
            for method, words, speed, spec in at_settings()
        ),
        *(
            Row(
                f"{method}: fastest speed over SD, the draft model drafts (ours only)",
                None,
                "speed",
                method,
                "SD",
            )
            for method in ("PSD_A", "PSD_F")
        ),
        *(
            Row(f"{method}: fastest speed over plain", None, "speed", method, PLAIN)
            for method in (against, "SD", "PSD_A", "PSD_F")
        ),
        *quality_rows(fuzzy, "PSD_A", "PSD_F"),
    )


def near_copies(scale: Scale) -> PaperTable:
    """Three models that cover the whole vocabulary, at the paper's thresholds."""
    quick = scale.name == QUICK.name
    size = {} if quick else {"prompts": PROMPTS, "seeds": SEEDS}
    grid = [
        f"num_draft_tokens={draft}:num_speculative_tokens={qualified}:divergence=fsd_js:tau_target={tau}"
        for draft, qualified in PAPERS_LENGTHS
        for tau in PAPERS_TAUS
    ]
    fuzzy_twice = [
        f"pyramid_fuzzy:{point}:tau_qualifier={tau}"
        for point in grid
        for tau in PAPERS_TAUS
        if tau <= float(point.rpartition("=")[2])
    ]
    cell = sized(
        scale,
        name="pyramidsd-choice-near-copy",
        pair="smollm2-135m-near-copy-pyramid",
        pad_target=scale.pad_target,
        data="choice",
        temperature=0.7,
        **size,
        contenders={
            "SD": tuple(f"vanilla_sd:num_speculative_tokens={gamma}" for gamma in scale.gammas_all),
            f"SD{BY_QUALIFIER}": tuple(
                f"vanilla_sd:drafter=qualifier:num_speculative_tokens={gamma}"
                for gamma in scale.gammas_all
            ),
            f"FSD{BY_QUALIFIER}": tuple(
                f"fuzzy_sd:drafter=qualifier:divergence=fsd_js:num_speculative_tokens={gamma}:tau={tau}"
                for gamma in PAPERS_GAMMAS
                for tau in PAPERS_TAUS
            ),
            "PSD_A": tuple(f"pyramid_assisted:{point}" for point in grid),
            "PSD_F": tuple(fuzzy_twice[-1:] if quick else fuzzy_twice),
        },
    )
    return PaperTable(
        "pyramidsd-2",
        "Table 2 and the abstract: fastest speeds, near copies",
        THEIRS,
        "near copies of 24 and 27 layers, all three padded so that their parameters are "
        f"{SHARES}, the target's "
        f"{scale.padded}, T = .7, `fsd_js`",
        cell,
        near_copy_rows(),
        NEAR_COPIES_WHY,
        notes=(DIVERGENCE,),
        rounds="What a round takes, of which the paper has a formula (section 3.3) and no values.",
    )


SHIPPED_WHY = (
    "The qualifier is hardly nearer to the target than the draft here (MAT below), so "
    "what fuzzy SD and the pyramids gain comes "
    "mostly from tokens that the exact rule would reject (rows of first choices)."
)


def shipped_rows() -> tuple[Row, ...]:
    """What is compared of the shipped pair."""
    rows = tuple(
        Row(
            f"{method}: fastest speed over SD{words}",
            speed,
            "speed",
            method + (words if method == "FSD" else ""),
            f"SD{words}",
            comparable=False,
        )
        for words in (BY_QUALIFIER, "")
        for method, speed in BEST.items()
    )
    rows += tuple(
        Row(
            f"PSD_A: fastest speed over FSD{words}",
            PSD_A / FSD,
            "speed",
            "PSD_A",
            f"FSD{words}",
            comparable=False,
        )
        for words in (BY_QUALIFIER, "")
    )
    return rows + quality_rows("FSD", f"FSD{BY_QUALIFIER}", "PSD_A", "PSD_F")


def shipped(scale: Scale) -> PaperTable:
    """The shipped draft and qualifier, whose heads cover a part of the vocabulary."""
    quick = scale.name == QUICK.name
    taus, lengths = (TAUS[:1], LENGTHS[:1]) if quick else (TAUS, LENGTHS)
    grid = [
        f"num_draft_tokens={draft}:num_speculative_tokens={qualified}:tau_target={tau}"
        for draft, qualified in lengths
        for tau in taus
    ]
    cell = sized(
        scale,
        name="pyramidsd-choice",
        pair="smollm2-135m",
        pad_target=scale.pad_target,
        data="choice",
        temperature=0.7,
        contenders={
            "SD": tuple(
                f"vanilla_sd:num_speculative_tokens={gamma}"
                for gamma in scale.gammas
                if gamma <= LONGEST_DRAFT
            ),
            f"SD{BY_QUALIFIER}": tuple(
                f"vanilla_sd:drafter=qualifier:num_speculative_tokens={gamma}"
                for gamma in scale.gammas_all
            ),
            "FSD": tuple(
                f"fuzzy_sd:num_speculative_tokens={gamma}:tau={tau}"
                for gamma in scale.gammas
                if gamma <= LONGEST_DRAFT
                for tau in taus
            ),
            f"FSD{BY_QUALIFIER}": tuple(
                f"fuzzy_sd:drafter=qualifier:num_speculative_tokens={gamma}:tau={tau}"
                for gamma in scale.gammas_all
                for tau in taus
            ),
            "PSD_A": tuple(f"pyramid_assisted:{point}" for point in grid),
            "PSD_F": tuple(f"pyramid_fuzzy:{point}:tau_qualifier=0.2" for point in grid),
        },
    )
    return PaperTable(
        "pyramidsd-1",
        "Figure 2 and Table 2: fastest speeds, the shipped pair",
        THEIRS,
        f"smollm2-135m with its qualifier, target padded to {scale.padded}, T = .7",
        cell,
        shipped_rows(),
        SHIPPED_WHY,
        notes=(OTHER_DRAFT,),
    )


PAPER = Paper(
    "pyramidsd",
    "PyramidSD: a qualifier between draft and target",
    tables,
    citation="3-Model Speculative Decoding (Byun et al.)",
    untestable=(
        (
            "Table 1, CommonsenseQA scores",
            "SmolLM2 135M answers near chance: no interval would tell a loss from noise",
        ),
    ),
    open=(
        "Table 2 as a whole grid (τ .2 to .5, lengths 1 to 25)",
        "Table 3 (PSD_F's grid), which is not in the copy of the text that this page is "
        "made from; its fastest, 1.91 times SD, is in the "
        "abstract",
    ),
    inconsistencies=(
        (
            "Draft lengths",
            "2, 4 and 6 in section 4.1, 1 to 25 in Table 2, where the fastest PSD_A has 5",
        ),
        (
            'The best draft length is "approximately half of ℓ_Q", 1 : 2 to 1 : 3 (section 4.4)',
            "in Table 2 the fastest are 5 : 20 and 3 : 25",
        ),
    ),
    headlines=(
        Headline("PSD_A over SD, qualifier drafts", f"PSD_A: fastest speed over SD{BY_QUALIFIER}"),
        Headline("PSD_F over SD, qualifier drafts", f"PSD_F: fastest speed over SD{BY_QUALIFIER}"),
        Headline(
            "SD, qualifier drafts, over plain decoding",
            f"SD{BY_QUALIFIER}: fastest speed over plain",
        ),
        *(
            Headline(
                f"{method} over SD, the draft model drafts",
                f"{method}: fastest speed over SD, the draft model drafts (ours only)",
            )
            for method in ("PSD_A", "PSD_F")
        ),
    ),
    deviations=(
        "Answers have 64 tokens (quick runs: 16); the paper's up to 2048.",
        (
            "The fastest is chosen from one or two thresholds and lengths, the paper's from "
            "grids of up to hundreds: its best is larger."
        ),
        (
            f"{DIVERGENCE} The near copies are measured with it, the shipped pair with the "
            "true Jensen-Shannon divergence."
        ),
        "Passes of the near copies cost what they do because zeros pad the draft to 1/8 "
        "and the qualifier to 3/8 of the target's "
        "parameters.",
        'Five seeds a prompt stand for the paper\'s "five pre-determined QA samples", '
        "which may be examples in the prompt; its deviations "
        "are of CommonsenseQA's score, ours of speed.",
    ),
)
