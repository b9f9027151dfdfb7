"""`vllm bench serve` that asks its server once, notes what it was given, and invents the rest: the
clients as tokens/s."""

from __future__ import annotations

import json
import sys
import urllib.request
from itertools import pairwise
from pathlib import Path

options = dict(pairwise(sys.argv[3:]))
dataset, wanted = options["--dataset-name"], int(options["--num-prompts"])
with urllib.request.urlopen(f"{options['--base-url']}/v1/models", timeout=60) as answer:
    served = json.load(answer)["data"][0]["id"]
if options["--model"] != served or options["--max-concurrency"] == "13":
    sys.exit("ValueError: no such\nmodel")
folder = Path(options["--result-dir"])
if dataset == "custom":
    rows = [
        json.loads(line)["prompt"]
        for line in Path(options["--dataset-path"]).read_text().splitlines()
    ]
else:  # as vLLM's makes them, but for what they say
    assert "--ignore-eos" in options
    own = "--" + dataset.replace("_", "-")
    wanted -= wanted % int(options.get(f"{own}-num-prefixes", 1))
    rows = [f"{dataset} {options[f'{own}-output-len']} {options['--seed']}"] * wanted
with (folder / "asked.jsonl").open("a") as asked:
    asked.write(json.dumps([options["--base-url"], int(options["--max-concurrency"]), rows]) + "\n")
result = {
    "output_throughput": float(options["--max-concurrency"]),
    "median_ttft_ms": 20.0,
    "median_tpot_ms": 3.0,
    "completed": wanted - 1,
    "failed": 1,
}
(folder / options["--result-filename"]).write_text(json.dumps(result))
