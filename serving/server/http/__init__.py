"""Requests and answers: OpenAI's formats, errors, keys and limits, and the page.

requests and tokens (what a body may hold), responses_api (the same of responses, and their items),
service (a request to its tickets), prompts (texts to tokens), conversation (the tickets of a
request), rendering (events to JSON), tool_calls, errors, keys (what each may do), security (names,
keys, sizes, origins, the line in the log), page (the static page at `/`).
"""
