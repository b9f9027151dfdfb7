"""The asset events that Prefect's server has."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from prefect.client.orchestration import get_client


def materialized(
    prefix: str, whole: Callable[[dict[str, list[dict[str, Any]]]], bool]
) -> dict[str, list[dict[str, Any]]]:
    """Key of an asset, without the prefix, → the events of its making, the newest first, once they
    are whole: a thread sends them."""
    wanted = {"event": {"prefix": ["prefect.asset.materialization."]}}
    found: dict[str, list[dict[str, Any]]] = {}
    end = time.monotonic() + 120
    with get_client(sync_client=True) as client:
        while not whole(found) and time.monotonic() < end:
            time.sleep(0.2)
            answer = client.request("POST", "/events/filter", json={"filter": wanted, "limit": 50})
            found = {}
            for event in answer.json()["events"]:
                key = event["resource"]["prefect.resource.id"]
                if key.startswith(prefix):
                    found.setdefault(key.removeprefix(prefix), []).append(event)
    return found


def parents(event: dict[str, Any]) -> set[str]:
    """Keys of the assets that one was made from."""
    return {
        one["prefect.resource.id"]
        for one in event["related"]
        if one["prefect.resource.role"] == "asset"
    }
