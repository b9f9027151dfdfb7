"""Lineage for people: from a row of a report, or a registered version, back to the traces that
everything was made from.

A digest is looked for in the registry, then among the artifacts of this machine's workspaces and
those that pairs ship with; traces are looked for in the workspaces. What is found nowhere is shown
with its digest, as "not here".
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftwell.components.bench.report.tables import label_with_parameters
from draftwell.registry.lineage import find, lineage_of
from draftwell.registry.pairs import catalogue, find_pair
from draftwell.registry.promotion_log import history
from draftwell.registry.store import Store
from draftwell.serving.artifacts.base import ArtifactError, digest_of
from draftwell.serving.artifacts.pair_files import draftwell_home
from draftwell.serving.device import DEVICES
from draftwell.serving.errors import DraftwellError
from draftwell.serving.recording.trace import TraceSet
from draftwell.serving.recording.trace_schema import TraceError

if TYPE_CHECKING:
    from draftwell.registry.lineage import Lineage

VERSION = re.compile(
    r"(?P<kind>[a-z_]+)\.(?P<pair>[A-Za-z0-9._-]+)(@(?P<alias>[\w.-]+)|/(?P<number>\d+))"
)
FORMS = (
    "name a report of a bench, gate or tuning, or a version as kind.pair@alias, kind.pair/3 or "
    "release.pair.cpu@champion"
)


@dataclass(frozen=True)
class Node:
    """A step of a lineage.

    Args:
        what: "row", "trace", or an artifact's kind.
        name: of a row its label, of a registered artifact its model and version, of another its
            kind, of traces their digest.
        where: "registry", a folder on this machine, or "not here"; None of a row.
        children: what it was made from.
    """

    what: str
    name: str
    digest: str | None = None
    where: str | None = None
    git_commit: str | None = None
    children: tuple[Node, ...] = ()

    @property
    def words(self) -> str:
        """The step in one line."""
        if self.what == "row":
            return self.name
        name = self.what if self.name == self.digest else self.name
        digest = f" {self.digest[:12]}" if self.digest else ""
        commit = f", commit {self.git_commit[:12]}" if self.git_commit else ""
        return f"{name}{digest} ({self.where}{commit})"

    def as_json(self) -> dict[str, Any]:
        """The step and all before it as plain JSON."""
        return {
            "what": self.what,
            "name": self.name,
            "digest": self.digest,
            "where": self.where,
            "git_commit": self.git_commit,
            "made_from": [child.as_json() for child in self.children],
        }

    def walk(self) -> Iterator[Node]:
        """The step and all before it."""
        yield self
        for child in self.children:
            yield from child.walk()


def lineage(what: str) -> list[Node]:
    """The lineage of every row of a report file, or of a registered version.

    Args:
        what: a report of a bench, gate or tuning (JSON), or `kind.pair@alias`, `kind.pair/number`.
    Raises:
        DraftwellError: neither; a file that is no such report or says nothing of origins; a version
            that is not registered.
    """
    path = Path(what)
    if path.is_dir():
        raise DraftwellError(f"{what} is a folder: {FORMS}", code="not_a_report")
    if path.is_file():
        report = read_report(path)
        pair, rows = str(report["pair"]), rows_of(report, path)
        finder = Finder()
        return [finder.row(label, row, pair) for label, row in rows]
    found = VERSION.fullmatch(what)
    if found is None:
        raise DraftwellError(
            f"there is no file {what}, and it is not a version of an artifact: {FORMS}",
            code="not_a_report",
        )
    return [Finder().version(found["kind"], found["pair"], found["alias"] or found["number"])]


def champions(what: str) -> list[str]:
    """Who made which version of a release champion, the newest first, a line each; none of what is
    no release."""
    found = VERSION.fullmatch(what)
    if found is None or found["kind"] != "release":
        return []
    pair, _, device = registered_name("release", found["pair"]).rpartition(".")
    return [entry.words for entry in reversed(history(Store(), pair, device))]


def read_report(path: Path) -> dict[str, Any]:
    """A report that names its pair."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DraftwellError(
            (
                f"{path} is not valid JSON, or only a part of a report: write it again, as "
                "`draftwell bench --out` does"
            ),
            code="not_a_report",
        ) from error
    if not isinstance(report, dict) or not isinstance(report.get("pair"), str):
        raise DraftwellError(
            f"{path} is not a report of a bench, gate or tuning: {FORMS}", code="not_a_report"
        )
    return report


def rows_of(report: Mapping[str, Any], path: Path) -> list[tuple[str, Mapping[str, Any]]]:
    """Label and JSON of a report's rows, or of a tuning's choice."""

    rows = report.get("strategies")
    if not isinstance(rows, dict):
        rows = {str(report.get("strategy")): report}
    traced = [row for row in rows.values() if row.get("trace_digest")]
    if not traced and not any(isinstance(row.get("artifacts"), dict) for row in rows.values()):
        raise DraftwellError(
            f"{path} names no origins: it is no report of a bench or tuning; bench or tune again",
            code="report_without_origins",
        )
    choice = "" if "strategies" in report else "choice "
    return [
        (choice + label_with_parameters(label, row.get("parameters") or {}), row)
        for label, row in rows.items()
    ]


class Finder:
    """Looks digests up: in the registry, then on this machine."""

    def __init__(self) -> None:

        self.store: Store = Store()

    @cached_property
    def folders(self) -> dict[str, Path]:
        """digest → folder of the artifacts in the workspaces, and of those that pairs ship with."""

        shipped = Path(catalogue.__file__).parent
        manifests = [
            *shipped.glob("*/draft/artifact.json"),
            *shipped.glob("*/artifacts/*/*/artifact.json"),
            *draftwell_home().glob("pairs/*/*/artifacts/*/artifact.json"),
            *(
                file
                for name in DEVICES
                for file in draftwell_home().glob(f"pairs/*/*/**/{name}/artifacts/*/artifact.json")
            ),
            *draftwell_home().glob("pairs/*/*/recalibrations/*/artifacts/*/artifact.json"),
        ]
        found = {}
        for manifest in sorted(manifests):
            try:
                found[digest_of(manifest.parent)] = manifest.parent
            except ArtifactError:
                continue  # of another version of draftwell: nothing that is looked for here
        return found

    @cached_property
    def traces(self) -> dict[str, Path]:
        """digest → folder of the workspaces' traces, and of those that recalibrations collected."""

        found = {}
        home = draftwell_home()
        for folder in sorted(
            [*home.glob("pairs/*/*/traces*"), *home.glob("pairs/*/*/recalibrations/*/traces*")]
        ):
            try:
                found[TraceSet(folder).digest()] = folder
            except TraceError:
                continue  # none collected yet, or a collection that broke off
        return found

    def version(self, kind: str, pair: str, wanted: str) -> Node:
        """A registered version."""

        name = registered_name(kind, pair)
        return self.artifact(
            lineage_of(self.store, self.store.resolve(kind, name, wanted), name, self.folders)
        )

    def row(self, label: str, row: Mapping[str, Any], pair: str) -> Node:
        """A row of a table: its tuned config, and the artifacts and traces that are not already the
        config's."""

        children: list[Node] = []
        for kind, digest in [
            ("decoding_config", row.get("config_digest")),
            *(row.get("artifacts") or {}).items(),
        ]:
            if not isinstance(digest, str):
                if kind != "decoding_config":
                    children.append(Node(kind, kind, None, "made on the spot, not kept"))
            elif digest not in known(children):
                children.append(
                    self.artifact(
                        find(
                            self.store,
                            kind,
                            digest,
                            pair,
                            self.folders,
                            str(row.get("fingerprint")),
                        )
                    )
                )
        if (traces := row.get("trace_digest")) is not None and traces not in known(children):
            children.append(self.trace(traces))
        return Node("row", label, children=tuple(children))

    def artifact(self, found: Lineage) -> Node:
        """An artifact with what it was made from."""
        children = [self.artifact(parent) for parent in found.parents]
        if found.trace_digest:
            children.append(self.trace(found.trace_digest))
        published = found.published
        name = f"{published.name} version {published.version}" if published else found.kind
        where = "registry" if published else str(found.folder) if found.folder else "not here"
        return Node(found.kind, name, found.digest, where, found.git_commit, tuple(children))

    def trace(self, digest: str) -> Node:
        """Traces, with their folder where they are in a workspace."""
        return Node("trace", digest, digest, str(self.traces.get(digest, "not here")))


def known(nodes: list[Node]) -> set[str | None]:
    """The digests in some lineages."""
    return {step.digest for node in nodes for step in node.walk()}


def registered_name(kind: str, pair: str) -> str:
    """The pair's own name where an alias was typed; one that the catalogue lacks stays as it is: a
    pair's YAML file may lie anywhere."""

    base, dot, device = pair.rpartition(".") if kind == "release" else (pair, "", "")
    try:
        return find_pair(base).name + dot + device
    except DraftwellError:
        return pair
