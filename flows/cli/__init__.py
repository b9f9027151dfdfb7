"""The `draftwell` command line, one file per group of commands."""

from dataclasses import dataclass

AT_THE_END: list[str] = []
"""Lines that the command says on stderr when it ends."""


@dataclass
class Output:
    """How much the command says on stderr."""

    verbose: bool = False
    quiet: bool = False


OUTPUT = Output()
"""As `--verbose` and `--quiet` said it."""
