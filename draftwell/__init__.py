"""Draftwell: tune, prove and ship speculative decoding.

The four packages are the folders beside this one, linked here: in a checkout `draftwell.serving` is
`serving/`, and an installed wheel has them inside `draftwell` and nowhere else.
"""
