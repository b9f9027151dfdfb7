"""Engines beside plain decoding of their own: `measure` lets them decode in turn, `figures`
compares with intervals, `store` keeps what was measured, `table` shows it."""
