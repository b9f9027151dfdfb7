"""How much work the intersections of a grammar's regular expressions may be.

llguidance derives the parts of an intersection (`&` in Lark, `allOf` of patterns in JSON schemas)
together: each set of characters that one part may begin with is paired with each of every other
part, and its fuel is only looked at afterwards. So the work is the product of their numbers of
sets. It is bounded here by what the text shows: with `n` sets in `m` parts no product is greater
than `(1 + n/m) ** m`, where the 1 stands for plain characters.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

MOST_PAIRS = 250_000
"""2.5 million take 3 to 9 s of a core, and six parts of twenty sets each, 64 million, minutes."""
MOST_KEY_PAIRS = 20_000
"""Patterns of keys are compared with one another: 200 take 2 s, 800 a minute."""
SETS = re.compile(r"(\\[pPwWdDsS]|\[(?:\\.|[^\\\]])*|[.|])|\\.", re.DOTALL)
"""What may begin a text with one of several characters, in a regular expression."""
LITERAL = re.compile(
    r'(?:#|//)[^\n]*|"(?:\\.|[^"\\\n])*+(?:"|\\?$)|<[^<>\s]+>|(?P<regex>/(?:\\.|[^/\\])++(?:/|\\?\Z))',
    re.DOTALL | re.MULTILINE,
)
"""Comments, texts, special tokens and regular expressions of Lark. All of these patterns take a
time that grows with the length of the text, whatever it is."""
NAME = re.compile(r"(?<![\w-])[A-Za-z_][\w-]*+")
DEFINED = re.compile(
    rf"({NAME.pattern})(?:\s*+\[[^\[\]]*+\])?(?:::\w++|\s*+\.\s*+-?\d++)?\s*+:(?!:)"
)
BESIDE = ("allOf", "patternProperties", "not", "if", "then", "else", "dependentSchemas")
"""Keywords whose schemas are about the value, or its parts, beside other keywords."""
REFERENCES = frozenset({"$ref", "$dynamicRef", "$recursiveRef"})
NO_SCHEMAS = frozenset({"$defs", "definitions", "enum", "const", "default", "examples"})
"""Keywords with data, or with schemas that count where they are referred to."""
FORMAT_SETS = 8
"""Sets of the regular expression of a `format`, about."""
MOST_NAMED = 40
"""Properties that are distinguished, so that looking takes no longer for many references."""


@dataclass(frozen=True, order=True)
class Parts:
    """Regular expressions that have to match one text.

    >>> Parts(2, 6).pairs
    16.0
    """

    members: int = 0
    sets: int = 0

    @property
    def pairs(self) -> float:
        """The most combinations of their sets; infinite where they are very many."""
        try:
            return (1 + self.sets / self.members) ** self.members if self.members > 1 else 1.0
        except OverflowError:
            return float("inf")

    def __add__(self, other: Parts) -> Parts:
        return Parts(self.members + other.members, self.sets + other.sets)

    def __sub__(self, other: Parts) -> Parts:
        return Parts(self.members - other.members, self.sets - other.sets)


def sets_in(pattern: str) -> int:
    r"""Sets of characters in a regular expression.

    >>> sets_in(r"[a-z\]]+\.\d|x.")
    4
    """
    return sum(found[1] is not None for found in SETS.finditer(pattern))


def pairs_in_lark(text: str) -> float:
    """The most combinations that an intersection of a grammar in Lark has."""
    if "&" not in text:
        return 1.0
    plain = LITERAL.sub(lambda it: " " + "." * sets_in(it["regex"] or "") + " ", text)
    marks = list(DEFINED.finditer(plain))
    starts, ends = [0, *(it.start(1) for it in marks)], [it.start(1) for it in marks]
    bodies: dict[str, str] = {}
    for name, start, end in zip(
        ["", *(it[1] for it in marks)], starts, [*ends, len(plain)], strict=True
    ):
        body = plain[start + len(name) : end]
        bodies[name] = f"{bodies.get(name, '')} {body}"  # of several grammars in one

    known: dict[str, Parts] = {}

    def parts(name: str) -> Parts:
        """A definition's, with those of all that it names."""
        if name not in known:
            known[name] = Parts()  # one that names itself is refused by the compiler
            body = bodies[name]
            found = Parts(body.count("&"), body.count(".") + body.count("|"))
            used = (one for one in NAME.findall(body) if one in bodies)
            known[name] = sum(map(parts, used), found)
        return known[name]

    joined = (parts(name) for name, body in bodies.items() if "&" in body)
    return greatest(one + Parts(1) for one in joined).pairs


@dataclass(frozen=True)
class Asked:
    """Regular expressions that a schema asks of a value, by the text that they are about.

    Args:
        text: of the value itself.
        named: of its properties' texts, for each with what is asked of it as of any other.
        rest: of all its other parts' texts.
    """

    text: Parts = Parts()
    named: Mapping[str, Parts] = field(default_factory=dict)
    rest: Parts = Parts()

    @property
    def most(self) -> Parts:
        """Those about one text that are most work."""
        return greatest([self.text, self.rest, *self.named.values()])

    def bounded(self) -> Asked:
        """The same with few names: very many are not distinguished."""
        if len(self.named) <= MOST_NAMED:
            return self
        return Asked(self.text, rest=greatest([self.rest, *self.named.values()]))


def all_of(members: Sequence[Asked]) -> Asked:
    """What several schemas ask of one value together."""
    text = sum((one.text for one in members), Parts())
    rest = sum((one.rest for one in members), Parts())
    named: dict[str, Parts] = {}
    for one in members:
        for name, parts in one.named.items():
            named[name] = named.get(name, rest) + parts - one.rest
    return Asked(text, named, rest).bounded()


def any_of(members: Sequence[Asked]) -> Asked:
    """What one of several schemas asks of a value at most."""
    text, rest = greatest(one.text for one in members), greatest(one.rest for one in members)
    named: dict[str, Parts] = {}
    for one in members:
        for name, parts in one.named.items():
            named[name] = greatest([named.get(name, rest), parts])
    return Asked(text, named, rest).bounded()


class Patterns:
    """The patterns of a JSON schema that one text may have to match, by its keywords.

    Args:
        root: the schema, which references start from.
    """

    def __init__(self, root: Any):
        self.root = root
        self.key_pairs = 0
        self._targets: dict[str, Asked] = {}
        self._rebased = False
        everything = self.everything(root)
        self._all = Asked(everything, rest=everything)
        self.most = Parts()
        self.found(root)

    def everything(self, node: Any) -> Parts:
        """All patterns of a schema, whatever they are about."""
        if isinstance(node, list):
            return sum(map(self.everything, node), Parts())
        if not isinstance(node, dict):
            return Parts()
        named = isinstance(node.get("$id"), str) or isinstance(node.get("id"), str)
        self._rebased |= named and node is not self.root
        return sum(map(self.everything, node.values()), about_text(node))

    def found(self, node: Any) -> Asked:
        """Those about a value and about its parts; within a part, whichever are more work."""
        if isinstance(node, list):
            return any_of([self.found(one) for one in node])
        if not isinstance(node, dict):
            return Asked()
        together: list[Asked] = []
        named: dict[str, Parts] = {}
        parts = []
        for key, value in node.items():
            if key in REFERENCES:
                together.append(self.target(value))
            elif key in BESIDE:
                together += self.beside(key, value)
            elif key in ("anyOf", "oneOf"):
                together.append(self.found(value))
            elif key == "properties" and isinstance(value, dict):
                found = {name: self.found(one).most for name, one in value.items()}
                named = {name: one for name, one in found.items() if one.members}
            elif key not in NO_SCHEMAS:
                parts.append(self.found(value).most)
        met = all_of([Asked(about_text(node), named, greatest(parts)), *together])
        self.most = greatest([self.most, met.most])
        return met

    def beside(self, key: str, value: Any) -> list[Asked]:
        """Those of a keyword whose schemas are all about one value, or about its parts."""
        of_keys = key == "patternProperties"
        if of_keys and isinstance(value, dict):
            self.key_pairs += len(value) ** 2
            names = sorted(map(searched_sets, value), reverse=True)
            self.most = greatest([self.most, Parts(2, sum(names[:2]))])
        if key in ("patternProperties", "dependentSchemas") and isinstance(value, dict):
            value = list(value.values())
        found = list(map(self.found, value if isinstance(value, list) else [value]))
        return [Asked(rest=one.most) for one in found] if of_keys else found

    def target(self, reference: Any) -> Asked:
        """Those of what a reference names, all where that is not certain; none where it leads back
        to itself."""
        if not isinstance(reference, str) or self._rebased:
            return self._all
        if reference not in self._targets:
            self._targets[reference] = Asked()
            self._targets[reference] = self.found_at(reference)
        return self._targets[reference]

    def found_at(self, reference: str) -> Asked:
        """Those at a place in the schema."""
        node = self.root
        if not re.match("#(/|$)", reference):
            return self._all
        try:
            for step in reference.split("/")[1:]:
                name = unquote(step).replace("~1", "/").replace("~0", "~")
                node = node[int(name)] if isinstance(node, list) else node[name]
        except (KeyError, IndexError, ValueError, TypeError):
            return self._all
        return self.found(node)


def about_text(node: Mapping[str, Any]) -> Parts:
    """What a schema's own keywords ask of a text."""
    pattern, named = node.get("pattern"), isinstance(node.get("format"), str)
    own = Parts(1, searched_sets(pattern)) if isinstance(pattern, str) else Parts()
    return own + Parts(1, FORMAT_SETS) if named else own


def searched_sets(pattern: str) -> int:
    """Sets in a pattern that is searched for: anything may stand before and after it."""
    return sets_in(pattern) + 2


def greatest(choices: Iterable[Parts]) -> Parts:
    """Of several, those that are most work."""
    return max(choices, key=lambda one: (one.pairs, one), default=Parts())
