"""JSON schemas whose objects have the properties that they list, and no others.

JSON Schema lets an object have any further properties unless it says otherwise, and schemas as
pydantic writes them do not: a model that may invent properties often keeps inventing them. An
object is closed where nothing else has a say about the same value. Members of an `allOf` stay
open, as each would forbid what another one asks for, and so does whatever such a place refers to.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from draftwell.serving.runtime.grammar.guidance import LONGEST_DEFINITION, refused

ABOUT_OTHERS = frozenset({"additionalProperties", "patternProperties", "unevaluatedProperties"})
"""With one of these a schema says itself which further properties there may be."""
# fmt: off
SAME_VALUE = frozenset({
    "allOf", "anyOf", "oneOf", "not", "if", "then", "else", "$ref", "$dynamicRef",
    "$recursiveRef", "dependentSchemas", "dependentRequired", "dependencies", "propertyNames",
    "enum", "const",
})
"""What else may ask something of the same object."""
ASKING = SAME_VALUE | ABOUT_OTHERS | {
    "properties", "required", "minProperties", "maxProperties", "items", "prefixItems",
    "additionalItems", "unevaluatedItems", "contains", "minContains", "maxContains", "minItems",
    "maxItems", "uniqueItems",
}
"""What asks something of an object or a list, except their type. Other words are notes, or about
numbers and texts."""
# fmt: on
MAPS = frozenset({"properties", "patternProperties", "dependentSchemas", "dependencies"})
MOST_NAMES, MOST_VALUES = 8, 100
"""Properties of a schema that may tell it apart, and values of one; every use looks at them all."""
DEFINITIONS = frozenset({"$defs", "definitions"})


def closed(schema: Any) -> Any:
    """The same schema with `additionalProperties: false` wherever an object lists `properties`;
    whatever it allows the schema allows too, and it allows something if the schema does.

    >>> closed({"properties": {"a": {"properties": {}}}, "required": ["a"]})["properties"]
    {'a': {'properties': {}, 'additionalProperties': False}}
    >>> closed({"allOf": [{"properties": {"a": {}}}, {"required": ["b"]}]})
    {'allOf': [{'properties': {'a': {}}}, {'required': ['b']}]}

    Raises:
        InvalidRequest: it is nested too deeply.
    """
    try:
        if len(json.dumps(schema)) > LONGEST_DEFINITION:
            return schema
        places = Places(schema)
        places.visit(schema, alone=True)
        if places.needed.keys() & places.beside:
            places = Places(schema, requires=False)
            places.visit(schema, alone=True)
        return places.written(schema)
    except RecursionError as error:
        raise refused("a schema that is nested too deeply") from error
    except (ValueError, TypeError, AttributeError):
        return schema  # no schema: whoever reads it next says so


class Places:
    """Where the parts of a schema are used: alone, or beside others about the same value.

    Args:
        requires: whether a property may be made required to tell members of a `oneOf` apart.
    """

    def __init__(self, root: Any, requires: bool = True):
        self.root, self.requires = root, requires
        self.alone: set[int] = set()
        self.beside: set[int] = set()
        self.apart: set[int] = set()
        """Schemas whose `oneOf` means what `anyOf` does."""
        self.needed: dict[int, set[str]] = {}
        """Properties that tell schemas apart, which each then has to require."""
        self.listed: dict[int, dict[str, set[str]]] = {}

    def visit(self, node: Any, *, alone: bool) -> None:
        """Note how a schema and all of its parts are used."""
        seen = self.alone if alone else self.beside
        if not isinstance(node, dict) or id(node) in seen:
            return
        seen.add(id(node))
        if isinstance(node.get("$ref"), str):
            self.visit(self.target(node["$ref"]), alone=alone and node.keys() & ASKING == {"$ref"})
        for key, value in node.items():
            free = alone and self.free(node, key)
            for part in parts_of(key, value):
                self.visit(part, alone=free)

    def free(self, node: Mapping[str, Any], key: str) -> bool:
        """Whether nothing but the parts under this key has a say about the same values."""
        if key in SAME_VALUE:
            members = node[key]
            if node.keys() & ASKING != {key} or not isinstance(members, list):
                return False
            return (
                key == "anyOf"
                or (key == "allOf" and len(members) == 1)
                or (key == "oneOf" and self.told_apart(node))
            )
        overlapping = "contains" in node or {"properties", "patternProperties"} <= node.keys()
        return node.keys().isdisjoint(SAME_VALUE) and not overlapping and key != "unevaluatedItems"

    def told_apart(self, node: Mapping[str, Any]) -> bool:
        """Whether one member of a `oneOf` at most is for objects, or a required property has other
        values in each that is: what fits a closed member then fits no other, open ones included."""
        found = [self.target(it["$ref"]) if is_reference(it) else it for it in node["oneOf"]]
        kinds = [types(one) or types(node) for one in found]
        objects = [
            one for one, kind in zip(found, kinds, strict=True) if not kind or "object" in kind
        ]
        if len(objects) > 1:
            if len({id(one) for one in objects}) < len(objects):
                return False
            listed = [self.constants(one) for one in objects]
            common = (name for name in listed[0] if all(name in one for one in listed))
            name = next((it for it in common if distinct([one[it] for one in listed])), None)
            if name is None:
                return False
            for one in objects:
                self.needed.setdefault(id(one), set()).add(name)
        others = [kind for kind in kinds if kind != {"object"}]
        if all(others) and len(set().union(*others, {"object"})) == sum(map(len, others)) + 1:
            self.apart.add(id(node))
        return True

    def constants(self, node: Any) -> dict[str, set[str]]:
        """What `constants` finds; once for all uses of a definition."""
        if id(node) not in self.listed:
            self.listed[id(node)] = constants(node, self.requires)
        return self.listed[id(node)]

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
        if id(node) in self.beside or id(node) not in self.alone:
            return copy
        if id(node) in self.apart:
            copy["anyOf"] = copy.pop("oneOf")
        if id(node) in self.needed:
            required = node.get("required") or []
            copy["required"] = [*required, *sorted(self.needed[id(node)] - set(required))]
        return copy | {"additionalProperties": False} if closable(node) else copy


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


def types(node: Any) -> set[str]:
    """The types that a schema names; empty where it names none. Whole numbers are numbers."""
    named = node.get("type", ()) if isinstance(node, dict) else ()
    return {
        "number" if one == "integer" else one
        for one in ([named] if isinstance(named, str) else named)
    }


def constants(node: Any, optional: bool) -> dict[str, set[str]]:
    """The values of the first few properties that list theirs, as text, if all objects that the
    schema allows have these or, where asked for, can have them."""
    if not isinstance(node, dict) or not isinstance(node.get("properties"), dict):
        return {}
    required = set(node.get("required") or ())
    optional = optional and "maxProperties" not in node and closable(node)
    found = (
        (name, [one["const"]] if "const" in one else one.get("enum") or ())
        for name, one in node["properties"].items()
        if isinstance(one, dict) and (name in required or (optional and "default" in one))
    )
    listed = (
        (name, set(map(repr, values))) for name, values in found if 0 < len(values) <= MOST_VALUES
    )
    return dict(itertools.islice(listed, MOST_NAMES))


def distinct(sets: Sequence[set[str]]) -> bool:
    """Whether no value is in two sets."""
    return len(set.union(*sets)) == sum(map(len, sets))
