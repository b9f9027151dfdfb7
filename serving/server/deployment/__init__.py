"""Switching from one bundle to the next without losing a request.

bundle_watch (notices a new bundle), deployment (a served model and its check), deployments (the
newest one, and the switch).
"""
