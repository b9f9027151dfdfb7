"""What ships: the decoding runtime and the HTTP server. It imports nothing else of the project."""
