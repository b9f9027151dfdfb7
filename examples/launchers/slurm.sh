# shellcheck shell=bash
# vLLM by Slurm, on a node that has a name.
LAUNCHER='srun --nodelist gpu1 --gres gpu:1 --job-name engine-{port} vllm serve MODEL --host 0.0.0.0 --port {port} {speculation_options}'
STOP='scancel --name engine-{port}'
