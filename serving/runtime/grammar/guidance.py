"""Grammars by llguidance: JSON schemas, regular expressions, lists of choices and context-free
grammars over a tokenizer's vocabulary."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from draftwell.serving.errors import DraftwellError, InvalidRequest, missing_package
from draftwell.serving.runtime.grammar.intersections import (
    MOST_KEY_PAIRS,
    MOST_PAIRS,
    Patterns,
    pairs_in_lark,
)

Returned = TypeVar("Returned")

WHITESPACE = r"(\x20{1,2}|\n[\x20\t]{0,32})"
"""What may stand between the parts of a JSON text: spaces, or a new line with its indentation.
Small models that may write any amount of it often write nothing else any more."""
LONGEST_MESSAGE = 300
MOST_ITEMS = 1000
"""Readings of a text that a grammar may leave open at one place (Earley items in a row). What a
mask costs grows with their third power: 34 to 60 ms at so many, 250 at llguidance's own limit of
2,000. Of 2,829 schemas the largest needs 803 (docs/log.md), and a choice of texts one for each."""
LONGEST_DEFINITION, MOST_RULES = 200_000, 1000
"""Characters of a definition, and rules or references in it. Compilers follow chains of rules by
recursion: some thousands overflow their stack, which would end the process."""

SCHEMA = re.compile(r"%json\s*")
"""What stands before a schema in Lark."""
DIGITS = json.JSONDecoder(parse_int=str, parse_float=str, parse_constant=str)
"""Reads numbers as they are written."""
CHOICES = frozenset({"allOf", "anyOf", "oneOf"})
# fmt: off
FURTHER = frozenset({
    "$ref", "$dynamicRef", "$recursiveRef", "patternProperties", "dependentSchemas",
    "dependencies", "propertyNames", "contains", "not", "if", "then", "else",
})
# fmt: on
"""Both ask something of values that other words of the same schema are about."""
MOST_REMAINDERS = 50_000
"""A multiple of n is told by n remainders, each a state that is built while a grammar is compiled:
0.4 s for so many, 9 s for a million, minutes for ten. Where one number may be asked for several
multiples, or for one of them, each set of remainders is a state. llguidance's fuel does not count
them."""


def json_schema(schema: Mapping[str, Any] | bool, whitespace: str = WHITESPACE) -> str:
    """A grammar of the JSON texts that a schema allows, properties in the schema's order.

    Args:
        whitespace: regular expression of what may stand between the parts.
    """
    compiler = matcher_class()
    try:
        text = json.dumps(schema)
        check_size(text, references(text))
        check_multiples([DIGITS.decode(text)])
        check_patterns([json.loads(text)])
        return str(
            compiler.grammar_from_json_schema(text, overrides={"whitespace_pattern": whitespace})
        )
    except (ValueError, RecursionError) as error:
        raise refused(f"a schema that is nested too deeply: {error}") from error


def json_rule(schema: Mapping[str, Any] | bool, whitespace: str = WHITESPACE) -> str:
    """The body of a rule in Lark for the JSON texts that a schema allows, unless the schema has its
    own options for llguidance."""
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    options = schema.get("x-guidance")
    options = {"whitespace_pattern": whitespace, **(options if isinstance(options, dict) else {})}
    try:
        return f"%json {json.dumps({**schema, 'x-guidance': options})}"
    except (ValueError, RecursionError) as error:
        raise refused(f"a schema that is nested too deeply: {error}") from error


def references(text: str) -> int:
    """References in a schema, or in rules that hold some."""
    return text.count('"$ref"') + text.count('"$dynamicRef"')


def regex(pattern: str) -> str:
    """A grammar of the texts that a regular expression matches as a whole (Rust's syntax, without
    look-around)."""
    check_size(pattern)
    return str(matcher_class().grammar_from_regex(pattern))


def choice(texts: Sequence[str]) -> str:
    """A grammar of some texts."""
    return lark(f"start: {alternatives(texts)}", rules=1)


def alternatives(texts: Sequence[str]) -> str:
    """The body of a rule in Lark for one of some texts."""
    return " | ".join(json.dumps(text) for text in texts)


def lark(text: str, rules: int | None = None) -> str:
    """A grammar in llguidance's variant of Lark.

    Args:
        rules: how many it has, where that is known; no two of its schemas are then about one place.
    """
    check_size(text, text.count(":") if rules is None else rules)
    schemas = schemas_in(text)
    check_multiples(schemas, together=rules is None)
    check_patterns(schemas)
    check_pairs("an intersection (&)", recursed(pairs_in_lark, text))
    return str(matcher_class().grammar_from_lark(text))


def context_free(text: str) -> str:
    """A grammar in Lark, or in GBNF (llama.cpp), whose rules have `::=`.

    Raises:
        InvalidRequest: GBNF that cannot be read.
    """
    check_size(text, text.count(":"))
    if "::=" not in text:
        return lark(text)
    matcher_class()
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return lark(any_to_lark(text))
    except Exception as error:
        raise refused(str(error)) from error


def matcher_class() -> Any:
    """llguidance's `LLMatcher`.

    Raises:
        DraftwellError: llguidance is not installed (`missing_package`).
    """
    try:
        from llguidance import LLMatcher
    except ImportError as error:
        raise missing_package("structured output needs", "llguidance", "server") from error
    return LLMatcher


def check_size(text: str, rules: int = 0) -> None:
    """Refuse a definition that is too large.

    Raises:
        InvalidRequest: it is.
    """
    if len(text) > LONGEST_DEFINITION:
        raise refused(f"it has {len(text)} characters, at most {LONGEST_DEFINITION} are read")
    if rules > MOST_RULES:
        raise refused(f"it has {rules} rules or references, at most {MOST_RULES} are read")


def schemas_in(text: str) -> list[Any]:
    """The JSON schemas in Lark; what is no JSON is left to the compiler."""
    found = []
    for mark in SCHEMA.finditer(text):
        with contextlib.suppress(ValueError, RecursionError):
            found.append(DIGITS.raw_decode(text, mark.end())[0])
    return found


def check_multiples(schemas: Sequence[Any], together: bool = False) -> None:
    """Refuse schemas whose multiples would take long to compile.

    Args:
        together: several of the schemas may be about one number.
    Raises:
        InvalidRequest: there are too many, or too large ones.
    """
    found = Multiples()
    try:
        holding = sum([found.held(schema) for schema in schemas])
    except RecursionError as error:
        raise refused("a schema that is nested too deeply") from error
    states = found.states(found.meet or (together and holding > 1))
    if states > MOST_REMAINDERS:
        raise refused(
            f"its values of multipleOf take {states} states or more (their sum, or their least "
            "common multiple if several are about one number), at most "
            f"{MOST_REMAINDERS} can be: name fewer, smaller or rounder ones"
        )


def check_patterns(schemas: Sequence[Any]) -> None:
    """Refuse schemas whose patterns would take long to compile.

    Raises:
        InvalidRequest: too many of them may be about one text, or about the keys of an object.
    """
    found = [recursed(Patterns, schema) for schema in schemas]
    check_pairs(
        "a text that several patterns or formats are about",
        max((one.most.pairs for one in found), default=1.0),
    )
    if (pairs := sum(one.key_pairs for one in found)) > MOST_KEY_PAIRS:
        raise refused(
            f"its patternProperties have {pairs} pairs of patterns, at most {MOST_KEY_PAIRS} can "
            "be: name fewer in one object"
        )


def check_pairs(what: str, pairs: float) -> None:
    """Refuse an intersection that would take long to compile.

    Raises:
        InvalidRequest: it would.
    """
    if pairs > MOST_PAIRS:
        raise refused(
            f"{what} has up to {pairs:.2g} combinations of sets of characters (their number in a "
            f"part, to the power of the number of parts), at most {MOST_PAIRS} can be: join fewer "
            "or simpler ones"
        )


def recursed(call: Callable[[Any], Returned], value: Any) -> Returned:
    """What a function that follows a definition finds.

    Raises:
        InvalidRequest: the definition is nested too deeply.
    """
    try:
        return call(value)
    except RecursionError as error:
        raise refused("a definition that is nested too deeply") from error


class Multiples:
    """The values of `multipleOf` in schemas, and whether two may be about one number.

    >>> one = Multiples()
    >>> one.held({"items": {"multipleOf": "0.25"}, "contains": {"multipleOf": "30"}}), one.meet
    (True, True)
    >>> one.states(together=False), one.states(together=True)
    (28, 75)
    """

    def __init__(self) -> None:
        self.meet = False
        self._found: set[str] = set()

    def held(self, node: Any) -> bool:
        """Whether a schema has multiples, or refers to some."""
        if isinstance(node, list):
            return sum([self.held(one) for one in node]) > 0  # all of them, each is noted
        if not isinstance(node, dict):
            return False
        own, others = "multipleOf" in node, 0
        if own:
            self._found.add(str(node["multipleOf"]))
        for key, value in node.items():
            if key in CHOICES and isinstance(value, list):
                others += sum([self.held(one) for one in value])
            elif key in FURTHER:
                others += self.held(value) or key.lower().endswith("ref")
            elif self.held(value) and key not in ("$defs", "definitions"):
                own = True
        self.meet |= own + others > 1
        return own or others > 0

    def states(self, together: bool) -> int:
        """States that they may need; counted no further than is too many."""
        total = int(together)
        for number in self._found:
            try:
                digits = Decimal(number).normalize().as_tuple().digits  # at most 28
            except ArithmeticError:
                continue  # the compiler says so
            one = int("".join(map(str, digits)) or 1) or 1
            total = math.lcm(total, one) if together else total + one
            if total > MOST_REMAINDERS:
                break
        return total


class GuidanceTokenizer:
    """A pair's vocabulary as llguidance reads it; made once for a pair, in about a second for large
    vocabularies.

    Args:
        tokenizer: a fast tokenizer of transformers.
        vocab_size: ids that the models know.
        stops: tokens that end a text, at least one.
    Raises:
        DraftwellError: llguidance is not installed (`missing_package`), or cannot read the
            tokenizer (`tokenizer_unsupported`).
    """

    def __init__(self, tokenizer: Any, vocab_size: int, stops: frozenset[int]):
        matcher_class()
        from llguidance import LLTokenizer
        from llguidance.hf import from_tokenizer

        self.vocab_size = vocab_size
        try:
            ends = sorted(stops)
            spelling: Any = PlainSpelling(from_tokenizer(tokenizer, eos_token=ends), ends[0])
            self.reader = LLTokenizer(spelling, eos_token=ends)
        except Exception as error:
            raise DraftwellError(
                f"llguidance cannot read this model's tokenizer: {one_line(str(error))}",
                code="tokenizer_unsupported",
            ) from error


class PlainSpelling:
    """A vocabulary in which a special token is never a spelling of the text that is its name
    (llguidance's `TokenizerWrapper`).

    A tokenizer reads the name of a special token in a text as that token. llguidance would force
    the token where a grammar has such a text, and then refuse it.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, reader: Any, eos_token: int):
        self.eos_token_id = eos_token
        self.tokens = [reader.decode_bytes([token]) for token in range(reader.vocab_size)]
        self.special_token_ids = [
            token for token in range(reader.vocab_size) if reader.is_special_token(token)
        ]
        self._reader, self._special = reader, frozenset(self.special_token_ids)

    def __call__(self, text: str | bytes) -> list[int]:
        written = text.encode() if isinstance(text, str) else text
        ids = list(self._reader.tokenize_bytes(written))
        return (
            ids
            if self._special.isdisjoint(ids)
            else list(self._reader.greedy_tokenize(written.decode(errors="replace")))
        )


class GuidanceGrammar:
    """A `Grammar` of llguidance, compiled.

    Args:
        definition: what the functions above return.
    Raises:
        InvalidRequest: it is no grammar, or asks for what llguidance does not know
            (`invalid_grammar`).
    """

    def __init__(self, tokenizer: GuidanceTokenizer, definition: str):
        from llguidance import LLMatcher, LLParserLimits

        self.vocab_size = tokenizer.vocab_size
        self._beginning = LLMatcher(
            tokenizer.reader,
            definition,
            log_level=0,
            limits=LLParserLimits(verbose_errors=False, max_items_in_row=MOST_ITEMS),
        )
        if not self._beginning.is_error():
            # some grammars turn out to allow nothing, or to be too complex
            self._beginning.compute_bitmask()
        if self._beginning.is_error():
            raise refused(self._beginning.get_error())

    def matcher(self) -> GuidanceMatcher:
        return GuidanceMatcher(self._beginning.deep_copy(), self.vocab_size)


class GuidanceMatcher:
    """A `Matcher` of llguidance."""

    def __init__(self, matcher: Any, vocab_size: int):
        self._matcher, self._vocab_size = matcher, vocab_size

    def allowed(self) -> NDArray[np.bool_]:
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():
            raise refused(self._matcher.get_error())
        mask = np.unpackbits(
            bits, bitorder="little", count=min(8 * len(bits), self._vocab_size)
        ).view(np.bool_)
        return (
            mask
            if len(mask) == self._vocab_size
            else np.pad(mask, (0, self._vocab_size - len(mask)))
        )

    def accept(self, token: int) -> bool:
        taken = bool(self._matcher.try_consume_tokens([token]) == 1)
        # it has met a limit: whether the token may come is not known
        if not taken and self._matcher.is_error():
            raise refused(self._matcher.get_error())
        return taken

    def rollback(self, count: int) -> None:
        if count and not self._matcher.rollback(count):
            raise refused(self._matcher.get_error())

    def forced(self) -> list[int]:
        return list(self._matcher.compute_ff_tokens())


def refused(message: str) -> InvalidRequest:
    """The error of a grammar that cannot be used."""
    return InvalidRequest(
        f"the grammar cannot be used: {one_line(message)}", code="invalid_grammar"
    )


def one_line(message: str) -> str:
    """A message of llguidance on one line, without the excerpt of its own text that it ends with.

    >>> one_line("at 1(8): unknown name: \\"foo\\"\\n   1 | start: foo\\n              ^\\n\\n")
    'at 1(8): unknown name: "foo"'
    """
    lines = [line.strip() for line in message.replace("<non-verbose/>", "").splitlines()]
    kept = [
        line
        for line in lines
        if line and set(line) != {"^"} and not line.partition(" | ")[0].isdigit()
    ]
    text = " ".join(kept)
    return text if len(text) <= LONGEST_MESSAGE else text[: LONGEST_MESSAGE - 1] + "…"
