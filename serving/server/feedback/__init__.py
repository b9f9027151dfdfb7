"""Recording a share of the served requests for monitoring."""
