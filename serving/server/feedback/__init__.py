"""Recording a share of the served requests for monitoring.

feedback (the observer that selects and records), record (a recorded request and its file format),
spool (the folder of recorded requests), persistence (feedback and snapshots of whatever serves).
"""
