"""Settings of a command: what few people change is no option of its own, but a key of
`--set KEY=VALUE`, or of a YAML file that `--settings` names.

A parameter of a command that is annotated with `typer.Option` is an option; one that is annotated
with pydantic's `Field` is a setting. Both are in the context's `params`, by the same names.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from itertools import pairwise
from pathlib import Path
from textwrap import wrap
from types import UnionType
from typing import Annotated, Any, Literal, NoReturn, Union, get_args, get_origin

import typer
import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, create_model
from pydantic.fields import FieldInfo
from typer.core import TyperCommand

from draftwell.flows.cli.renamed import RENAMED
from draftwell.serving.errors import DraftwellError
from draftwell.serving.files import read_text
from draftwell.serving.settings import refuse_empty

NAMED = "draftwell.named_settings"
"""Where a context keeps the names of the settings that were given."""
WORDS, FILE, CONTEXT = "set_words", "settings_file", "called_in"
HELP = "help"
"""In place of KEY=VALUE: explains the settings."""
STRATEGY = "STRATEGY.PARAMETER"
NAMES_OF_KINDS: Mapping[Any, str] = {int: "number", float: "number", Path: "path"}
INDENTED: Mapping[str, Any] = {"initial_indent": "    ", "subsequent_indent": "    "}
NOTHING = ("", "~", "null")
"""Texts that say that a setting has no value."""

SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="A setting below; help explains all."),
]
FileOption = Annotated[
    Path | None, typer.Option("--settings", metavar="FILE", help="YAML file of settings.")
]


@dataclass(frozen=True)
class OtherKeys:
    """Annotates the parameter that takes further keys as they were written: those of the parameters
    of strategies, or these; `several` may be named several times, and `fields` has what each of
    them is."""

    names: tuple[str, ...] = (STRATEGY,)
    several: tuple[str, ...] = ()
    fields: Callable[[], Mapping[str, FieldInfo]] = dict


class Keys(BaseModel):
    """Base of the settings of a command."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        coerce_numbers_to_str=True,
        allow_inf_nan=False,
        arbitrary_types_allowed=True,
    )


class Command(TyperCommand):
    """A command that takes settings, and says the new names of earlier options."""

    settings: type[Keys] = Keys
    others: tuple[str, OtherKeys] | None = None

    # typer brings its own copy of click, or takes the installed one
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given = tuple(args)
        if not ctx.resilient_parsing and ("--set", HELP) in pairwise(given):
            typer.echo(self.explained())
            ctx.exit()
        try:
            refuse_empty(self, ctx, args)
            rest = super().parse_args(ctx, args)
        except Exception as error:
            if type(error).__name__ == "NoSuchOption":
                self.refuse_old_option(str(vars(error)["option_name"]))
            elif "--json" in given and "unexpected extra argument" in str(error):
                self.refuse_old_option("--json")  # a flag now, which named a file
            raise
        if not ctx.resilient_parsing:
            self.take_settings(ctx)
        return rest

    def invoke(self, ctx: Any) -> Any:
        own = {one.name for one in self.params}
        given = {name: value for name, value in ctx.params.items() if name in own}
        return ctx.invoke(self.callback, **given)

    def take_settings(self, ctx: Any) -> None:
        """Put the settings into the context, as if each were an option."""
        file, words = ctx.params.pop(FILE, None), ctx.params.pop(WORDS, None) or ()
        given = [*([] if file is None else settings_of_file(file)), *map(split_word, words)]
        found: dict[str, Any] = {}
        others: dict[str, str] = {}
        for one in joined(given, self.several()):
            if one.key in self.settings.model_fields:
                found[one.key] = read_value(self.settings, one)
            elif self.others is not None and takes(self.others[1], one.key):
                others[one.key] = one.text
            else:
                self.refuse_unknown(one)
        ctx.params |= dict(self.settings()) | found
        if self.others is not None:
            ctx.params[self.others[0]] = others
        more = [self.others[0]] if self.others and others else ()
        ctx.meta[NAMED] = frozenset([*found, *more])

    def all_keys(self) -> list[str]:
        """All keys that the command takes."""
        return [*self.settings.model_fields, *(self.others[1].names if self.others else ())]

    def explained(self) -> str:
        """What each setting is: type, default, and a sentence."""
        known = {**(self.others[1].fields() if self.others else {}), **self.settings.model_fields}
        lines = ["Settings, of --set KEY=VALUE:"]
        for key in self.all_keys():
            if (field := known.get(key)) is None:
                lines += ["", f"{key}: `draftwell list strategies` names those of each"]
                continue
            default = None if field.is_required() else field.default
            shown = "" if default in (None, (), [], "") else f", default {as_written(default)}"
            lines += ["", f"{key}: {kind_in_words(field.annotation)}{shown}"]
            lines += wrap(field.description or "", 80, **INDENTED)
        return "\n".join(lines)

    def several(self) -> list[str]:
        """Keys that have several values, and may be named once for each."""
        fields = self.settings.model_fields.items()
        own = [key for key, field in fields if is_several(field.annotation)]
        return [*own, *(self.others[1].several if self.others else ())]

    def option(self, key: str) -> str | None:
        """How the command spells the option of a key, if it has one."""
        spelled = {str(one.name): str(one.opts[0]) for one in self.params}
        spelled |= {
            str(one.opts[0]).lstrip("-").replace("-", "_"): one.opts[0] for one in self.params
        }
        return spelled.get(key)

    def refuse_unknown(self, one: Given) -> NoReturn:
        """Say which keys there are, and which one was meant."""
        if (option := self.option(one.key)) is not None:
            why = f"it is an option, {option}"
        elif gone := RENAMED.get(str(self.name), {}).get(f"--{one.key.replace('_', '-')}"):
            why = f"it is now {gone}"
        elif not self.all_keys():
            why = "the command takes none"
        else:
            close = get_close_matches(one.key, self.all_keys(), 1)
            if not close and STRATEGY in self.all_keys():
                close = [f"STRATEGY.{one.key}"]
            meant = f"did you mean {close[0]}? " if close else ""
            why = f"{meant}the settings are {', '.join(self.all_keys())}"
        raise DraftwellError(
            f"`draftwell {self.name}` has no setting {one.key!r}: {why}", code="unknown_setting"
        )

    def refuse_old_option(self, option: str) -> None:
        """Say the new name of an option that the command had, if it had one."""
        key = option.lstrip("-").replace("-", "_")
        new = RENAMED.get(str(self.name), {}).get(option)
        if new is None and (field := self.settings.model_fields.get(key)) is not None:
            new = f"--set {key}={'true' if field.annotation is bool else 'VALUE'}"
        elif new is None and key in self.all_keys():
            new = f"--set {key}=VALUE"
        if new is not None:
            raise DraftwellError(f"{option} is now {new}", code="renamed_option")


@dataclass(frozen=True)
class Given:
    """A setting as it was given."""

    key: str
    value: Any
    where: str
    written: bool

    @property
    def text(self) -> str:
        """The value as a person writes it."""
        return self.value if isinstance(self.value, str) else json.dumps(self.value, default=str)


def split_word(word: str) -> Given:
    """The setting of `--set KEY=VALUE`."""
    key, equals, value = word.partition("=")
    if not equals or not key.strip():
        raise DraftwellError(
            f"--set {word!r} is not KEY=VALUE, for example --set threads=4; --set {HELP} explains "
            "all",
            code="bad_setting",
        )
    return Given(key.strip(), value.strip(), f"--set {key.strip()}", written=True)


def settings_of_file(file: Path) -> Iterable[Given]:
    """The settings of a YAML file; what is below another key is joined to it with a dot."""
    try:
        found = yaml.safe_load(read_text(file))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise DraftwellError(
            f"{file} is no YAML file: {error}", code="bad_settings_file"
        ) from error
    if not isinstance(found, dict):
        raise DraftwellError(
            f"{file} holds no settings: write a line such as `threads: 4` for each",
            code="bad_settings_file",
        )
    for key, value in found.items():
        below = value.items() if isinstance(value, dict) else [(None, value)]
        for name, inner in below:
            joined = str(key) if name is None else f"{key}.{name}"
            yield Given(joined, inner, f"{file}: {joined}", written=False)


def joined(given: Iterable[Given], several: Iterable[str]) -> list[Given]:
    """The settings with those of the words in the place of those of the file; what is named by
    several words has the values of all of them.

    Raises:
        DraftwellError: words name a setting twice that has one value (`setting_named_twice`).
    """
    found: dict[str, Given] = {}
    for one in given:
        before = found.get(one.key)
        if before is not None and before.written and one.written:
            if one.key not in several:
                raise DraftwellError(
                    f"{one.where} is there twice: write it once", code="setting_named_twice"
                )
            values = [*as_list(before.value), *as_list(one.value)]
            one = replace(one, value=values)
        found[one.key] = one
    return list(found.values())


def as_list(value: Any) -> list[Any]:
    """The values of a setting that has several."""
    value = from_text(list[str], value) if isinstance(value, str) else value
    return value if isinstance(value, list) else [value]


def takes(others: OtherKeys, key: str) -> bool:
    """Whether a key is one of the further ones."""
    return key in others.names or ("." in key and STRATEGY in others.names)


def read_value(settings: type[Keys], given: Given) -> Any:
    """The value of a setting, of the type that it has.

    Raises:
        DraftwellError: it has another type, or is out of bounds (`bad_setting`).
    """
    value = None if given.value == "" else given.value
    if given.written and isinstance(value, str):
        value = from_text(settings.model_fields[given.key].annotation, value)
    try:
        return getattr(settings.model_validate({given.key: value}), given.key)
    except ValidationError as error:
        problem = error.errors()[0]["msg"].removeprefix("Value error, ")
    raise DraftwellError(f"{given.where}: {problem}, not {given.value!r}", code="bad_setting")


def kinds_of(annotation: Any) -> list[Any]:
    """The types that a setting may have."""
    union = get_origin(annotation) in (Union, UnionType)
    return list(get_args(annotation)) if union else [annotation]


def is_several(annotation: Any) -> bool:
    """Whether a setting has several values."""
    return any(get_origin(kind) in (list, tuple) for kind in kinds_of(annotation))


def kind_in_words(annotation: Any) -> str:
    """A type as people name it: what a setting takes."""
    found = list[str]()
    for kind in kinds_of(annotation):
        if get_origin(kind) is Literal:
            found += map(str, get_args(kind))
        elif get_origin(kind) in (list, tuple):
            found.append("one or several, with commas")
        elif kind is bool:
            found += ["true", "false"]
        elif kind is not type(None):
            found.append(NAMES_OF_KINDS.get(kind, "text"))
    return " or ".join(dict.fromkeys(found))


def as_written(value: Any) -> str:
    """A default as it would be given to `--set`."""
    if isinstance(value, list | tuple):
        return ",".join(map(as_written, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def from_text(annotation: Any, text: str) -> Any:
    """What a text says as a value of a type: YAML, but the text itself for a text or a path, and
    for several values that are not written as a list of YAML."""
    if text in NOTHING:
        return None
    meant = from_yaml(text)
    if is_several(annotation):
        return meant if isinstance(meant, list) else text
    kinds = [kind for kind in kinds_of(annotation) if isinstance(kind, type)]
    itself = meant is None or any(issubclass(kind, str | Path) for kind in kinds)
    return text if itself else meant


def from_yaml(text: str) -> Any:
    """A text as YAML; as it is where it is none."""
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        return text


def add_command(
    app: typer.Typer,
    function: Callable[..., None],
    name: str | None = None,
    *,
    file: bool = False,
    **options: Any,
) -> None:
    """Register a command, with the settings that its function's parameters are annotated with.

    Args:
        file: whether it takes `--settings FILE`, too.
    """
    signature = inspect.signature(function, eval_str=True)
    fields: dict[str, Any] = {}
    others: tuple[str, OtherKeys] | None = None
    shown: list[inspect.Parameter] = []
    for one in signature.parameters.values():
        marks = get_args(one.annotation)[1:]
        if any(isinstance(mark, FieldInfo) for mark in marks):
            fields[one.name] = (one.annotation, one.default)
        elif found := [mark for mark in marks if isinstance(mark, OtherKeys)]:
            others = (one.name, found[0])
        else:
            shown.append(one)
    model = create_model("Keys", __base__=Keys, **fields)
    if fields or others:
        extra = {WORDS: SetOption, **({FILE: FileOption} if file else {})}
        shown += [
            inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
            for key, kind in extra.items()
        ]

    contexts = [one.name for one in shown if one.annotation is typer.Context]
    if not contexts:
        kind = inspect.Parameter.KEYWORD_ONLY
        shown.append(inspect.Parameter(CONTEXT, kind, annotation=typer.Context))
    names = [*fields, *([others[0]] if others else ())]

    @functools.wraps(function)
    def run(**given: Any) -> None:
        context = given[contexts[0] if contexts else CONTEXT]
        options = {
            name: value for name, value in given.items() if name not in (WORDS, FILE, CONTEXT)
        }
        function(**options, **{name: context.params[name] for name in names})

    run.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
    text = inspect.cleandoc(function.__doc__ or "")
    paragraphs = [" ".join(part.split()) for part in text.split("\n\n")]
    cls = type("Command", (Command,), {"settings": model, "others": others})
    keys = [*fields, *(others[1].names if others else ())]
    epilog = f"Settings: {', '.join(keys)}." if keys else None
    app.command(name, cls=cls, help="\n\n".join(paragraphs), epilog=epilog, **options)(run)


def named(context: typer.Context, name: str) -> bool:
    """Whether an option or a setting was named on the command line."""
    source = context.get_parameter_source(name)
    on_line = source is not None and source.name == "COMMANDLINE"
    return on_line or name in context.meta.get(NAMED, ())


def spelled(context: typer.Context, name: str) -> str:
    """An option or a setting as a person writes it."""
    command: Any = context.command
    option: str | None = command.option(name)
    return f"--set {name}" if option is None else option


def names_of(command: Any) -> list[str]:
    """Names of all options and settings of a command."""
    own = (WORDS, FILE, CONTEXT)
    options = [str(one.name) for one in command.params if one.name not in own]
    others = () if command.others is None else (command.others[0],)
    return [*options, *command.settings.model_fields, *others]


def settings_reference(command: Any) -> Mapping[str, FieldInfo]:
    """Key → what it is, of the settings of a command, for the reference."""
    fields: Mapping[str, FieldInfo] = command.settings.model_fields
    return fields
