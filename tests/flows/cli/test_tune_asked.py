"""What `draftwell tune` is asked: what has no effect is refused, secrets and folders of the machine
are shown nowhere, and what it prints can be typed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from draftwell.flows.cli.tune import value_of
from draftwell.flows.settings import PipelineSettings
from draftwell.flows.steps.engine.at_address import AddressSettings
from draftwell.flows.steps.outcome_card import card_of
from draftwell.flows.workspace import Workspace
from tests.flows.cli.test_tune_models import ASKED, models, outcome, pair_of

__all__ = ["models"]  # a fixture


def test_a_card_names_no_folder_of_this_machine(models: Path, pair_file: Path) -> None:
    own = Workspace(pair_of(models)[0].name, device="cpu")
    elsewhere = Workspace(str(pair_file), device="cpu")
    for space in (own, elsewhere):
        settings = PipelineSettings(pair=space.name, minutes=10, device="cpu")
        made = card_of(outcome(), settings, space, ASKED)
        assert str(pair_file.parent) not in made.model_dump_json()
        assert str(models) not in made.model_dump_json()
    assert card_of(outcome(), settings, own, ASKED).target == "Big Model"
    assert made.next_command == f"draftwell serve --pair {pair_file.name}"


def test_a_header_stands_as_it_is_written_and_is_shown_in_no_error(
    run: Any, own_stores: Path
) -> None:
    text = "Authorization: Bearer s3cret, with a comma"
    given = AddressSettings.model_validate({"engine_header": value_of("engine_header", text)})
    assert given.address("http://h:1").headers == (
        ("Authorization", "Bearer s3cret, with a comma"),
    )
    listed = value_of("engine_header", '["A: 1", "B: 2"]')
    assert AddressSettings.model_validate({"engine_header": listed}).engine_header == (
        "A: 1",
        "B: 2",
    )
    for word in ('[{"Authorization": "s3cret"}]', "s3cret"):
        done = run("tune --engine http://127.0.0.1:1 --set", f"engine_header={word}")
        assert done.exit_code == 2
        assert "NAME:VALUE" in done.stderr
        assert "s3cret" not in done.output
