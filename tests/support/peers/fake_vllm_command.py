"""`vllm bench serve` that asks its server once, notes what it was given, and invents the rest: the clients as tokens/s."""

from __future__ import annotations

import json
import sys
import urllib.request
from itertools import pairwise
from pathlib import Path

options = dict(pairwise(sys.argv[3:]))
with urllib.request.urlopen(f"{options['--base-url']}/v1/models", timeout=60) as answer:
    served = json.load(answer)["data"][0]["id"]
if options["--model"] != served or options["--max-concurrency"] == "13":
    sys.exit("ValueError: no such\nmodel")
folder = Path(options["--result-dir"])
rows = [json.loads(line)["prompt"] for line in Path(options["--dataset-path"]).read_text().splitlines()]
with (folder / "asked.jsonl").open("a") as asked:
    asked.write(json.dumps([options["--base-url"], int(options["--max-concurrency"]), rows]) + "\n")
result = {"output_throughput": float(options["--max-concurrency"]), "median_ttft_ms": 20.0, "median_tpot_ms": 3.0,
          "completed": len(rows) - 1, "failed": 1}
(folder / options["--result-filename"]).write_text(json.dumps(result))
