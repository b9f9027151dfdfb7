"""llguidance's grammars over a tiny pair: what is finished is valid, whatever drafts; what is no
grammar is refused in one line."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest

from draftwell.serving.errors import InvalidRequest
from draftwell.serving.runtime.grammar import guidance
from draftwell.serving.runtime.grammar.guidance import (
    LONGEST_DEFINITION,
    GuidanceGrammar,
    GuidanceTokenizer,
)
from draftwell.serving.runtime.grammar.intersections import Patterns, pairs_in_lark
from draftwell.serving.runtime.pair import LoadedPair
from draftwell.serving.runtime.strategies import build_strategy
from draftwell.serving.server.http.requests import MOST_TEXTS
from tests.serving.runtime.grammar.schemas import SCHEMAS
from tests.support.server.served_pair import spaced_tokenizer, tiny_pair


@pytest.fixture(scope="module")
def pair() -> LoadedPair:
    return tiny_pair(slots=2)


@pytest.fixture(scope="module")
def compiled(pair: LoadedPair) -> Callable[[str], GuidanceGrammar]:
    tokenizer = GuidanceTokenizer(
        pair.tokenizer, pair.models["target"].vocab_size, pair.stop_tokens
    )
    return lambda definition: GuidanceGrammar(tokenizer, definition)


def written(
    pair: LoadedPair, grammar: GuidanceGrammar, name: str = "vanilla_sd", **asked: Any
) -> tuple[str, str | None, Any]:
    """Text, why it ended, and statistics."""
    sampling = pair.sampling(**{"max_tokens": 240, "grammar": grammar} | asked)
    session = pair.engine().generate(pair.encode("hi"), sampling, build_strategy(name)).session
    return pair.decode(session.text.output), session.text.finish_reason, session.stats


@pytest.mark.parametrize(
    "schema",
    [
        pytest.param(schema, id=name, marks=[pytest.mark.slow] if number % 3 else [])
        for number, (name, schema) in enumerate(SCHEMAS.items())
    ],
)
def test_every_finished_answer_is_valid(pair: LoadedPair, compiled: Any, schema: Any) -> None:
    """And most are finished, though the model writes at random; greedy ones are those of plain
    decoding, token by token."""
    grammar = compiled(guidance.json_schema(schema))
    finished = 0
    for asked in (
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 1},
        {"temperature": 2.0, "seed": 3},
    ):
        text, reason, _ = written(pair, grammar, **asked)
        if reason == "stop":
            finished += 1
            jsonschema.validate(json.loads(text), schema, format_checker=jsonschema.FormatChecker())
    assert finished >= 2
    plain = written(pair, grammar, "autoregressive", temperature=0.0, draft_forced=False)
    for name in ("autoregressive", "vanilla_sd", "prompt_lookup"):
        assert written(pair, grammar, name, temperature=0.0)[:2] == plain[:2]


def test_forced_text_is_drafted_in_its_usual_spelling(pair: LoadedPair, compiled: Any) -> None:
    grammar = compiled(guidance.json_schema(SCHEMAS["long forced text"]))
    plain, stats = (
        written(pair, grammar, "autoregressive", draft_forced=draft)[2] for draft in (False, True)
    )
    assert stats.forced > 60
    # a random model spells "the" as t, h, e as often as not
    assert stats.forced_accepted > 0.5 * stats.forced
    assert stats.target_calls < 0.7 * plain.target_calls


@pytest.mark.parametrize("name", ["autoregressive", "vanilla_sd", "prompt_lookup"])
def test_regular_expressions_choices_and_rules(pair: LoadedPair, compiled: Any, name: str) -> None:
    for seed in range(4):
        asked = {"temperature": 1.0, "seed": seed, "name": name}
        text, reason, _ = written(
            pair, compiled(guidance.regex(r"[0-9]{2,4}(-[a-z]{1,3})?")), **asked
        )
        assert re.fullmatch(r"[0-9]{2,4}(-[a-z]{1,3})?", text)
        assert reason == "stop"
        assert written(
            pair, compiled(guidance.choice(["Paris", 'say "x"', "a\nb", "späte"])), **asked
        )[0] in {"Paris", 'say "x"', "a\nb", "späte"}
        gbnf = 'root ::= "<" item{1,3} ">"\nitem ::= "a" | "bc"'
        assert re.fullmatch(
            r"<(a|bc){1,3}>", written(pair, compiled(guidance.context_free(gbnf)), **asked)[0]
        )
        assert written(
            pair, compiled(guidance.context_free('start: "x" NUMBER\nNUMBER: /[1-9]/')), **asked
        )[0] in {f"x{digit}" for digit in range(1, 10)}


def test_white_space_is_bounded(pair: LoadedPair, compiled: Any) -> None:
    """A model that likes nothing else would fill the answer with it."""
    space = {str(token): 60.0 for token in pair.encode(" \n\t")}
    text, reason, _ = written(
        pair,
        compiled(guidance.json_schema(SCHEMAS["person"])),
        logit_bias={int(t): b for t, b in space.items()},
    )
    assert re.search(r"\n[ \t]{32}", text)
    assert not re.search(r"\s{34}", text)
    assert reason == "length" or json.loads(text)


@pytest.mark.parametrize(
    ("define", "said"),
    [
        (lambda: guidance.json_schema({"type": "text"}), "Invalid type: text"),
        (lambda: guidance.json_schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (lambda: guidance.json_schema({"$ref": "#/$defs/none"}), "does not exist"),
        (lambda: guidance.json_schema({"enum": []}), "Unsatisfiable"),
        (lambda: guidance.json_schema({"type": "string", "pattern": "("}), "unclosed group"),
        (lambda: guidance.regex("("), "unclosed group"),
        (lambda: guidance.regex("(?=a)b"), "look-around"),
        (lambda: guidance.context_free("start: none"), "unknown name"),
        (lambda: guidance.context_free("root ::= ("), "Expected"),
    ],
)
def test_what_is_no_grammar_is_refused_in_one_line(compiled: Any, define: Any, said: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        compiled(define())
    assert said in str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 400


def test_a_tokenizer_that_spells_a_space_apart(compiled: Any) -> None:
    """As Llama 2's, whose decoder drops a leading space: the text is that of the tokens after a
    prompt."""
    pair = tiny_pair(slots=1, tokenizer=spaced_tokenizer())
    tokenizer = GuidanceTokenizer(
        pair.tokenizer, pair.models["target"].vocab_size, pair.stop_tokens
    )
    text, reason, _ = written(
        pair,
        GuidanceGrammar(tokenizer, guidance.json_schema(SCHEMAS["tool call"])),
        temperature=1.0,
    )
    assert reason == "stop"
    jsonschema.validate(json.loads(text), SCHEMAS["tool call"])


def test_models_that_know_other_tokens_than_the_tokenizer(pair: LoadedPair) -> None:
    """Padded heads know more, smaller ones fewer; the mask has as many tokens as the models."""
    for size in (250, 300):
        tokenizer = GuidanceTokenizer(pair.tokenizer, size, pair.stop_tokens)
        mask = GuidanceGrammar(tokenizer, guidance.regex("[a-z]+")).matcher().allowed()
        assert len(mask) == size
        assert mask[pair.encode("q")[0]]
        assert not mask[265:].any()


def test_the_name_of_a_special_token_is_spelt_as_text(pair: LoadedPair, compiled: Any) -> None:
    """As the token it would end the text, or be refused after it was forced; the mark of a special
    token names the token itself."""
    words = ["a <|end|> b", "<|start|>"]
    for seed in range(3):
        text, reason, _ = written(
            pair, compiled(guidance.json_schema({"enum": words})), temperature=1.0, seed=seed
        )
        assert json.loads(text) in words
        assert reason == "stop"
    token = pair.tokenizer.convert_tokens_to_ids("<|start|>")
    assert compiled(guidance.lark('start: <|start|> "x"')).matcher().allowed().nonzero()[
        0
    ].tolist() == [token]


def test_a_grammar_that_leaves_ever_more_readings_open_is_given_up(
    pair: LoadedPair, compiled: Any
) -> None:
    """Its masks cost the third power of them, and all other requests wait for a mask."""
    matcher = compiled(
        guidance.context_free('start: s\ns: x s | s x | x x\nx: "a" | "a" x | x "a"')
    ).matcher()
    letter, began = pair.encode("a")[0], time.thread_time()

    def write(count: int) -> None:
        for _ in range(count):
            assert matcher.allowed()[letter]
            assert matcher.accept(letter)

    write(30)
    with pytest.raises(InvalidRequest) as error:
        write(90)
    assert error.value.code == "invalid_grammar"
    assert time.thread_time() - began < 3


def whole(multiple: int) -> dict[str, Any]:
    return {"type": "integer", "multipleOf": multiple}


SLOW = {
    "one": whole(9999991),
    "decimal": {"type": "number", "multipleOf": 0.1000003},
    "allOf": {"type": "integer", "allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]},
    "$ref": whole(9973) | {"$ref": "#/$defs/a", "$defs": {"a": {"multipleOf": 9967}}},
    "many": {"properties": {f"p{number}": whole(49999 - number) for number in range(12)}},
    "patterns": {"properties": {"a": whole(499)}, "patternProperties": {"a": whole(503)}},
    "choice": {"anyOf": [whole(number) for number in (97, 101, 103, 107)]},
    "objects": {"oneOf": [{"properties": {"a": whole(number)}} for number in (4993, 4999)]},
}


@pytest.mark.parametrize("name", SLOW)
def test_a_multiple_that_takes_minutes_to_compile_is_refused(name: str) -> None:
    schema = SLOW[name]
    rule = guidance.json_rule(schema).replace("multipleOf", r"multiple\u004ff")
    for define in (
        lambda: guidance.json_schema(schema),
        lambda: guidance.lark(f"start: {guidance.json_rule(schema)}", rules=1),
        lambda: guidance.context_free(f"start: {rule}"),
    ):
        with pytest.raises(InvalidRequest, match="multipleOf"):
            define()


def test_rules_that_may_come_at_one_place_are_counted_together() -> None:
    rules = [guidance.json_rule(whole(number)) for number in (499, 503)]
    with pytest.raises(InvalidRequest, match="multipleOf"):
        guidance.context_free(f"start: a | b\na: {rules[0]}\nb: {rules[1]}")
    assert guidance.lark(f'start: "a" a | "b" b\na: {rules[0]}\nb: {rules[1]}', rules=3)


def test_multiples_of_different_values_are_taken(compiled: Any) -> None:
    """Choices and references elsewhere do not make them multiples of one value."""
    null = {"type": "null"}
    compiled(
        guidance.json_schema(
            {
                "properties": {
                    "a": whole(999),
                    "b": {"anyOf": [whole(1001), null], "default": None},
                    "c": {"anyOf": [{"type": "string"}, null]},
                    "d": {"$ref": "#/$defs/d", "description": "nested"},
                    "e": {"allOf": [{"$ref": "#/$defs/d"}]},
                },
                "$defs": {"d": {"properties": {"f": whole(997)}}},
            }
        )
    )


@pytest.mark.parametrize("multiple", [7, 0.01, 0.25, 1024, 1000000])
def test_usual_multiples_are_taken(pair: LoadedPair, compiled: Any, multiple: float) -> None:
    matcher = compiled(guidance.json_schema({"multipleOf": multiple, "type": "number"})).matcher()
    for token in pair.encode(str(multiple)):
        assert matcher.accept(token)


def branches(seed: int, count: int) -> str:
    """A regular expression that may begin with that many overlapping sets of characters."""
    one = (f"[{'abcdefghij'[i]}-z]{'klmnopqrst'[(i + seed) % 10]}{{{i + 1}}}" for i in range(count))
    return f"({'|'.join(one)})+"


def patterned(*patterns: str) -> dict[str, Any]:
    return {"type": "string", "allOf": [{"pattern": pattern} for pattern in patterns]}


def mixins(count: int) -> dict[str, Any]:
    """Schemas of one object, each with its own property of a format."""
    return {
        "allOf": [
            {
                "type": "object",
                "properties": {f"at_{one}": {"type": "string", "format": "date-time"}},
            }
            for one in range(count)
        ]
    }


SEVERAL = [branches(seed, 10) for seed in range(6)]
JOINED = " & ".join(f"/{one}/" for one in SEVERAL)
PARTS = "".join(f"P{seed}: /{one}/\n" for seed, one in enumerate(SEVERAL))
REFERRED = {"$ref": "#/$defs/five%20of%20them", "$defs": {"five of them": patterned(*SEVERAL[1:])}}
TOGETHER = {
    "one terminal": f"start: X\nX: {JOINED}",
    "complements": f"start: X\nX: {JOINED.replace('/(', '~/(')}",
    "named": f"start: X\nX: P0 & P1 & P2 & P3 & P4 & P5\n{PARTS}",
    "nested": f"start: X\nX: (Y | Z)+ & P0\nY: (P1 & P2)+\nZ: Y+ & P3 & P4\n{PARTS}",
    "ignored": f"%ignore {JOINED}\nstart: /c/",
    "in brackets": f'start: "a" ( X | "/" ) // "\nX: ({JOINED.replace("& ", "&")})',
    "patterns": patterned(*SEVERAL),
    "plain patterns": patterned(*(f"w{number}x" for number in range(20))),
    "references": {"pattern": SEVERAL[0], **REFERRED},
    "other references": {
        "$defs": {"a": {"$id": "http://x/a", "pattern": SEVERAL[0]}, **REFERRED["$defs"]},
        "allOf": [{"$ref": "http://x/a"}],
    },
    "properties": {
        "allOf": [{"properties": {"a": {"items": {"pattern": one}}}} for one in SEVERAL]
    },
    "properties and those of a pattern": {
        "allOf": [
            *({"properties": {"a": {"pattern": one}}} for one in SEVERAL[:3]),
            *({"patternProperties": {"^a": {"pattern": one}}} for one in SEVERAL[3:]),
        ]
    },
    "properties and other ones": {
        "allOf": [
            {"properties": {"b": {"pattern": "b"}}, "additionalProperties": {"pattern": one}}
            for one in SEVERAL
        ]
    },
    "a property in choices": {
        "allOf": [
            {"anyOf": [{"properties": {"a": {"pattern": one}}}, {"required": ["b"]}]}
            for one in SEVERAL
        ]
    },
    "one of very many properties": {
        "allOf": [
            {"properties": {f"p{number}": {"pattern": one} for number in range(100)}}
            for one in SEVERAL
        ]
    },
    "choices": {"pattern": SEVERAL[0], "anyOf": [patterned(*SEVERAL[1:]), {"type": "string"}]},
    "keys": {"patternProperties": {f"^k{number}[a-z]+$": {} for number in range(200)}},
}


@pytest.mark.parametrize("name", TOGETHER)
def test_an_intersection_that_takes_minutes_to_compile_is_refused(name: str) -> None:
    asked = TOGETHER[name]
    defined: list[Callable[[], str]] = (
        [lambda: guidance.context_free(asked)]
        if isinstance(asked, str)
        else [
            lambda: guidance.json_schema(asked),
            lambda: guidance.lark(f"start: {guidance.json_rule(asked)}", rules=1),
        ]
    )
    for define in defined:
        with pytest.raises(InvalidRequest, match="at most"):
            define()


@pytest.mark.parametrize(
    "asked",
    [
        r"start: X" + "\n" + r"X: /[a-zA-Z \n]*/ & ~/(?s:.*)\n\n(?s:.*)/",
        "start: (X | /[a-z&~]+/)*\n# & & &\nX: /[a-z]+/ & /.*x.*/ & ~(KEYWORD)\n"
        "KEYWORD: " + " | ".join(f'"k&{number}"' for number in range(150)),
        "start: X\nX: /(?s:.*)/" + "".join(f" & ~/(?s:.*){word}(?s:.*)/" for word in "abcdefgh"),
        f"start: X\nX: /{SEVERAL[0]}/ & /{SEVERAL[1]}/",
        {"properties": {f"p{number}": {"pattern": one} for number, one in enumerate(SEVERAL)}},
        {"anyOf": [{"type": "string", "pattern": f"^{one}$"} for one in SEVERAL]},
        mixins(8),
        {"$ref": "#/$defs/all", "$defs": {"all": mixins(200)}},
        patterned("^[a-z]+$", "x") | {"format": "hostname", "minLength": 3},
        {
            "$ref": "#/$defs/tree",
            "$defs": {
                "tree": {
                    "properties": {
                        "name": {"type": "string", "pattern": "^[a-z][a-z0-9_]*$"},
                        "leaves": {"type": "array", "items": {"$ref": "#/$defs/tree"}},
                    }
                }
            },
        },
        {"patternProperties": {f"^k{number}_": {"type": "string"} for number in range(50)}},
    ],
    ids=lambda asked: str(asked)[:40],
)
def test_usual_intersections_are_taken(compiled: Any, asked: Any) -> None:
    define = guidance.context_free if isinstance(asked, str) else guidance.json_schema
    compiled(define(asked))


def test_looking_at_odd_grammars_takes_no_longer_than_their_length() -> None:
    """Their time would grow with the square of it: many seconds for each of these."""
    for odd in ("a", "a ", "a[", "/\\", '"\\', "<", "&", "[", "a.", "\n", "x:", "A: A & A\n"):
        began = time.thread_time()
        pairs_in_lark("&" + odd * (LONGEST_DEFINITION // 2 // len(odd)))
        assert time.thread_time() - began < 2
    began = time.thread_time()
    many = {"properties": {f"p{number}": {"pattern": "a"} for number in range(1000)}}
    Patterns({"allOf": [{"$ref": "#/$defs/many"}] * 5000, "$defs": {"many": many}})
    assert time.thread_time() - began < 2


def test_the_longest_choice_can_be_written(pair: LoadedPair, compiled: Any) -> None:
    """Each text is a reading that the grammar leaves open at the first place."""
    texts = [f"text {number}" for number in range(MOST_TEXTS)]
    text, reason, _ = written(
        pair, compiled(guidance.lark(f"start: {guidance.alternatives(texts)}")), max_tokens=40
    )
    assert (text in texts, reason) == (True, "stop")
