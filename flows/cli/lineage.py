"""`draftwell release show`: where a row of a table, or a registered version, comes from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from draftwell.flows.cli.settings_option import add_command
from draftwell.flows.steps.lineage import champions, lineage as walk

if TYPE_CHECKING:
    from draftwell.flows.steps.lineage import Node


def add_to(app: typer.Typer) -> None:
    """Register this file's command."""
    add_command(app, lineage, "show")


def lineage(
    what: Annotated[
        str,
        typer.Argument(
            metavar="REPORT_OR_VERSION",
            help="JSON report of bench, gate or tune; or a version: kind.pair@alias, kind.pair/3, "
            "release.pair.cpu@champion.",
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what a report's rows, or a registered version, were made from: config, artifacts and
    traces; of a release, too, who made which version champion.

    Example: draftwell release show release.default.cpu@champion
    """
    import json

    nodes = walk(what)
    if as_json:
        typer.echo(json.dumps([node.as_json() for node in nodes], indent=2))
        return
    for node in nodes:
        for line in lines_of(node):
            typer.echo(line)
    for line in champions(what):
        typer.echo(line)


def lines_of(node: Node, head: str = "", rest: str = "") -> Iterator[str]:
    """A lineage as a tree of lines, which no width of a window breaks.

    Args:
        head: what goes before the first line.
        rest: what goes before the lines below it.
    """
    yield head + node.words
    for child in node.children:
        last = child is node.children[-1]
        yield from lines_of(
            child, rest + ("└─ " if last else "├─ "), rest + ("   " if last else "│  ")
        )
