"""Which method pays where: expected speed-ups over the plane of a draft's cost and its acceptance.

`speedups.py` has the papers' formulas for each method and placement, `lines.py` where one method is
as fast as another, `points.py` the papers' pairs and ours, `picture.py` draws all of it and
`own_device.py` asks it for a pair that was tuned. All of it is arithmetic: every token is kept
independently with one probability, and two devices never slow each other.
"""
