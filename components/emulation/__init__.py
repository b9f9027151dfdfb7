"""Emulated devices: the engine with its threads, tokens and clock, over models whose passes end
when a curve of another device says.

`curve` has the seconds of passes, `devices` waits for them, `run` measures strategies on them,
`prediction` says what the papers' formulas expect of the same curve, and `result` is the file that
a run leaves.
"""
