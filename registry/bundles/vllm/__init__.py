"""A bundle that vLLM serves: `make deploy ENGINE=vllm`."""
