"""JSON schemas whose objects have the properties that they list, and no others.

JSON Schema lets an object have any further properties unless it says otherwise, and schemas as
pydantic writes them do not: a model that may invent properties often keeps inventing them. An
object is closed where nothing else has a say about the same value. Members of an `allOf` stay
open, as each would forbid what another one asks for, and so does whatever such a place refers to.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from draftwell.serving.runtime.grammar.guidance import LONGEST_DEFINITION

ABOUT_OTHERS = frozenset({"additionalProperties", "patternProperties", "unevaluatedProperties"})
"""With one of these a schema says itself which further properties there may be."""
# fmt: off
SAME_VALUE = frozenset({
    "allOf", "anyOf", "oneOf", "not", "if", "then", "else", "$ref", "$dynamicRef",
    "$recursiveRef", "dependentSchemas", "dependentRequired", "dependencies", "propertyNames",
    "enum", "const",
})
"""What else may ask something of the same object."""
NOTES = frozenset({
    "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly",
    "nullable", "discriminator", "type", "$comment", "$defs", "definitions", "$schema", "$id",
})
"""What may stand beside a choice of schemas without asking for anything of its own."""
# fmt: on
MAPS = frozenset({"properties", "patternProperties", "dependentSchemas", "dependencies"})
DEFINITIONS = frozenset({"$defs", "definitions"})


def closed(schema: Any) -> Any:
    """The same schema with `additionalProperties: false` wherever an object lists `properties`;
    whatever it allows the schema allows too, and it allows something if the schema does.

    >>> closed({"properties": {"a": {"properties": {}}}, "required": ["a"]})["properties"]
    {'a': {'properties': {}, 'additionalProperties': False}}
    >>> closed({"allOf": [{"properties": {"a": {}}}, {"required": ["b"]}]})
    {'allOf': [{'properties': {'a': {}}}, {'required': ['b']}]}
    """
    places = Places(schema)
    try:
        if len(json.dumps(schema)) > LONGEST_DEFINITION:
            return schema
        places.visit(schema, alone=True)
        return places.written(schema)
    except (RecursionError, ValueError, TypeError, AttributeError):
        return schema  # too deep, or no schema: whoever reads it next says so


class Places:
    """Where the parts of a schema are used: alone, or beside others about the same value."""

    def __init__(self, root: Any):
        self.root = root
        self.alone: set[int] = set()
        self.beside: set[int] = set()

    def visit(self, node: Any, *, alone: bool) -> None:
        """Note how a schema and all of its parts are used."""
        seen = self.alone if alone else self.beside
        if not isinstance(node, dict) or id(node) in seen:
            return
        seen.add(id(node))
        if isinstance(node.get("$ref"), str):
            self.visit(self.target(node["$ref"]), alone=alone and node.keys() - NOTES == {"$ref"})
        for key, value in node.items():
            free = alone and self.free(node, key)
            for part in parts_of(key, value):
                self.visit(part, alone=free)

    def free(self, node: Mapping[str, Any], key: str) -> bool:
        """Whether nothing but the parts under this key has a say about the same values."""
        if key in SAME_VALUE:
            members = node[key]
            if node.keys() - NOTES != {key} or not isinstance(members, list):
                return False
            return (
                key == "anyOf"
                or (key == "allOf" and len(members) == 1)
                or (key == "oneOf" and self.told_apart(members))
            )
        overlapping = "contains" in node or {"properties", "patternProperties"} <= node.keys()
        return node.keys().isdisjoint(SAME_VALUE) and not overlapping and key != "unevaluatedItems"

    def told_apart(self, members: Sequence[Any]) -> bool:
        """Whether a required property has other values in each member: one that fits a closed
        member then fits no other, open ones included."""
        found = [self.target(one["$ref"]) if is_reference(one) else one for one in members]
        objects = [one for one in found if isinstance(one, dict) and "properties" in one]
        names = [set(one.get("required") or ()) & one["properties"].keys() for one in objects]
        return any(
            distinct([values_of(one["properties"][name]) for one in objects])
            for name in (set.intersection(*names) if names else ())
        )

    def target(self, reference: str) -> Any:
        """What a reference within the schema means; None where it cannot be said."""
        found = self.root
        try:
            for part in reference.removeprefix("#").split("/")[1:]:
                name = unquote(part).replace("~1", "/").replace("~0", "~")
                found = found[int(name)] if isinstance(found, list) else found[name]
        except (KeyError, IndexError, ValueError, TypeError):
            return None
        return found if reference.startswith("#") else None

    def written(self, node: Any) -> Any:
        """A copy, closed where that is right."""
        if isinstance(node, list):
            return [self.written(one) for one in node]
        if not isinstance(node, dict):
            return node
        copy = {key: self.written(value) for key, value in node.items()}
        used_alone = id(node) in self.alone and id(node) not in self.beside
        return copy | {"additionalProperties": False} if used_alone and closable(node) else copy


def closable(node: Mapping[str, Any]) -> bool:
    """Whether a schema lists properties, leaves open which others there are, and needs none."""
    listed = node.get("properties")
    if not isinstance(listed, dict) or not node.keys().isdisjoint(ABOUT_OTHERS | SAME_VALUE):
        return False
    required, fewest = node.get("required") or [], node.get("minProperties") or 0
    return (
        isinstance(required, list)
        and all(isinstance(name, str) and name in listed for name in required)
        and isinstance(fewest, int)
        and fewest <= len(required)
    )


def parts_of(key: str, value: Any) -> Iterator[Any]:
    """The schemas under a keyword; definitions count where they are referred to."""
    if key in MAPS and isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list):
        yield from value
    elif key not in DEFINITIONS:
        yield value


def is_reference(node: Any) -> bool:
    """Whether a schema is one that stands elsewhere."""
    return isinstance(node, dict) and isinstance(node.get("$ref"), str)


def values_of(node: Any) -> list[Any]:
    """The values that a property may have, as JSON; empty where they are not listed."""
    if not isinstance(node, dict):
        return []
    return [node["const"]] if "const" in node else list(node.get("enum") or ())


def distinct(lists: Sequence[Sequence[Any]]) -> bool:
    """Whether no value is in two lists, and no list is empty."""
    texts = [{repr(value) for value in values} for values in lists]
    return all(texts) and len(set.union(*texts)) == sum(map(len, texts))
