"""DuoDecoding: draft and target on hardware of their own. Parts of Tables 1 and 2, and the time to the first token."""

from __future__ import annotations

from components.papers.cells import PLAIN, Scale, sized
from components.papers.spide import PADDED
from components.papers.tables import UNEQUAL, Paper, PaperTable, Row, drafts_early

TABLE_1 = {
    "code": {"SpS": 1.50, "PLD": 1.24, "Lookahead": 1.32, "DuoDec": 1.60},
    "maths": {"SpS": 1.42, "PLD": 1.48, "Lookahead": 1.49, "DuoDec": 1.54},
}
"""Vicuna 7B & 68M: speed over plain decoding."""
TABLE_2 = {1: 89.06 / 89.52, 2: 84.15 / 89.52, 3: 80.54 / 89.52}
"""Code, Llama-2 7B: static number of sequences → speed over the dynamic number."""
AT_MOST = ("Rows \"at most 2\" and \"at most 3\" are not the paper's static runs, which always draft so many sequences, and get no "
           "verdict; at most one is always one.")
FIRST_TOKEN = ("The time to the first token gets no verdict: here SpS's first token comes from the target's reading of the prompt alone, "
               "the paper's SpS drafts before it and takes 1.5 to 1.7 times plain decoding's time.")
TTFT = {"DuoDec": 0.83}
"""Section 4.3: over SpS's."""
WHY = ("With no GPU both models compute on disjoint cores of one processor and share its memory, so the overlap saves less than on two "
       "devices; SpS runs on the same cores.")
EQUAL_CORES = ("SpS", "DuoDec")
"""Each model on its own share of the cores; PLD and Lookahead draft without a model and have all."""
ALL_CORES = "SpS, all cores"
NAMES = {"code": "HumanEval", "maths": "GSM8K"}


def tables(scale: Scale) -> tuple[PaperTable, ...]:
    """Tables 1 and 2."""
    found = []
    for data, speeds in TABLE_1.items():
        contenders = {
            "SpS": tuple(f"vanilla_sd@1+1:num_speculative_tokens={gamma}" for gamma in scale.gammas),
            ALL_CORES: tuple(f"vanilla_sd:num_speculative_tokens={gamma}" for gamma in scale.gammas_all), "PLD": ("prompt_lookup",),
            "Lookahead": ("lookahead",), "DuoDec": ("duo_decoding",)}
        rows = [Row(f"{method}: speed over plain", speed, "speed", method, PLAIN, comparable=method not in EQUAL_CORES)
                for method, speed in speeds.items()]
        rows += [Row(f"{ALL_CORES}: speed over plain", speeds["SpS"], "speed", ALL_CORES, PLAIN),
                 Row("DuoDec: speed over SpS", speeds["DuoDec"] / speeds["SpS"], "speed", "DuoDec", "SpS"),
                 Row("DuoDec: time to the first token over SpS's", TTFT["DuoDec"], "ttft", "DuoDec", "SpS", comparable=False)]
        if data == "code":
            contenders |= {f"at most {n}": (f"duo_decoding:max_sequences={n}",) for n in TABLE_2}
            rows += [Row(f"at most {n} sequences: speed over up to 8", speed, "speed", f"at most {n}", "DuoDec", comparable=n == 1)
                     for n, speed in TABLE_2.items()]
        notes = (UNEQUAL, drafts_early("DuoDec", "SpS"), FIRST_TOKEN, *((AT_MOST,) if data == "code" else ()))
        cell = sized(scale, name=f"duodecoding-{data}", pair="smollm2-135m", pad_target=PADDED, data=data, contenders=contenders)
        found.append(PaperTable(
            f"duodecoding-1-{data}", f"{'Tables 1 and 2' if data == 'code' else 'Table 1'}: {NAMES[data]}",
            "Vicuna 7B on an A800, 68M on a 16-core Xeon (Table 2: Llama-2 7B), greedy",
            f"smollm2-135m, target padded to {PADDED / 1e9:g} B parameters, equal cores, the draft in ONNX Runtime", cell,
            tuple(rows), WHY, notes=notes))
    return tuple(found)


PAPER = Paper(
    "duodecoding", "DuoDecoding: heterogeneous devices, dynamic sequences", tables,
    untestable=(("A draft on the CPU next to a target on a GPU", "this run has no GPU"),),
    open=("Table 1, Llama-2 7B, the lower half", "Table 1, the other five tasks and the averages", "Table 1, REST (it needs a datastore)",
          "Table 2, always 2 and always 3 sequences, and the other three tasks", "Table 3 (γ ± 2)",
          "Table 4 (confusion matrix of the number of sequences)",
          "Figures 3 to 5 (time to the first token by task, a profile of a round, how often how many sequences)",
          "drafting before the target's first token, as an option"),
    deviations=(
        "Answers have 64 tokens (quick runs: 20); the paper names no limit.",
        "The number of sequences is at most n, where the paper's static runs have always n.",
        "Ranked candidates are tested with p renormalised between them; the paper's Algorithm 2 never updates p.",
        "The first token comes from the target's reading of the prompt; the paper's SpS drafts before it.",
        "The budget γ is measured; the published code has a constant.",
        "The draft computes in float32 in ONNX Runtime; the paper's is quantised for llama.cpp.",
        "The paper differs from itself for Llama-2 7B: on average 2.61 times plain decoding in Table 1 and 2.57 in the text, on GSM8K 3.35 "
        "and 3.31.",
    ))
