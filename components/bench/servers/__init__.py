"""`make bench-server`: vLLM's own load test, `vllm bench serve`, against our server and vLLM's, in
turn.

`processes` starts and stops servers, `load_test` asks them, `__main__` is the command.
"""
