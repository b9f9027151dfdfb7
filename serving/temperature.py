"""The two classes of sampling temperature that a release is tuned for, and the default temperature
of requests.

At temperature 0 a draft token is kept if it is the target's first choice, above 0 with probability
min(1, p/q). So the fastest choice for greedy requests need not be that for sampled ones.
"""

from __future__ import annotations

from typing import Literal

SERVED_TEMPERATURE = 1.0
"""Temperature of requests that name none, as in OpenAI's API."""

TemperatureClass = Literal["greedy", "sampled"]


def class_of(temperature: float) -> TemperatureClass:
    """The class of a request.

    >>> class_of(0.0), class_of(0.7)
    ('greedy', 'sampled')
    """
    return "greedy" if temperature == 0 else "sampled"
