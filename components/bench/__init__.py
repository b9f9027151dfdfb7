"""The bench: strategies and peers decode the same prompts, interleaved, in one run.

settings: what is decoded and how often. schema: the report. bench: `run_bench`. interleaved: the
protocol of every comparison. runner: contenders, and what was measured of them. metrics, ratios:
what is computed from measurements. target_agreement, answers: quality. throughput: several requests
at once. device_parity: outputs against the CPU's. peak_memory, origins: memory, digests of what an
entry was made from. peers: other libraries, here or in environments of their own. servers: vLLM's
own load test against our server and vLLM's. report, plots: tables and pictures.

Only what needs no torch is imported here, so that the command line starts fast; import `run_bench`
from draftwell.components.bench.bench.
"""

from draftwell.components.bench.schema import BenchEntry, BenchReport
from draftwell.components.bench.settings import BenchSettings, QualityFloor

__all__ = ["BenchEntry", "BenchReport", "BenchSettings", "QualityFloor"]
