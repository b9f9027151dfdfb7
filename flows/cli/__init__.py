"""The `draftwell` command line, one file per group of commands."""

AT_THE_END: list[str] = []
"""Lines that the command says on stderr when it ends."""
