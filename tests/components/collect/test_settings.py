"""Settings of a collection: one place for every default, and one line for a value that is wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from draftwell.components.collect.settings import CollectionSettings
from tests.support.errors import raises_code


def test_settings_travel_to_workers_as_json() -> None:
    settings = CollectionSettings(prefix_kinds=("bare", "target"), temperature=0.7, hidden=False)
    assert (
        CollectionSettings(**json.loads(json.dumps(settings.model_dump(mode="json")))) == settings
    )


def test_settings_do_not_change() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        CollectionSettings().rollout = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": 0},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"rollout": 0},
        {"batch": 0},
        {"turns": -1},
        {"rollout": 2.5},
        {"rollout": "3"},
        {"rolout": 3},
    ],
)
def test_a_value_out_of_bounds_is_refused_in_one_line(wrong: dict[str, Any]) -> None:
    ((name, value),) = wrong.items()
    with raises_code("bad_collection_settings", name, repr(value)) as error:
        CollectionSettings(**wrong)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kinds", [(), ("target", "target"), ("target", "dratf")])
def test_prefix_kinds_are_known_and_different(kinds: tuple[str, ...]) -> None:
    with raises_code("unknown_prefix_kind", ", ".join(kinds) or "none"):
        CollectionSettings(prefix_kinds=kinds)
