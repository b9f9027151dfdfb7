"""Who is decoded when: admission, the batch loop, and draft lengths under load."""
