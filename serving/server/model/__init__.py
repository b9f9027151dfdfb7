"""What is served: a loaded pair, its strategies, and the state that they learn.

loading (bundle to served model), served_model, strategy_pool (strategies and their online state),
snapshots (states on disk, written and read again).
"""
