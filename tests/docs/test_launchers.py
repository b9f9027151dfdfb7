"""The launchers of docs/launchers.md and examples/launchers: each is a template that renders to a
command that a plain shell reads, with its values as words."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from configparser import ConfigParser
from pathlib import Path
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
FILES = REPO / "examples" / "launchers"
OPTIONS = launch_options(
    "vllm", {"method": "eagle3", "num_speculative_tokens": 2, "model": "/it's a/$(head)"}
)
FILE = "/home of/speculation-1.yaml"


def scripts() -> Iterator[str]:
    """The page's blocks, and the examples."""
    yield from re.findall(r"```bash\n(.*?)```", PAGE, re.S)
    yield from (path.read_text(encoding="utf-8") for path in sorted(FILES.glob("*.sh")))


def templates() -> Iterator[Any]:
    """Variable and text of every launcher and stop command."""
    for script in scripts():
        for word in shlex.split(script, comments=True):
            name, equals, text = word.partition("=")
            if equals and name in ("LAUNCHER", "STOP"):
                yield pytest.param(name, text, id=f"{text[:24]} ({name})")


def rendered(name: str, text: str, options: dict[str, Any]) -> str:
    return LaunchTemplate(text, stops=name == "STOP").render(
        {
            "speculation_options": option_words(options),
            "speculation_file": [FILE],
            "port": ["8100"],
            "url": ["http://127.0.0.1:8100"],
        }
    )


@pytest.mark.parametrize(("name", "text"), list(templates()))
@pytest.mark.parametrize("options", [OPTIONS, {}], ids=["speculation", "plain"])
def test_an_example_is_read_by_a_plain_shell_with_its_values_as_words(
    name: str, text: str, options: dict[str, Any]
) -> None:
    command = rendered(name, text, options)
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
    starts = [text for name, text in (one.values for one in templates()) if name == "LAUNCHER"]
    assert len(starts) == 6
    for place in ("ssh ", "docker compose", "kubectl", "srun", "ray job submit"):
        assert sum(place in text for text in starts) == 1, place
    assert all(any(f"{{{name}}}" in text for name in SPECULATION) for text in starts)
    assert not any("[[" in text or "<(" in text for text in starts), "bash alone reads that"


def test_files_are_yaml_that_name_what_the_commands_set() -> None:
    compose, deployment = (
        yaml.safe_load((FILES / name).read_text(encoding="utf-8"))
        for name in ("compose.yaml", "kubernetes.yaml")
    )
    service = compose["services"]["engine"]
    set_by_command = {"PORT", "SPECULATION"}
    named = set(re.findall(r"\$\{(\w+)\}", yaml.safe_dump(service)))
    assert named == set_by_command
    [container] = deployment["spec"]["template"]["spec"]["containers"]
    mounted = container["volumeMounts"][0]["mountPath"]
    assert f"{mounted}/config.yaml" in container["args"]
    started = (FILES / "kubernetes.sh").read_text(encoding="utf-8")
    assert "--from-file=config.yaml=" in started
    [volume] = deployment["spec"]["template"]["spec"]["volumes"]
    assert f"configmap {volume['configMap']['name']} " in started


def test_the_unit_starts_the_script_of_a_bundle_with_its_variables() -> None:
    unit = ConfigParser(interpolation=None, strict=False)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read(REPO / "examples" / "vllm.service", encoding="utf-8")
    script, *options = shlex.split(unit["Service"]["ExecStart"])
    assert script.endswith("/dist/vllm/my-pair/current/serve.sh")
    assert options == ["--port", "8000"]
    bundle = REPO / "registry" / "bundles" / "vllm"
    templates_of_bundle = "".join(
        path.read_text(encoding="utf-8") for path in bundle.rglob("serve.sh*")
    )
    text = (REPO / "examples" / "vllm.service").read_text(encoding="utf-8")
    variables = re.findall(r"^Environment=(\w+)=", text, re.M)
    assert variables == ["PYTHON", "DRAFTWELL_SPOOL", "DRAFTWELL_SIGNATURE_KEY"]
    assert all(name in templates_of_bundle for name in ("PYTHON", "DRAFTWELL_SIGNATURE_KEY"))
    assert unit["Service"]["KillMode"] == "mixed"


def test_the_unit_of_the_watchdog_is_a_command_that_the_program_takes() -> None:
    from draftwell.flows.cli.main import all_commands

    unit = ConfigParser(interpolation=None, strict=False)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read(REPO / "examples" / "monitor.service", encoding="utf-8")
    program, name, *words = shlex.split(unit["Service"]["ExecStart"])
    assert (Path(program).name, name) == ("draftwell", "monitor")
    given = all_commands()["monitor"].make_context("monitor", words).params
    assert (given["engine"], given["every"], given["probes_per_hour"]) == (
        "http://127.0.0.1:8000",
        60.0,
        24,
    )
    assert unit["Service"]["RestartPreventExitStatus"] == "2", "a mistake is no reason to restart"
