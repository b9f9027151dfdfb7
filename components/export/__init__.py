"""A tuned decoding config as settings of other inference engines.

`export` builds the document, `speculation` reduces a strategy to what other engines support,
`settings` writes each engine's, and `engines/` holds a JSON schema of what each engine documents.
`checkpoint` saves a distilled draft as a folder that other engines read.
"""
