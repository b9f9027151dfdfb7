"""The HTTP server: OpenAI-shaped endpoints over a deployed bundle."""
