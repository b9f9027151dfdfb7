"""An engine at an address: a server that others started, which speaks vLLM's, SGLang's,
llama.cpp's, our own or OpenAI's plain API.

`address` says where it is, `client` asks it, `counters` is what its metrics say, `dialect` is the
protocol of an API and `dialects/` has one file for each, `discover` finds out which one a server
speaks, and `remote` is the engine of the port. How to add a dialect: docs/add_an_engine.md.
"""
