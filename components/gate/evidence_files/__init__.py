"""Results of others' benchmark tools as evidence for the gate: one module reads each tool's files,
`pairs.py` says whether two can be compared, `judgement.py` compares them."""
