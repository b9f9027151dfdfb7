"""What installed distributions add to the project's own tables, by entry points of a group.

They are looked for when a table is first read, never when its module is imported, so that a
plug-in's module and ours may import each other in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar

from draftwell.serving.errors import DraftwellError

T = TypeVar("T")


def loaded(point: EntryPoint) -> Any:
    """What an entry point names.

    Raises:
        DraftwellError: its distribution is broken (`bad_plugin`).
    """
    try:
        return point.load()
    except Exception as error:
        raise bad_plugin(point, f"it cannot be imported ({error})") from error


def bad_plugin(point: EntryPoint, why: str) -> DraftwellError:
    """The error of a plug-in that cannot be used; it names the distribution."""
    owner = point.dist.name if point.dist else "unknown"
    return DraftwellError(
        f"the entry point {point.name} of {point.group} = {point.value}: {why}: fix the "
        f"distribution {owner}, or uninstall it",
        code="bad_plugin",
    )


class Extended(Mapping[str, T], Generic[T]):
    """The project's own things by name, followed by those of plug-ins.

    Args:
        own: they come first, and no plug-in may take their names.
        group: of the entry points; the name of each is the name here.
        problem: why what an entry point names cannot be used; "" where it can.
    """

    def __init__(self, own: Mapping[str, T], group: str, problem: Callable[[str, Any], str]):
        self.own, self.group = own, group
        self._problem = problem

    @cached_property
    def _all(self) -> dict[str, T]:
        found = dict(self.own)
        for point in entry_points(group=self.group):
            if point.name in found:
                raise bad_plugin(point, "the name is taken")
            made = loaded(point)
            if why := self._problem(point.name, made):
                raise bad_plugin(point, why)
            found[point.name] = made
        return found

    def __getitem__(self, name: str) -> T:
        return self._all[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)


class Names(Collection[str], Generic[T]):
    """The names in a table of what fulfils a condition, looked up when they are asked for.

    >>> even = Names({"one": 1, "two": 2}, lambda number: number % 2 == 0)
    >>> list(even), "one" in even
    (['two'], False)
    """

    def __init__(self, table: Mapping[str, T], condition: Callable[[T], bool]):
        self._table, self._condition = table, condition

    def __iter__(self) -> Iterator[str]:
        return (name for name, one in self._table.items() if self._condition(one))

    def __contains__(self, name: object) -> bool:
        return any(name == one for one in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)
