# shellcheck shell=bash
# vLLM on another machine by SSH. -tt ends the remote command with ssh, so there is nothing to stop. An address that other
# machines reach needs a key: VLLM_API_KEY on gpu1.
LAUNCHER="ssh -tt gpu1 'exec vllm serve MODEL --host 0.0.0.0 --port 8100 {speculation_options}'"
