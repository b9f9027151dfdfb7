# shellcheck shell=bash
# vLLM as a job of a Ray cluster. The address is http://head:8100: the job has to run there, and to see $DRAFTWELL_HOME.
LAUNCHER='ray job submit --address http://head:8265 --submission-id engine-{port} --entrypoint-num-gpus 1 -- vllm serve MODEL --host 0.0.0.0 --port {port} --config {speculation_file}'
STOP='ray job stop --address http://head:8265 engine-{port} && ray job delete --address http://head:8265 engine-{port}'
