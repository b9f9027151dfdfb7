"""A draft in ONNX Runtime, on cores of its own."""
