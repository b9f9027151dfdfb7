"""The papers' tables, run here: every paper declares its tables as data, a resumable runner
measures them, pages show both.

`claims/*.yaml` say what a paper reports and what is run in its place, `claims/*.md` are the pages'
templates; `plan` says what a cell is measured on, `runner` measures cells, each of which is one
JSON file; `estimates` takes values with intervals from them, `results` and `verdicts` compare these
with the paper's, and `page` renders all of it.
"""
