"""The engine: drives the generators of any number of requests, batched by model."""
