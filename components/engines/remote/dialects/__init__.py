"""One file for each API that engines at addresses speak; `collected` is what they share."""
