"""JSON schemas: what is enforced is enforced to the letter, the rest is refused with its path (V09)."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_vocabularies import byte_level

from answers import answer
from bytefloor.errors import RequestError
from bytefloor.text.grammar import Grammar, compile_grammar
from bytefloor.text.tokenizer import Tokenizer

TINY = Tokenizer.from_gguf(byte_level(("<end>", "<turn>"), eos_token_id="<end>", eot_token_id="<turn>"))


@pytest.mark.parametrize(
    ("schema", "parts"),
    [
        ({"properties": {"a": {"items": {"uniqueItems": True}}}}, ["#/properties/a/items:", "'uniqueItems'"]),
        ({"not": {}}, ["#:", "'not'"]),
        ({"if": {}, "then": {}}, ["#:", "'if'"]),
        ({"properties": {"a/b": {"propertyNames": {}}}}, ["#/properties/a~1b:", "'propertyNames'"]),
        ({"$defs": {"x": {"contains": {}}}, "$ref": "#/$defs/x"}, ["#/$defs/x:", "'contains'"]),
        ({"anyOf": [{}, {"x-guidance": {"lenient": True}}]}, ["#/anyOf/1:", "'x-guidance'"]),
        ({"properties": {"a": {"type": "strin"}}}, ["#/properties/a/type:", "strin"]),
        ({"properties": {"a": {"type": "string", "format": "zip"}}}, ["#/properties/a/format:", "zip"]),
        ({"type": "integer", "format": "int32"}, ["#/format:", "integer"]),
        ({"properties": {"a": {"pattern": "(?=a)b"}}}, ["#/properties/a/pattern:", "look-around"]),
        ({"items": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}, ["#/items/oneOf:", "oneOf"]),
        ({"allOf": [{}, {"minimum": 5, "maximum": 3, "type": "integer"}]}, ["#/allOf/1:", "minimum (5)"]),
        ({"properties": {"a": {"$ref": "#/$defs/none"}}}, ["#/properties/a/$ref:", "/$defs/none"]),
        ({"properties": {"a": {"$ref": "http://x/y"}}}, ["#/properties/a/$ref:", "http://x/y"]),
        ({"properties": {"a": {"enum": []}}, "required": ["a"], "type": "object"}, ["#:", "'a' is unsatisfiable"]),
        ({"properties": [1]}, ["#/properties:", "[1]", "an object"]),
        ({"anyOf": {}}, ["#/anyOf:", "a list"]),
        ({"items": 5}, ["#/items:", "5"]),
        ({"minProperties": 2}, ["#/minProperties:", "2"]),
        ({"allOf": [{"type": "integer"}, {"type": "string"}]}, ["#/allOf:", "incompatible"]),
        ({"type": "string", "nullable": True}, ["#:", "'nullable'"]),
        (False, ["#:", "false"]),
        (None, ["#:", "null"]),
        ("[1]", ["#:", "[1]"]),
        ('{"a":', ["#:", "not JSON"]),
        ('{"const": NaN}', ["#:", "NaN"]),
        ("[" * 100_000, ["#:"]),
    ],
    ids=lambda value: str(value)[:50] if not isinstance(value, list) else "",
)  # fmt: skip
def test_what_cannot_be_enforced_is_refused_with_its_path(schema: Any, parts: list[str]) -> None:
    """V09."""
    with pytest.raises(RequestError) as error:
        compile_grammar(TINY, "json_schema", schema)
    assert str(error.value).startswith("json_schema: ")
    assert all(part in str(error.value) for part in parts), error.value


def test_a_schema_that_refers_to_itself_too_deep_is_refused() -> None:
    schema: dict = {}
    for _ in range(300):
        schema = {"items": schema}
    with pytest.raises(RequestError, match="nested deeper"):
        compile_grammar(TINY, "json_schema", schema)


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"$ref": "#/$defs/x", "$defs": {"x": {"enum": ["a", "b"]}}}, '"b"', '"c"'),
        ({"type": "string", "maxLength": 2000}, '"' + "x" * 2000 + '"', '"' + "x" * 2001 + '"'),
        ({"enum": ["abc", "b"], "minLength": 2}, '"abc"', '"b"'),
        ({"type": "object", "additionalProperties": False}, "{}", '{"a":1}'),
        ({"properties": {"a": {"type": "integer"}}}, '{"a":1}', '{"a":"x"}'),
        ({"properties": {"a": {"type": "integer"}}}, '{"b":"x"}', '{"b":1,"a":"x"}'),
        ({"patternProperties": {"^a": {"type": "null"}}}, '{"ab":null}', '{"ab":1}'),
        ({"type": "array", "items": [{"type": "null"}]}, "[null,1]", "[1]"),
        ({"type": "integer", "exclusiveMinimum": True, "minimum": 3}, "4", "3"),
        ({"const": {"a": [1, None]}}, '{"a":[1,null]}', '{"a":[1]}'),
        ({"type": "number", "multipleOf": 0.5}, "1.5", "1.25"),
        ({"minLength": 3}, "3", '"ab"'),
        ({"type": "object", "additionalProperties": {"$ref": "#"}}, '{"a":{"a":{}}}', '{"a":{"a":1}}'),
        (True, "[null]", "nul]"),
        ({"type": "string"}, '"é😀"', '"\n"'),
    ],
    ids=lambda value: str(value)[:40],
)
def test_right_and_wrong_answers(schema: Any, right: str, wrong: str) -> None:
    """V09."""
    grammar = compile_grammar(TINY, "json_schema", schema)
    assert takes(grammar, right)
    assert not takes(grammar, wrong)


def takes(grammar: Any, text: str) -> bool:
    """Whether the text, byte by byte, is a whole answer; an end is allowed exactly then."""
    constraint = grammar.start((0,))
    ends = sorted(TINY.end_ids)
    for id in (byte_id(byte) for byte in text.encode()):
        if not constraint.allowed()[id]:
            return False
        constraint.accept(id)
    may_end = constraint.allowed()[ends]
    assert may_end.all() or not may_end.any()
    return bool(may_end.all())


BYTES = {TINY.token_bytes(id): id for id in range(256)}


def byte_id(byte: int) -> int:
    return BYTES[bytes([byte])]


names = st.sampled_from(["a", "b", "c d", "é", '"q"'])
leaves = st.one_of(
    st.just({"type": "null"}),
    st.just({"type": "boolean"}),
    st.builds(lambda low, span: {"type": "integer", "minimum": low, "maximum": low + span},
              st.integers(-20, 20), st.integers(0, 30)),
    st.builds(lambda low, span: {"type": "number", "exclusiveMinimum": low, "maximum": low + span},
              st.integers(-9, 9), st.integers(1, 9)),
    st.builds(lambda n: {"type": "integer", "multipleOf": n}, st.integers(1, 9)),
    st.builds(lambda low, span: {"type": "string", "minLength": low, "maxLength": low + span},
              st.integers(0, 3), st.integers(0, 4)),
    st.sampled_from([{"type": "string", "pattern": "^[a-c]+x?$"}, {"pattern": "b", "maxLength": 3, "type": "string"},
                     {"type": "string", "format": "date"}, {"type": ["string", "null"], "maxLength": 2}]),
    st.builds(lambda values: {"enum": values},
              st.lists(st.sampled_from([1, "a", None, True, 2.5, "é", [1], {"k": 0}]), min_size=1, max_size=4)),
    st.builds(lambda value: {"const": value}, st.sampled_from([7, "seven", [None], {"a": "b"}])),
)  # fmt: skip


def larger(inner: st.SearchStrategy) -> st.SearchStrategy:
    arrays = st.builds(
        lambda item, low, span: {"type": "array", "items": item, "minItems": low, "maxItems": low + span},
        inner, st.integers(0, 2), st.integers(0, 2),
    )  # fmt: skip
    tuples = st.builds(
        lambda first, rest: {"type": "array", "prefixItems": first, "items": rest, "minItems": len(first)},
        st.lists(inner, min_size=1, max_size=2), st.one_of(st.just(False), inner),
    )  # fmt: skip
    return st.one_of(
        objects(inner), arrays, tuples, st.builds(lambda some: {"anyOf": some}, st.lists(inner, min_size=1, max_size=3))
    )


@st.composite
def objects(draw: st.DrawFn, inner: st.SearchStrategy) -> dict:
    properties = draw(st.dictionaries(names, inner, max_size=4))
    required = [name for name in properties if draw(st.booleans())]
    schema: dict = {"type": "object", "properties": properties, "required": required}
    schema["additionalProperties"] = draw(st.one_of(st.booleans(), inner))
    if draw(st.booleans()):
        schema["maxProperties"] = len(properties) + draw(st.integers(0, 2))
    if draw(st.booleans()):
        schema["minProperties"] = min(1, len(required))
    if draw(st.booleans()):
        schema["patternProperties"] = {draw(st.sampled_from(["^x", "y$"])): draw(inner)}
    return schema


schemas = st.recursive(leaves, larger, max_leaves=6)


def compiled_or_impossible(schema: dict) -> Grammar | None:
    try:
        return compile_grammar(TINY, "json_schema", json.dumps(schema))
    except RequestError as error:
        # Of what is drawn here: a key whose schema and pattern exclude each other, and optional keys to be counted.
        reason = str(error)
    assert "nsatisfiable" in reason or "min/maxProperties only supported" in reason
    return None


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(schema=schemas, seed=st.integers(0, 2**32 - 1))
def test_every_finished_answer_is_valid(schema: dict, seed: int) -> None:
    grammar = compiled_or_impossible(schema)
    if grammar is None:
        return
    for attempt in range(3):
        _, text, is_whole = answer(grammar, seed + attempt, n_rows=TINY.n_tokens + 7)
        if is_whole:
            jsonschema.validate(json.loads(text), schema, cls=jsonschema.Draft202012Validator)


def test_most_answers_finish() -> None:
    """The test above says nothing about answers that do not."""
    schema = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "array"}}, "required": ["a", "b"]}
    grammar = compile_grammar(TINY, "json_schema", schema)
    finished = [answer(grammar, seed) for seed in range(20)]
    assert sum(is_whole for _, _, is_whole in finished) >= 15


def test_json_object_is_an_object() -> None:
    grammar = compile_grammar(TINY, "json_object")
    assert takes(grammar, '{"a": [1, {}]}')
    assert not takes(grammar, "[1]")
    for seed in range(5):
        _, text, is_whole = answer(grammar, seed)
        assert not is_whole or isinstance(json.loads(text), dict)


def test_white_space_between_tokens_ends() -> None:
    grammar = compile_grammar(TINY, "json_object")
    assert takes(grammar, "{" + "\n" * 32 + "}")
    assert not takes(grammar, "{" + "\n" * 33 + "}")
