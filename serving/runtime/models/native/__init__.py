"""Layers of a decoder in C++: one order of addition for every token, whatever stands beside it."""
