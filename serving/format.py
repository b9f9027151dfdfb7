"""The version of everything that Draftwell keeps: workspaces, what a registry holds, and bundles.

It stands here alone and is counted up when any of the three changes, so that what another version
has made is refused by one line, or migrated, instead of being read wrongly. An artifact has, in
addition, the version of its own kind (`draftwell.serving.artifacts.base`).
"""

from __future__ import annotations

from draftwell.serving.errors import DraftwellError

FORMAT = 4
"""What this version writes and reads. Draftwell 0.10 began with 4."""


def check_format(
    found: object, what: str, remedy: str, error: type[DraftwellError] = DraftwellError
) -> None:
    """Refuse what another version of Draftwell has made.

    Args:
        found: the format that is written in it; anything but a whole number if none is.
        what: names it, for the message.
        remedy: what to do about one that is older.
        error: what to raise.
    Raises:
        DraftwellError: it is older (`older_format`) or newer (`newer_format`).
    """
    if found == FORMAT:
        return
    if isinstance(found, int) and found > FORMAT:
        raise error(
            f"{what} was made by a newer version of Draftwell (format {found}, this one reads "
            f"{FORMAT}): upgrade draftwell",
            code="newer_format",
        )
    raise error(f"{what} was made by Draftwell 0.6 or earlier: {remedy}", code="older_format")
