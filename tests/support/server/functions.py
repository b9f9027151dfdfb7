"""Functions that a model may call in tests: their schemas, and the tools of a chat."""

from __future__ import annotations

from typing import Any

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 3}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
POINT = {
    "$defs": {"axis": {"type": "integer", "minimum": 0, "maximum": 9}},
    "type": "object",
    "properties": {"x": {"$ref": "#/$defs/axis"}, "y": {"$ref": "#/$defs/axis"}},
    "required": ["x", "y"],
    "additionalProperties": False,
}
SCHEMAS = {
    "weather": CITY,
    "go_to": POINT,
    "stop": {"type": "object", "properties": {}, "additionalProperties": False},
}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "Weather of a city", "parameters": CITY},
    },
    {"type": "function", "function": {"name": "go_to", "parameters": POINT}},
    {"type": "function", "function": {"name": "stop"}},
]
