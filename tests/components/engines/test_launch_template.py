"""The command template: no value is read as shell, and plain decoding has no option left over."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from hypothesis import given, strategies as st

from draftwell.components.engines.launch_template import (
    LaunchTemplate,
    option_words,
)
from tests.support.errors import raises_code

PRINT = f"{sys.executable} -c 'import json, sys; print(json.dumps(sys.argv[1:]))'"
HOSTILE = {"speculative-config": {"model": 'it\'s $(touch /tmp/x) `id` "q" \\ ; & | \n*'}}


def words_of(text: str) -> list[str]:
    """What a command gets, by the shell."""
    made = subprocess.run(["/bin/sh", "-c", text], capture_output=True, check=True, text=True)
    found: list[str] = json.loads(made.stdout)
    return found


def rendered(template: str, options: dict[str, object]) -> str:
    values = {"speculation_options": option_words(options), "port": ["8001"]}
    return LaunchTemplate(template).render(values)


@pytest.mark.parametrize("shell", ["{command}", "/bin/sh -c '{quoted}'"])
def test_hostile_values_are_words_of_the_command_and_nothing_else(shell: str) -> None:
    command = f"{PRINT} --port {{port}} {{speculation_options}}"
    inner = command.replace("'", "'\"'\"'") if "quoted" in shell else command
    template = shell.replace("{command}", inner).replace("{quoted}", inner)
    given_words = words_of(rendered(template, HOSTILE))
    assert given_words[:3] == ["--port", "8001", "--speculative-config"]
    assert json.loads(given_words[3]) == HOSTILE["speculative-config"]
    assert len(given_words) == 4
    assert words_of(rendered(template, {})) == ["--port", "8001"]


@given(st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), max_size=30))
def test_any_value_is_one_word_of_the_shell_that_reads_quoted_text(value: str) -> None:
    template = LaunchTemplate("ssh host 'serve {url} {speculation_options}'")
    import shlex

    _, _, sent = shlex.split(template.render({"url": [value], "speculation_options": ["{}"]}))
    assert shlex.split(sent) == ["serve", value, "{}"]


def test_plain_decoding_keeps_other_options() -> None:
    template = "serve --eager {speculation_options} --fast {speculation_options}"
    assert rendered(template, {}).split() == ["serve", "--eager", "--fast"]


def test_shell_and_json_of_the_command_stay_as_they_are() -> None:
    text = 'A=${HOME} serve --x \'{"a": {"b": 1}}\' ${K:-3} {speculation_options}'
    assert rendered(text, {}) == text.replace("{speculation_options}", "")


@pytest.mark.parametrize(
    ("template", "named"),
    [
        ("serve --port {prot} {speculation_options}", "{prot}"),
        ("serve --speculative-config {speculation}", "{speculation_options}"),
        ("serve --port {port}", "{speculation_options}"),
        ("  ", "empty"),
        ('ssh host "serve {speculation_options}"', "double quotes"),
        ("ssh host 'sh -c \"serve {speculation_options}\"'", "double quotes"),
        ("cat > f <<END\n{speculation_options}\nEND", "here-document"),
        ("serve --api-key sk-123 {speculation_options}", "key"),
        ("serve --api-key='sk-123' {speculation_options}", "key"),
        ("serve --admin-api-key sk-123 {speculation_options}", "key"),
        ("VLLM_API_KEY=sk-123 serve {speculation_options}", "key"),
        ("env HF_TOKEN='sk-123' serve {speculation_options}", "key"),
    ],
)
def test_a_mistake_in_the_command_is_refused_before_anything_starts(
    template: str, named: str
) -> None:
    with raises_code("bad_launcher", "launcher", named) as caught:
        LaunchTemplate(template)
    assert "sk-123" not in str(caught.value)


def test_a_key_by_a_variable_and_a_command_that_ends_an_engine_are_fine() -> None:
    LaunchTemplate(
        'TOKENIZERS_PARALLELISM=false K_KEY="$KEY" serve --api-key "$KEY" {speculation_options}'
    )
    assert LaunchTemplate("kill {port}", stops=True).render({"port": ["1"]}) == "kill 1"
