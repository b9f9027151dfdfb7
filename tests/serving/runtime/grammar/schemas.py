"""JSON schemas of many shapes, whose texts are short enough to be finished by a model that writes
at random."""

from __future__ import annotations

from typing import Any

WORD = {"type": "string", "maxLength": 4}
DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}


def closed(**properties: Any) -> dict[str, Any]:
    """An object of just these properties."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


SCHEMAS: dict[str, Any] = {
    "string": WORD,
    "integer": {"type": "integer", "minimum": -20, "maximum": 300},
    "number": {"type": "number", "minimum": 0, "maximum": 1},
    "boolean": {"type": "boolean"},
    "null": {"type": "null"},
    "enum of strings": {"enum": ["red", "green", "blue"]},
    "enum of kinds": {"enum": [1, "one", None, True, [1, 2], {"a": 1}]},
    "const": {"const": {"version": 2, "tags": ["a", "b"]}},
    "multiple": {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 100},
    "pattern": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{2}$"},
    "date": {"type": "string", "format": "date"},
    "uuid": {"type": "string", "format": "uuid"},
    "ipv4": {"type": "string", "format": "ipv4"},
    "between lengths": {"type": "string", "minLength": 3, "maxLength": 5},
    "array": {"type": "array", "items": DIGIT, "maxItems": 4},
    "array of at least two": {"type": "array", "items": WORD, "minItems": 2, "maxItems": 3},
    "tuple": {
        "type": "array",
        "prefixItems": [WORD, DIGIT, {"type": "boolean"}],
        "items": False,
        "minItems": 3,
        "maxItems": 3,
    },
    "nested arrays": {
        "type": "array",
        "maxItems": 2,
        "items": {"type": "array", "maxItems": 2, "items": {"type": "boolean"}},
    },
    "empty object": closed(),
    "person": closed(
        name=WORD, age=DIGIT, email={"type": "string", "pattern": "^[a-z]{1,4}@[a-z]{1,4}\\.org$"}
    ),
    "optional property": {
        "type": "object",
        "properties": {"a": DIGIT, "b": WORD},
        "required": ["b"],
        "additionalProperties": False,
    },
    "nullable": closed(value={"type": ["string", "null"], "maxLength": 3}),
    "nested objects": closed(outer=closed(middle=closed(inner=DIGIT))),
    "objects in an array": {
        "type": "array",
        "maxItems": 2,
        "items": closed(id=DIGIT, ok={"type": "boolean"}),
    },
    "any of": {
        "anyOf": [
            closed(kind={"const": "circle"}, radius=DIGIT),
            closed(kind={"const": "square"}, side=DIGIT),
        ]
    },
    "reference": {
        "$defs": {"point": closed(x=DIGIT, y=DIGIT)},
        **closed(start={"$ref": "#/$defs/point"}, end={"$ref": "#/$defs/point"}),
    },
    "all of": {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 7}]},
    "quotes in names": closed(
        **{'a "quoted" name': DIGIT, "späße": {"type": "boolean"}, "a\\b": {"type": "null"}}
    ),
    "long forced text": closed(
        this_name_is_long_and_nobody_may_choose_it={
            "const": "and so is this value of the property"
        },
        last=DIGIT,
    ),
    "extraction": closed(
        title=WORD,
        year={"type": "integer", "minimum": 1990, "maximum": 2030},
        rating={"enum": ["low", "mid", "high"]},
        authors={
            "type": "array",
            "items": closed(first=WORD, last=WORD),
            "minItems": 1,
            "maxItems": 2,
        },
    ),
    "tool call": closed(
        name={"const": "get_weather"},
        arguments=closed(city=WORD, unit={"enum": ["celsius", "fahrenheit"]}),
    ),
}
