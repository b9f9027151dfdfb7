"""How a pair keeps its numbers: what its models compute in, and weights of its target that take
fewer bytes.

One name says both, such as `bfloat16-int8`. It is part of the pair's fingerprint and names the
workspace's folder, so what was made with some weights is never taken for others.
"""

from __future__ import annotations

from typing import Literal, cast, get_args

Weights = Literal["int8", "int4"]
NumberFormat = Literal[
    "bfloat16",
    "float32",
    "float16",
    "bfloat16-int8",
    "bfloat16-int4",
    "float32-int8",
    "float32-int4",
]
WEIGHTS: tuple[Weights, ...] = get_args(Weights)
FORMATS: tuple[NumberFormat, ...] = get_args(NumberFormat)


def dtype_of(name: str) -> str:
    """What the models compute in.

    >>> dtype_of("bfloat16-int8"), dtype_of("float32")
    ('bfloat16', 'float32')
    """
    return name.partition("-")[0]


def weights_of(name: str) -> Weights | None:
    """The target's weights of fewer bytes, or None for weights in the dtype itself.

    >>> weights_of("bfloat16-int8"), weights_of("float32")
    ('int8', None)
    """
    return cast("Weights | None", name.partition("-")[2] or None)


def in_dtype(name: str, dtype: str) -> NumberFormat:
    """The same weights, computed with in another dtype.

    >>> in_dtype("bfloat16-int8", "float32"), in_dtype("bfloat16", "float32")
    ('float32-int8', 'float32')
    """
    return named(dtype, weights_of(name))


def named(dtype: str, weights: Weights | None) -> NumberFormat:
    """The name of both, which is one of `FORMATS` where they go together."""
    return cast("NumberFormat", f"{dtype}-{weights}" if weights else dtype)
