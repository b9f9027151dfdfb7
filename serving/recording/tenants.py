"""Whose recorded requests something was made of, as names carry it from the spool to artifacts: the
ids of their prompts begin with `spool/<tenant>/`, and the names of the spool's files end with it.

A tenant is the first digits of what its key or name is kept under
(`draftwell.serving.server.http.keys.tenant_named`), or `keyless`: all requests without a key.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

KEYLESS, DIGITS = "keyless", 12
TENANT = rf"{KEYLESS}|[0-9a-f]{{{DIGITS}}}"
PROMPT_ID = re.compile(rf"spool/({TENANT})/")


def short_tenant(tenant: str) -> str:
    """What names carry of a tenant; "" is that of requests without a key.

    >>> short_tenant(""), short_tenant("0123456789abcdef")
    ('keyless', '0123456789ab')
    """
    return tenant[:DIGITS] or KEYLESS


def prompt_id(tenant: str, name: str) -> str:
    """Id of a prompt that a tenant has asked."""
    return f"spool/{tenant}/{name}"


def tenants_of(ids: Iterable[str]) -> list[str]:
    """The tenants that ids of prompts name, sorted.

    >>> tenants_of(["spool/keyless/0001", "gsm8k/7"])
    ['keyless']
    """
    return sorted({found[1] for one in ids if (found := PROMPT_ID.match(one))})
