"""The order of decoding: admission, the batch loop, and draft lengths under load.

ticket (one request and its events), admission (the queue), scheduler (the thread that runs the
engine), draft_limits (how long drafts may be beside others), detokenize (tokens to text), observer
(notifications).
"""
