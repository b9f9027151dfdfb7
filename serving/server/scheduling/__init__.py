"""The order of decoding: admission, the batch loop, and draft lengths under load.

ticket (one request and its events), admission (the queue), scheduler (the thread that runs the engine), load_control and costs (draft
limits), detokenize (tokens to text), observer (notifications).
"""
