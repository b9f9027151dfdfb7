"""Prompts: one conversation a row, from a file, served traffic or a data set.

`prompt` reads and checks rows, `sources` finds them, `answer_fields` checks what an answer is graded by; `data/` holds the demo prompts.
"""
