"""The watchdog's judgement: a series of an engine's counters, and probes of it, in; alarms with
their cause out. Pure functions, and one file to keep the series in."""
