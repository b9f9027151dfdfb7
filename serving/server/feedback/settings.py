"""How much feedback is recorded, and what of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from serving.errors import DraftwellError


@dataclass(frozen=True)
class FeedbackSettings:
    """What is recorded, and how much.

    Args:
        folder: the spool.
        rate: share of requests, in [0, 1].
        text: keep prompts and outputs too; recalibration needs them.
        a_minute: requests that are recorded at most.
        most_bytes, bytes_a_minute: as in `Spool`.
        seed: of the draw; None takes a new one.
    Raises:
        DraftwellError: a rate that is no share.
    """

    folder: Path
    rate: float
    text: bool = False
    a_minute: float = 60
    most_bytes: int = 256 << 20
    bytes_a_minute: int = 16 << 20
    seed: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.rate <= 1:
            raise DraftwellError(f"--feedback-rate is a share of the requests, from 0 to 1, not {self.rate}")
        if self.a_minute <= 0 or self.most_bytes <= 0 or self.bytes_a_minute <= 0:
            raise DraftwellError("feedback needs room: requests and bytes a minute and the spool's size must be above 0")


def settings_of(folder: Path | None, rate: float, *, text: bool = False, a_minute: float = 60,
                megabytes: int = 256) -> FeedbackSettings | None:
    """The settings that the command line names; None where nothing is to be recorded.

    Raises:
        DraftwellError: a folder without a rate, a rate without a folder, or a rate that is no share.
    """
    if folder is None and rate == 0 and not text:
        return None
    if folder is None:
        raise DraftwellError("feedback needs a folder: name one with --feedback-dir")
    if rate == 0:
        raise DraftwellError("--feedback-dir records nothing by itself: say which share of the requests with --feedback-rate, such as .05")
    return FeedbackSettings(folder, rate, text, a_minute, megabytes << 20)
