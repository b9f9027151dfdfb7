"""Peers: what users run today, measured in the same run as our strategies.

`transformers` computes in this process, on the pair's own modules (`transformers_peer`). `vllm` and
`llama.cpp` are engines (`components/engines`) in environments of their own, made by `make peers`: a
process of their own decodes what the bench asks for, and is stopped while others compute. `loading`
starts them, `model_files` and `gguf_file` write what they read.
"""

from draftwell.components.bench.peers.environments import PEERS, check_peers

__all__ = ["PEERS", "check_peers"]
