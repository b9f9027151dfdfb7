"""SPIDE, PEARL, DuoDecoding and SD on emulated devices (docs/papers/emulated.md).

python examples/emulated_devices.py PAIR CURVE PROMPTS RESULT [own|shared] [COUNT] [TOKENS] \
    [ALPHA] [TAUS] [STRATEGIES]

ALPHA is about how many of the draft's tokens are accepted, for SD's draft length; TAUS are SPIDE's
thresholds, and STRATEGIES names, with commas.
"""

import sys
from pathlib import Path

from draftwell.components.bench.settings import BenchSettings
from draftwell.components.emulation.curve import find_curve
from draftwell.components.emulation.page import gains_table, speeds_table
from draftwell.components.emulation.run import run_emulated, usual_choices
from draftwell.components.prompts.prompt import read_prompts
from draftwell.flows.workspace import Workspace

CALIBRATION = 8  # prompts that SPIDE's acceptance table is counted on, from the file's end
USUAL = ("own", "16", "64", "0.9", "0.7", "vanilla_sd,spide,pearl,duo_decoding")


def main(pair: str, curve: str, prompts: str, result: str, *more: str) -> None:
    """Measure, write the result, and print it."""
    placement, count, tokens, alpha, taus, strategies = (*more, *USUAL[len(more) :])
    device, asked = find_curve(curve), read_prompts(prompts)
    usual = usual_choices(device, float(alpha), [float(tau) for tau in taus.split(",")])
    choices = [choice for choice in usual if choice.name in strategies.split(",")]
    run = run_emulated(
        Workspace(pair, "bfloat16").load(),
        device,
        choices,
        asked[: int(count)],
        placement=placement,
        calibration=asked[int(count) :][-CALIBRATION:],
        source=Path(prompts).name,
        settings=BenchSettings(max_tokens=int(tokens)),
    )
    run.write(Path(result))
    print(gains_table({run.pair: run}), speeds_table({run.pair: run}), sep="\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
