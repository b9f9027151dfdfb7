"""How commands end that have started engines and servers."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def ends_what_it_started() -> Iterator[None]:
    """Asked to end (SIGTERM, or SIGHUP of a closed terminal unless `nohup` has it ignored), this
    process leaves through its `finally` blocks, which end engines and servers."""
    asked = [
        number
        for number in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) is not signal.SIG_IGN
    ]
    before = {
        number: signal.signal(number, lambda number, _: sys.exit(128 + number)) for number in asked
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
