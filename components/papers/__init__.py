"""The papers' tables, run here: every paper declares its tables as data, a resumable runner
measures them, a page shows both.

`spide.py`, `sprinter.py`, … say what a paper reports and what is run in its place; `runner`
measures cells, each of which is one JSON file; `estimates` takes values with intervals from them,
`verdicts` compares these with the paper's, and `page` renders all of it.
"""
