"""The launchers of docs/launchers.md: each is a template that renders to a command that a plain
shell reads, with its values as words."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import yaml

from draftwell.components.engines.launch_template import (
    SPECULATION,
    LaunchTemplate,
    option_words,
)
from draftwell.components.export.launch_options import launch_options
from tests.support.paths import REPO

PAGE = (REPO / "docs" / "launchers.md").read_text(encoding="utf-8")
OPTIONS = launch_options(
    "vllm", {"method": "eagle3", "num_speculative_tokens": 2, "model": "/it's a/$(head)"}
)
FILE = "/home of/speculation-1.yaml"


def blocks(language: str) -> list[str]:
    """Fenced blocks of the page."""
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.S)


def templates() -> Iterator[Any]:
    """Option and text of every launcher and stop command."""
    for block in blocks("bash"):
        for line in block.splitlines():
            words = shlex.split(line)
            for option, text in pairwise(words):
                if option in ("--launcher", "--stop-command"):
                    yield pytest.param(option, text, id=f"{text[:24]} ({option})")


def rendered(option: str, text: str, options: dict[str, Any]) -> str:
    return LaunchTemplate(text, stops=option == "--stop-command").render(
        {
            "speculation_options": option_words(options),
            "speculation_file": [FILE],
            "port": ["8100"],
            "url": ["http://127.0.0.1:8100"],
        }
    )


@pytest.mark.parametrize(("option", "text"), list(templates()))
@pytest.mark.parametrize("options", [OPTIONS, {}], ids=["speculation", "plain"])
def test_an_example_is_read_by_a_plain_shell_with_its_values_as_words(
    option: str, text: str, options: dict[str, Any]
) -> None:
    command = rendered(option, text, options)
    subprocess.run(["/bin/sh", "-n", "-c", command], check=True)
    words = shlex.split(command)
    if "ssh" in words:
        words = shlex.split(words[-1])
    if "{speculation_file}" in text:
        assert any(word.endswith(FILE) for word in words), words
    if "{speculation_options}" in text:
        assert (option_words(OPTIONS)[1] in words) == bool(options)
        assert ("--speculative-config" in words) == bool(options)
    assert "{" not in " ".join(word for word in words if word not in option_words(OPTIONS))


def test_there_is_one_for_each_place_and_no_more_than_the_template() -> None:
    starts = [
        text for option, text in (one.values for one in templates()) if option == "--launcher"
    ]
    for place in ("ssh ", "docker compose", "kubectl", "srun", "ray job submit"):
        assert sum(place in text for text in starts) == 1, place
    assert all(any(f"{{{name}}}" in text for name in SPECULATION) for text in starts)
    assert not any("[[" in text or "<(" in text for text in starts), "bash alone reads that"


def test_files_are_yaml_that_name_what_the_commands_set() -> None:
    compose, deployment = (yaml.safe_load(block) for block in blocks("yaml"))
    service = compose["services"]["engine"]
    set_by_command = {"PORT", "SPECULATION"}
    named = set(re.findall(r"\$\{(\w+)\}", yaml.safe_dump(service)))
    assert named == set_by_command
    [container] = deployment["spec"]["template"]["spec"]["containers"]
    mounted = container["volumeMounts"][0]["mountPath"]
    assert f"{mounted}/config.yaml" in container["args"]
    assert "--from-file=config.yaml=" in PAGE
    [volume] = deployment["spec"]["template"]["spec"]["volumes"]
    assert f"configmap {volume['configMap']['name']} " in PAGE
