"""Requests in and answers out: OpenAI's shapes, errors, keys and limits, and the page."""
