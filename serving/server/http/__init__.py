"""Requests and answers: OpenAI's formats, errors, keys and limits, and the page.

schemas (requests), service (request to tickets), conversation (the tickets of a request), answer
and responses (events to JSON), capabilities (`/v1/speculation`), errors, security (keys, sizes,
origins), page (the static page at `/`).
"""
