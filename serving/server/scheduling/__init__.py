"""The order of decoding: admission, the batch loop, and draft lengths under load.

ticket (one request and its events), admission (the queue), scheduler (the thread that runs the
engine), load_control (limits of drafts: how long by draft_length, with ratio, for whom by
draft_budget, and by costs before anything is measured), detokenize (tokens to text), observer
(notifications).
"""
