"""Reports of training for people: a Markdown page of a verifier (`verifier_page`), and pictures
(`plots`)."""
