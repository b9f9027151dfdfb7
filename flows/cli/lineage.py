"""`draftwell lineage`: where a row of a table, or a registered version, comes from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.tree import Tree

    from flows.lineage import Node


def add_to(app: typer.Typer) -> None:
    """Register this file's command."""
    app.command()(lineage)


def lineage(what: Annotated[str, typer.Argument(
                metavar="REPORT_OR_VERSION", help="A report of bench, gate or tune (JSON), or kind.pair@alias, kind.pair/3, "
                                                  "release.pair.cpu@champion.")],
            as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Walk from a table's rows, or from a version, back over config and artifacts to the traces.

    Example: draftwell lineage release.default.cpu@champion
    """
    import json

    from flows.cli.options import wide_console
    from flows.lineage import lineage as walk

    nodes = walk(what)
    if as_json:
        typer.echo(json.dumps([node.as_json() for node in nodes], indent=2))
        return
    for node in nodes:
        wide_console().print(tree_of(node), soft_wrap=True)


def tree_of(node: Node, above: Tree | None = None) -> Tree:
    """A lineage as a tree for the terminal."""
    from rich.text import Text
    from rich.tree import Tree

    words = Text(node.words)  # plain text: brackets are no markup
    tree = Tree(words) if above is None else above.add(words)
    for child in node.children:
        tree_of(child, tree)
    return tree
