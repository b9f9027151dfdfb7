"""Closed schemas: nothing is allowed that the schema forbids, and nothing satisfiable is lost."""

from __future__ import annotations

import copy
import itertools
import json
import time
from typing import Annotated, Any, Literal

import jsonschema
import pytest
from hypothesis import given, settings, strategies as st
from pydantic import BaseModel, Field

from draftwell.serving.errors import InvalidRequest
from draftwell.serving.runtime.grammar.closing import closed
from draftwell.serving.runtime.grammar.guidance import LONGEST_DEFINITION

A, B = {"properties": {"a": {"type": "integer"}}}, {"properties": {"b": {}}, "required": ["b"]}


OBJECT = A | {"type": "object"}
K = {"properties": {"k": {"const": 1, "default": 1}}}


class Point(BaseModel):
    x: int
    y: int = 0


class Circle(BaseModel):
    kind: Literal["circle"] = "circle"
    centre: Point


class Line(BaseModel):
    kind: Literal["line", "lines"] = "line"
    points: list[Point]


class Drawing(BaseModel):
    shapes: list[Annotated[Circle | Line, Field(discriminator="kind")]]
    origin: Point | None = None
    corners: tuple[Point, Point]
    named: dict[str, Point] = {}
    parent: Drawing | None = None


def objects(node: Any) -> list[dict[str, Any]]:
    """The schemas that list properties."""
    if isinstance(node, list):
        return [one for part in node for one in objects(part)]
    if not isinstance(node, dict):
        return []
    own = [node] if isinstance(node.get("properties"), dict) else []
    return own + [one for part in node.values() for one in objects(part)]


def test_every_object_that_pydantic_writes_is_closed() -> None:
    schema = Drawing.model_json_schema()
    before = copy.deepcopy(schema)
    found = objects(closed(schema))
    assert len(found) == 4
    assert [one.get("additionalProperties") for one in found] == [False] * 4
    for shape in ("Circle", "Line"):
        assert "kind" in closed(schema)["$defs"][shape]["required"]
    assert '"oneOf"' not in json.dumps(closed(schema)), "llguidance refuses most"
    assert schema == before


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [A, B]},
        {"allOf": [{"$ref": "#/$defs/a"}, B], "$defs": {"a": A}},
        A | {"allOf": [B]},
        A | {"anyOf": [B, {"required": ["c"]}]},
        A | {"if": B, "then": {"required": ["c"]}},
        A | {"$ref": "#/$defs/b", "$defs": {"b": B}},
        A | {"dependentSchemas": {"a": B}},
        A | {"required": ["c"]},
        A | {"minProperties": 2},
        A | {"patternProperties": {"^x": {}}},
        A | {"unevaluatedProperties": {"type": "null"}},
        A | {"additionalProperties": True},
        {"oneOf": [A, B]},
        {"oneOf": [OBJECT, {"type": ["object", "null"]}]},
        {"oneOf": [K | {"required": ["k"]}, {"type": "object"}]},
        {"oneOf": [K | {"maxProperties": 0}, {"properties": {"k": {"const": 2}}}]},
        {"not": A},
        {"allOf": [{"properties": {"x": A}}, {"properties": {"x": B}}]},
        {"items": A, "contains": B},
    ],
    ids=str,
)
def test_what_others_have_a_say_about_stays_open(schema: dict[str, Any]) -> None:
    assert closed(schema) == schema


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [{"$ref": "#/$defs/a"}], "default": {}, "description": "x", "$defs": {"a": A}},
        {"anyOf": [A, {"type": "null"}]},
        {
            "type": "object",
            "oneOf": [{"properties": {"k": {"const": k}}, "required": ["k"]} for k in ("c", "d")],
        },
        {"oneOf": [OBJECT, {"type": "null"}, {"type": ["integer", "string"]}]},
        {"oneOf": [{"$ref": "#/$defs/a"}, {"type": "null"}], "$defs": {"a": OBJECT}},
        {"$ref": "#/$defs/a", "x-order": 1, "format": "z", "$defs": {"a": A}},
        {"prefixItems": [A], "items": A},
        {"patternProperties": {"^x": A}},
        {"additionalProperties": A},
        {"definitions": {"a/b": A}, "$ref": "#/definitions/a~1b"},
    ],
    ids=str,
)
def test_what_stands_alone_is_closed(schema: dict[str, Any]) -> None:
    assert all(one["additionalProperties"] is False for one in objects(closed(schema)))


@pytest.mark.parametrize(
    "schema",
    [{"properties": 1}, {"required": 2, "properties": {}}, {"oneOf": [{"properties": []}] * 2},
     {"$ref": "#/nowhere"}, {"$ref": 3}, {"allOf": {}}, True, []],
    ids=str,
)  # fmt: skip
def test_what_is_no_schema_is_left_to_whoever_reads_it(schema: Any) -> None:
    assert closed(copy.deepcopy(schema)) == schema


@pytest.mark.parametrize("members", [10_000, 200_000])
def test_closing_takes_no_longer_than_the_schema_is_long(members: int) -> None:
    """It is done for any client, and nothing ends it; one too long is left to who refuses it."""
    schema = {"oneOf": [1] * members} | {f"x{number}": A for number in range(members // 10)}
    began = time.thread_time()
    assert (closed(schema) is schema) == (members > 10_000)
    assert time.thread_time() - began < 1


def test_a_chain_that_is_too_long_to_follow_is_refused() -> None:
    chain = {f"d{i}": {"properties": {"n": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(900)}
    with pytest.raises(InvalidRequest, match="nested too deeply"):
        closed({"$ref": "#/$defs/d0", "$defs": chain})


def test_definitions_that_many_choices_use_are_read_once() -> None:
    many: dict[str, Any] = {f"p{number}": {} for number in range(2500)}
    many["k"] = {"enum": list(range(500))}
    used = {"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]}
    defs = {name: {"properties": many, "required": list(many)} for name in "ab"}
    text = json.dumps({"items": [used] * 1000, "$defs": defs})
    assert len(text) < LONGEST_DEFINITION
    schema = json.loads(text)
    began = time.thread_time()
    assert closed(schema) == schema
    assert time.thread_time() - began < 1


NAMES = ("a", "b")
LEAVES = [
    *({}, {"type": "integer"}, {"type": "null"}, {"const": 1}),
    *({"const": 1, "default": 1}, {"const": "x", "default": "x"}),
]
"""Properties, and what they may be; instances may have a third one."""


def listing(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Objects, choices and combinations of schemas."""
    some = st.lists(st.sampled_from((*NAMES, "c")), unique=True, max_size=2)
    listed = st.dictionaries(st.sampled_from(NAMES), inner, max_size=2)
    plain = st.fixed_dictionaries(
        {"properties": listed},
        optional={"required": some, "type": st.just("object"), "minProperties": st.just(2)},
    )
    parts = st.lists(inner, min_size=1, max_size=2)
    combined = st.fixed_dictionaries(
        {},
        optional=dict.fromkeys(("allOf", "anyOf", "oneOf"), parts)
        | dict.fromkeys(("not", "if", "then", "additionalProperties"), inner),
    )
    both = st.tuples(plain, combined).map(lambda pair: pair[0] | pair[1])
    reference = st.sampled_from(["#/$defs/p", "#/$defs/q"]).map(lambda to: {"$ref": to})
    return st.one_of(plain, combined, both, reference)


SCHEMAS = st.recursive(st.sampled_from(LEAVES), listing, max_leaves=6)


def instances() -> list[Any]:
    """Every value of two levels of which the families above can tell one from another."""
    leaves = [1, "x", None]
    inner = [*leaves, {}, {"a": 1}, {"b": "x", "c": None}]
    made: list[Any] = list(leaves)
    for size in range(3):
        for names in itertools.combinations((*NAMES, "c"), size):
            made += [
                dict(zip(names, values, strict=True))
                for values in itertools.product(inner, repeat=size)
            ]
    return made


INSTANCES = instances()


@settings(max_examples=100, deadline=None)
@given(schema=SCHEMAS, p=SCHEMAS, q=listing(st.sampled_from(LEAVES)))
def test_closing_keeps_schemas_satisfiable_and_allows_nothing_new(
    schema: dict[str, Any], p: Any, q: Any
) -> None:
    whole = {**schema, "$defs": {"p": without_references(p), "q": without_references(q)}}
    before, after = map(jsonschema.Draft202012Validator, (whole, closed(whole)))
    allowed = [one for one in INSTANCES if before.is_valid(one)]
    kept = [one for one in INSTANCES if after.is_valid(one)]
    assert all(one in allowed for one in kept)
    assert bool(kept) == bool(allowed)


def without_references(node: Any) -> Any:
    """Definitions that do not refer to each other, which could go on for ever."""
    if isinstance(node, list):
        return [without_references(one) for one in node]
    if not isinstance(node, dict):
        return node
    return {key: without_references(value) for key, value in node.items() if key != "$ref"}
