"""The command template that starts an engine, and how it becomes a command for the shell.

A placeholder outside of quotes becomes words of the command, or none; inside of single quotes, as
in `ssh host 'vllm serve … {speculation_options}'`, words of the shell that reads the quoted text.
So no value is ever read as shell.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from draftwell.serving.errors import DraftwellError
from draftwell.serving.files import read_text

SPECULATION = ("speculation_options", "speculation_file")
"""At least one of them is needed: else every start would decode in the same way."""
PLACES = ("port", "url")
"""With one of them in it, a template starts engines at two addresses."""
PLACEHOLDERS = (*SPECULATION, *PLACES)
PATTERN = re.compile(r"(?<!\$)\{([a-z_]+)\}")
LITERAL_KEY = re.compile(
    r"(--[\w-]*api-?key(=|\s+)|\b\w*(KEY|TOKEN|SECRET|PASSWORD)=)[\"']?[^\s\"'$]"
)

Options = Mapping[str, Any]
"""An engine's options by name, without dashes; empty: plain decoding. True is an option without a
value; mappings and lists are JSON."""


class LaunchTemplate:
    """A command with placeholders, for `sh -c`.

    Args:
        text: such as `vllm serve MODEL --port {port} {speculation_options}`.
        stops: whether it is the command that ends an engine, which needs no speculation.
    Raises:
        DraftwellError: an unknown placeholder, none for the speculation, one inside of double
            quotes or with a here-document, or a key that lists of processes would show
            (`bad_launcher`).
    """

    def __init__(self, text: str, *, stops: bool = False):
        self.text = text
        self.option = "stop_command" if stops else "launcher"
        self._found = list(self._placeholders())
        names = {match[1] for match, _ in self._found}
        if not text.strip():
            raise self._refused("is empty: write the command")
        if not stops and not names & set(SPECULATION):
            raise self._refused(
                "does not say how to speculate: add {speculation_options}, or the engine's own "
                "option with {speculation_file}"
            )
        if names and "<<" in text:
            raise self._refused("has a here-document: let it read {speculation_file} instead")
        if LITERAL_KEY.search(text):
            raise self._refused(
                "holds a key, which every user of the machine sees: export it as a variable such "
                'as VLLM_API_KEY before, and leave it out or write "$VLLM_API_KEY"'
            )
        self.takes_address = bool(names & set(PLACES))

    def render(self, values: Mapping[str, Sequence[str]]) -> str:
        """The command.

        Args:
            values: placeholder → words.

        >>> template = LaunchTemplate("ssh gpu 'serve {speculation_options}'")
        >>> print(template.render({"speculation_options": ["--spec", "a b"]}))
        ssh gpu 'serve --spec '"'"'a b'"'"''
        """
        parts, end = [], 0
        for match, quoted in self._found:
            words = " ".join(map(shlex.quote, values.get(match[1], ())))
            if quoted:
                words = words.replace("'", "'\"'\"'")
            parts += [self.text[end : match.start()], words]
            end = match.end()
        return "".join((*parts, self.text[end:]))

    def _placeholders(self) -> Iterator[tuple[re.Match[str], bool]]:
        """Each, and whether it is inside of single quotes."""
        for match in PATTERN.finditer(self.text):
            name = match[1]
            if name not in PLACEHOLDERS:
                known = ", ".join(f"{{{one}}}" for one in PLACEHOLDERS)
                raise self._refused(f"has {{{name}}}: known are {known}")
            quotes = open_quotes(self.text[: match.start()])
            if '"' in quotes or "`" in quotes:
                raise self._refused(
                    f"has {{{name}}} inside of double quotes: write it outside of quotes, or "
                    "inside of single ones"
                )
            yield match, bool(quotes)

    def _refused(self, why: str) -> DraftwellError:
        return DraftwellError(f"{self.option} {why}", code="bad_launcher")


def launcher_text(launcher: str) -> str:
    """The command that starts an engine; where a file was named, that in it.

    Raises:
        DraftwellError: one word, as a path is, of which there is no file, or a file that is no
            text (`bad_launcher`).
    """
    if os.path.isfile(launcher):
        try:
            return read_text(Path(launcher)).strip()
        except (OSError, UnicodeDecodeError) as error:
            raise DraftwellError(
                f"{launcher} cannot be read as text: name the launcher's file, or its command",
                code="bad_launcher",
            ) from error
    if re.fullmatch(r"[^\s{]+", launcher):
        raise DraftwellError(
            f"no file {launcher}: name the launcher's file, or write its command",
            code="bad_launcher",
        )
    return launcher


def open_quotes(text: str) -> str:
    """The quotes that are open at the end of a piece of shell, the outer one first; inside of
    single quotes those of the shell that reads the quoted text, too.

    >>> open_quotes("a 'b"), open_quotes("a 'b" + '"c'), open_quotes('"'), open_quotes("")
    ("'", '\\'"', '"', '')
    """
    quotes, escaped = "", False
    for letter in text:
        if letter == "'" and quotes.startswith("'"):
            quotes, escaped = "", False
        elif escaped:
            escaped = False
        elif letter == "\\":
            escaped = True
        elif quotes and letter == quotes[-1]:
            quotes = quotes[:-1]
        elif letter in "\"'`" and quotes in ("", "'"):
            quotes += letter
    return quotes


def option_words(options: Options) -> list[str]:
    """Options as words of a command.

    >>> option_words({"speculative-config": {"method": "ngram"}, "spec-draft-n-max": 3})
    ['--speculative-config', '{"method": "ngram"}', '--spec-draft-n-max', '3']
    """
    words = []
    for name, value in options.items():
        words.append(f"--{name}")
        if value is not True:
            words.append(json.dumps(value) if isinstance(value, (Mapping, list)) else str(value))
    return words
