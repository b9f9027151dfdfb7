"""The HTTP server: OpenAI-compatible endpoints over a deployed bundle.

main (command line), settings (its options), process (socket, SIGINT), lifecycle (load, serve,
drain), app (routes and middleware); the packages http, scheduling, model, deployment, feedback and
metrics.
"""
