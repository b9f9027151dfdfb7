"""Engines beside plain decoding of their own: `measure` lets them decode in turn and keeps that,
`figures` compares with intervals and shows it."""
