"""Pages that mkdocs makes from the source: commands, settings, strategies, error codes; and files
of the repository's root as pages.

`pages()` returns path -> Markdown and needs no mkdocs; the two hooks at the end hand it over and
rewrite links.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
PACKAGES = ("flows", "components", "registry", "serving")
INCLUDED = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "serving/runtime/strategies/PAPERS.md": "strategy_papers.md",
}
"""File of the repository -> page of the site."""
OUTSIDE = ("docs/log.md", "docs/proofs.md")
"""Pages that are read in the repository alone (`exclude_docs` of mkdocs.yml)."""
NAMED_MODELS = ("Thresholds", "PairSpec", "ModelSource", "PackageFile", "DriftLimits")
"""Models that people write as YAML; classes called ...Settings are found by their name."""


def pages() -> dict[str, str]:
    """Path of every made page -> its Markdown."""
    return {
        "reference/cli.md": commands(),
        "reference/settings.md": settings(),
        "reference/strategies.md": strategies(),
        "reference/errors.md": error_codes(),
        **{page: (REPO / file).read_text(encoding="utf-8") for file, page in INCLUDED.items()},
    }


def cell(value: Any) -> str:
    """A value as text of a table's cell; what is in backticks stays as it is."""
    escaped = {"|": "\\|", "<": "&lt;"}
    return re.sub(
        r"`[^`]*`|[|<]", lambda match: escaped.get(match[0], match[0]), " ".join(str(value).split())
    )


def table(header: tuple[str, ...], rows: list[tuple[Any, ...]]) -> str:
    """A Markdown table; empty where there are no rows."""
    if not rows:
        return ""
    lines = [header, ("---",) * len(header), *(tuple(cell(value) for value in row) for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def commands() -> str:
    """All commands of both programs with their options."""
    from typer.main import get_command

    from draftwell.flows.cli.main import all_commands
    from draftwell.serving.server.main import app as server

    server_command: Any = get_command(server)
    context = server_command.context_class(server_command)
    found = [(f"draftwell {name}", command) for name, command in sorted(all_commands().items())]
    parts = [
        "# Commands\n\nMade from the programs themselves; `--help` of each command says the same.\n"
    ]
    for name, command in [*found, ("draftwell-serve", server_command)]:
        help_text = re.sub(
            r"^Example: (.*)",
            lambda match: f"```bash\n{match[1]}\n```",
            (command.help or "").replace("\b", ""),
            flags=re.MULTILINE,
        )
        rows = [
            (
                ", ".join(f"`{flag}`" for flag in (*p.opts, *p.secondary_opts)),
                f"`{p.display_type(context).strip('<>').replace('|', ', ')}`",
                "required" if p.required else default_of(p),
                getattr(p, "help", "") or "",
            )
            for p in command.params
            if p.name != "help"
        ]
        parts.append(
            f"## {name}\n\n{help_text}\n\n{table(('option', 'type', 'default', 'what'), rows)}"
        )
        parts += settings_of_command(command)
    return "\n".join(parts)


def settings_of_command(command: Any) -> list[str]:
    """The settings that a command takes with `--set KEY=VALUE`; of draftwell-serve none."""
    model = getattr(command, "settings", None)
    if model is None or not command.all_keys():
        return []
    rows: list[tuple[Any, ...]] = fields_of(model)
    if command.others is not None:
        from pydantic import create_model

        names, known = command.others[1].names, command.others[1].fields()
        fields: dict[str, Any] = {
            key: (known[key].annotation, known[key]) for key in names if key in known
        }
        rows += fields_of(create_model("OtherSettings", **fields))
        told = "`draftwell list strategies` names those of each"
        rows += [(f"`{key}`", "", "", "", told) for key in names if key not in known]
    return ["Settings:\n", table(("key", "type", "default", "bounds", "what"), rows)]


def default_of(parameter: Any) -> str:
    """The default of an option, empty where it has none."""
    value = parameter.default
    return "" if value is None or callable(value) or value in ((), []) else f"`{value}`"


def model_classes() -> Iterator[Any]:
    """Every settings model of the source, in the order of files; modules are imported one by
    one."""
    from pydantic import BaseModel

    for path, tree in sources():
        names = [
            node.name
            for node in tree.body
            if isinstance(node, ast.ClassDef)
            and (node.name.endswith("Settings") or node.name in NAMED_MODELS)
        ]
        module = importlib.import_module(".".join(path.with_suffix("").parts)) if names else None
        yield from (
            found for name in names if issubclass(found := getattr(module, name), BaseModel)
        )


def settings() -> str:
    """The settings that flows, commands, pairs, gates and drift take."""
    parts = ["# Settings\n\nMade from the models that check them. Unknown keys are refused.\n"]
    for model in model_classes():
        rows = fields_of(model)
        parts.append(
            (
                f"## {model.__name__}\n\n`{model.__module__}`. "
                f"{inspect.cleandoc(model.__doc__ or '').partition(chr(10) * 2)[0]}\n\n"
            )
            + table(("key", "type", "default", "bounds", "what"), rows)
        )
    return "\n".join(parts)


def fields_of(model: Any) -> list[tuple[Any, ...]]:
    """A row for each field of a model."""
    properties = model.model_json_schema().get("properties", {})
    return [
        (
            f"`{name}`",
            field_type(schema := properties.get(field.alias or name, {})),
            initial(field),
            bounds(schema),
            field.description or "",
        )
        for name, field in model.model_fields.items()
    ]


def initial(field: Any) -> str:
    """The default of a field, or that it has none."""
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    return "" if value is None else f"`{value}`"


def field_type(schema: dict[str, Any]) -> str:
    """Types of a field in JSON's terms."""
    kinds = schema.get("anyOf", [schema])
    return " or ".join(
        kind.get("type") or kind.get("$ref", "any").rpartition("/")[2] for kind in kinds
    )


def bounds(schema: dict[str, Any]) -> str:
    """Limits of a field."""
    signs = {
        "minimum": "≥",
        "exclusiveMinimum": ">",
        "maximum": "≤",
        "exclusiveMaximum": "<",
        "pattern": "matches",
        "enum": "one of",
    }
    return ", ".join(
        f"{sign} `{kind[key]}`"
        for kind in schema.get("anyOf", [schema])
        for key, sign in signs.items()
        if key in kind
    )


def strategies() -> str:
    """Every strategy with its parameters."""
    from draftwell.serving.runtime.strategies import STRATEGIES
    from draftwell.serving.runtime.strategies.catalogue import describe

    parts = [
        "# Strategies\n\nMade from the strategies' own settings. Rules and sources: "
        "[strategies and their papers](../strategy_papers.md).\n"
    ]
    for name, cls in STRATEGIES.items():
        info = describe(cls)
        rows = [
            (
                f"`{key}`",
                p["type"],
                "required" if p["required"] else f"`{p['default']}`",
                limits(p),
                p["description"],
            )
            for key, p in info["parameters"].items()
        ]
        needs = ", ".join([*info["models"], *info["artifacts"]])
        parts.append(
            (
                f"## {name}\n\n{'Lossless' if info['lossless'] else 'Lossy'}. Needs: {needs}. "
                f"Source: {info['paper']}.\n\n"
            )
            + table(("parameter", "type", "default", "bounds", "what"), rows)
        )
    return "\n".join(parts)


def limits(parameter: dict[str, Any]) -> str:
    """Bounds or choices of a strategy's parameter."""
    if parameter["choices"]:
        return ", ".join(map(str, parameter["choices"]))
    low = (
        []
        if parameter["minimum"] is None
        else [f"{'>' if parameter['exclusive_minimum'] else '≥'} {parameter['minimum']}"]
    )
    return ", ".join(low + ([] if parameter["maximum"] is None else [f"≤ {parameter['maximum']}"]))


def sources() -> Iterator[tuple[Path, ast.Module]]:
    """Every module of the packages: path in the repository, and its tree."""
    for package in PACKAGES:
        for path in sorted((REPO / package).rglob("*.py")):
            yield path.relative_to(REPO), ast.parse(path.read_text(encoding="utf-8"))


def error_codes() -> str:
    """Code of every error with the messages that carry it; `…` stands for names and numbers."""
    found = {
        (code, text, path.as_posix())
        for path, tree in sources()
        for node in ast.walk(tree)
        for code, text in codes_of(node)
    }
    rows = [(f"`{code}`", text, f"`{path}`") for code, text, path in sorted(found)]
    return (
        "# Error codes\n\nThe command line prints an error as one line and exits with 2; "
        "the server puts the code into the body of its "
        "answer. Scripts should compare the code, never the text.\n\n"
        + table(("code", "message", "raised in"), rows)
    )


def codes_of(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Code and message of an error class (`code = "..."` and its docstring), of settings
    (`error_code`), or of a call with `code="..."`."""
    if isinstance(node, ast.ClassDef):
        yield from settings_codes(node)
        for line in node.body:
            names = (
                line.targets
                if isinstance(line, ast.Assign)
                else [line.target]
                if isinstance(line, ast.AnnAssign)
                else []
            )
            if (
                isinstance(line, ast.Assign | ast.AnnAssign)
                and isinstance(line.value, ast.Constant)
                and "code" in map(ast.unparse, names)
            ):
                yield str(line.value.value), (ast.get_docstring(node) or "").partition("\n")[0]
    if isinstance(node, ast.Call) and node.args:
        for keyword in node.keywords:
            if (
                keyword.arg == "code"
                and isinstance(keyword.value, ast.Constant)
                and isinstance(keyword.value.value, str)
            ):
                yield keyword.value.value, " ".join(map(message, node.args[:2]))


def settings_codes(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    """Code of a class of settings whose values are refused in one line."""
    for line in node.body:
        if isinstance(line, ast.Assign | ast.AnnAssign) and line.value is not None:
            names = (
                ast.unparse(line.targets[0] if isinstance(line, ast.Assign) else line.target)
                .strip("()")
                .split(", ")
            )
            values = line.value.elts if isinstance(line.value, ast.Tuple) else [line.value]
            for name, value in zip(names, values, strict=False):
                if name == "error_code" and isinstance(value, ast.Constant):
                    yield (
                        str(value.value),
                        f"{node.name}: a value out of bounds, or an unknown name",
                    )


def message(node: ast.expr) -> str:
    """The text of a message in the source."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(
            message(part) if isinstance(part, ast.Constant) else "…" for part in node.values
        )
    if isinstance(node, ast.BinOp):
        return message(node.left) + message(node.right)
    return "…"


def relinked(text: str, folder: str, page: str, repo_url: str) -> str:
    """Links of a Markdown text that lead to files of the repository, for the page that it is on.

    Args:
        folder: the repository's folder that the text's links start from.
        page: path of the page in the site.
    """

    def lead(match: re.Match[str]) -> str:
        address, _, part = match[1].partition("#")
        if not address or ":" in address or address.startswith("/"):
            return match[0]
        file = posixpath.normpath(posixpath.join(folder, address))
        on_site = file.startswith("docs/") and file not in OUTSIDE
        inside = INCLUDED.get(file) or (file.removeprefix("docs/") if on_site else None)
        found = (
            posixpath.relpath(inside, posixpath.dirname(page) or ".")
            if inside
            else f"{repo_url}/blob/main/{file}"
        )
        return f"]({found}{'#' + part if part else ''})"

    return re.sub(r"\]\(([^)\s]+)\)", lead, text)


def on_files(files: Any, config: Any) -> Any:
    """mkdocs' hook: adds the made pages."""
    from mkdocs.structure.files import File

    for path, text in pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """mkdocs' hook: leads links out of docs/ to the repository."""
    path = page.file.src_uri
    origin = next((file for file, made in INCLUDED.items() if made == path), f"docs/{path}")
    return relinked(markdown, posixpath.dirname(origin), path, config["repo_url"])
