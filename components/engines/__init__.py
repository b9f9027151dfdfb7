"""Engines: what decodes, behind one port, so that tuning, gate and bench can run another engine
than ours.

`port` is the protocol: start with settings, decode prompts, read acceptance, stop; and the names
of all engines. Ours is `serving/runtime` and needs no port. `vllm` decodes in a process of its own
environment: `process` starts, asks, watches and ends it, `drivers/` runs there, `failures` names
what went wrong, `environments` says where it is installed (`make peers`). `vllm_methods` are vLLM's
ways to speculate. `remote/` asks a server at an address; `launcher` starts servers by a command
template (`launch_template`), and `launched` is such an engine. How to add one:
docs/add_an_engine.md.
"""
