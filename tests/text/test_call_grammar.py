"""Answers that must be calls: what the grammars let through, what they stop, what they refuse to be made for."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from small_chats import GEMMA4_TOKENIZER
from tool_chats import HERMES_CHAT, LLAMA3_CHAT, QWEN3_CHAT, TOOLS, gemma4_chat

from bytefloor.errors import RequestError
from bytefloor.text.call_grammar import GrammarSource, call_grammar
from bytefloor.text.calls import GEMMA4, HERMES, LLAMA3, CallFormat
from bytefloor.text.chat import Message, ToolCall
from bytefloor.text.reasoning import ReasoningSplitter
from bytefloor.text.reply import ReplySplitter, collected
from bytefloor.text.tokenizer import Tokenizer
from bytefloor.text.tools import Tool, ToolChoice

REQUIRED = ToolChoice("required")
Q = '<|"|>'


class _Words:
    """A tokenizer as llguidance wants to see it."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = min(tokenizer.end_ids)
        self.special_token_ids = sorted(tokenizer.control_ids)
        self.tokens = [
            (b"\xff" if id in tokenizer.control_ids else b"") + tokenizer.token_bytes(id)
            for id in range(tokenizer.n_tokens)
        ]

    def __call__(self, text: bytes) -> list[int]:
        return self._tokenizer.encode(text.decode(), add_bos=False)


@cache
def words_of(tokenizer_id: int) -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(_Words(TOKENIZERS[tokenizer_id])))


TOKENIZERS = [QWEN3_CHAT._tokenizer, HERMES_CHAT._tokenizer, LLAMA3_CHAT._tokenizer, GEMMA4_TOKENIZER]
QWEN3, HERMES_ON_LLAMA, LLAMA, GEMMA = range(4)
FORMATS = (HERMES, HERMES, LLAMA3, GEMMA4)


def grammar_for(which: int, tools: list[Tool], choice: ToolChoice = REQUIRED, is_parallel: bool = True) -> str:
    made = call_grammar(FORMATS[which], tools, choice, TOKENIZERS[which].finder.cut, is_parallel=is_parallel)
    assert isinstance(made, GrammarSource)
    assert made.kind == "lark"
    return made.source


def matcher(which: int, source: str) -> LLMatcher:
    made = LLMatcher(words_of(which), LLMatcher.grammar_from_lark(source), log_level=0)
    assert not made.is_error(), made.get_error()
    return made


def is_answer(which: int, source: str, text: str) -> bool:
    """Whether the grammar takes the text, to its end, as a whole answer."""
    made = matcher(which, source)
    ids = TOKENIZERS[which].encode(text, parse_special=True, add_bos=False)
    return made.try_consume_tokens(ids) == len(ids) and made.is_accepting()


WEATHER = Tool(
    "weather",
    "",
    {
        "type": "object",
        "properties": {
            "days": {"type": "integer", "minimum": 1},
            "city": {"type": "string", "enum": ["Rome", "Ulm\n"]},
            "where": {"type": "array", "items": {"type": "number"}, "maxItems": 2},
        },
        "required": ["days"],
    },
)
NOW = Tool("now")


@pytest.mark.parametrize("which", [QWEN3, HERMES_ON_LLAMA])
def test_hermes(which: int) -> None:
    source = grammar_for(which, [WEATHER, NOW])
    now = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    weather = (
        '<tool_call>\n{"name": "weather", "arguments": {"days": 3, "city": "Rome", "where": [1, 2.5]}}\n</tool_call>'
    )
    assert is_answer(which, source, weather)
    assert is_answer(which, source, now + "\n" + weather + "\n" + now)
    for other in (
        "",
        "It is noon.",
        "Hm. " + now,
        now + " Done.",
        now.replace("now", "rm"),
        now.removesuffix("</tool_call>"),
        weather.replace("3", '"3"'),
        weather.replace("3", "0"),
        weather.replace("Rome", "Paris"),
        weather.replace("2.5", "2, 3"),
        weather.replace('"days": 3, ', ""),
    ):
        assert not is_answer(which, source, other), other
    one = grammar_for(which, [WEATHER, NOW], is_parallel=False)
    assert is_answer(which, one, now)
    assert not is_answer(which, one, now + "\n" + now)
    named = grammar_for(which, [WEATHER, NOW], ToolChoice("named", "now"))
    assert is_answer(which, named, now)
    assert not is_answer(which, named, weather)


def test_llama() -> None:
    source = grammar_for(LLAMA, [WEATHER, NOW])
    now = '{"name": "now", "parameters": {}}'
    assert is_answer(LLAMA, source, now)
    assert is_answer(LLAMA, source, '{"name": "weather", "parameters": {"days": 12}}')
    for other in ("", "noon", now + now, now.replace("now", "rm"), now.replace("{}", '{"a": 1}'), now[:-1]):
        assert not is_answer(LLAMA, source, other), other


def test_gemma() -> None:
    source = grammar_for(GEMMA, [WEATHER, NOW])
    now = "<|tool_call>call:now{}<tool_call|>"
    weather = f"<|tool_call>call:weather{{city:{Q}Ulm\n{Q},days:3,where:[1,2.5]}}<tool_call|>"
    assert is_answer(GEMMA, source, weather)
    assert is_answer(GEMMA, source, now + weather)
    assert is_answer(GEMMA, source, "<|tool_call>call:weather{days:1}<tool_call|>")
    assert is_answer(GEMMA, source, "<|tool_call>call:weather{days:1,where:[]}<tool_call|>")
    for other in (
        "",
        "noon",
        now + "x",
        now.replace("now", "rm"),
        now.replace("{}", "{a:1}"),
        weather.replace("days:3", "days:0"),
        weather.replace("days:3", f"days:{Q}3{Q}"),
        weather.replace("days:3,", ""),
        weather.replace("Ulm", "Bonn"),
        weather.replace("2.5", "2,3"),
        weather.replace("2.5]", "2.5],x:1"),
        f"<|tool_call>call:weather{{days:3,city:{Q}Rome{Q}}}<tool_call|>",  # not the template's order
        "<|tool_call>call:weather{days:1,}<tool_call|>",
    ):
        assert not is_answer(GEMMA, source, other), other


SCHEMAS = [
    ({"type": "string"}, [f"{Q}a b{Q}", f"{Q}{Q}"], ["a", "1", f"{Q}a"]),
    ({"type": "string", "minLength": 2, "maxLength": 3}, [f"{Q}ab{Q}", f"{Q}\néb{Q}"], [f"{Q}a{Q}", f"{Q}abcd{Q}"]),
    ({"type": ["integer", "null"]}, ["1", "null"], ["1.5", "true"]),
    ({"type": ["string", "integer"], "minimum": 5}, ["5", f"{Q}x{Q}"], ["4"]),
    ({"anyOf": [{"type": "boolean"}, {"const": "x"}]}, ["true", "false", f"{Q}x{Q}"], ["null", f"{Q}y{Q}"]),
    ({"enum": [1, "a", None, True]}, ["1", f"{Q}a{Q}", "null", "true"], ["2", "false"]),
    ({"type": "array", "items": {"$ref": "#/$defs/p"}, "minItems": 2}, ["[1,2]", "[1,2,3]"], ["[1]", "[]", "[1,2"]),
    ({"type": "array", "maxItems": 0}, ["[]"], ["[1]"]),
    ({"type": "object", "additionalProperties": {"type": "integer"}}, ["{}", "{a:1,b:2}"], ["{a:true}", "{a:1,}"]),
    ({"type": "object", "additionalProperties": False}, ["{}"], ["{a:1}"]),
    ({"$ref": "#/$defs/tree"}, ["{}", "{left:{left:{}},right:{}}"], ["{right:{},left:{}}", "{left:1}"]),
    ({"type": "object", "properties": {"b": {}, "A": {}, "c": {}}, "required": ["c"]},
     ["{c:1}", "{A:1,c:1}", "{A:1,b:1,c:1}", "{b:1,c:1}"], ["{}", "{b:1}", "{c:1,A:1}", "{A:1}"]),
    ({"description": "whatever"}, ["1", f"{Q}x{Q}", "{a:[true,{}]}", "[]"], ["x", "{", "[1,]"]),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "good", "bad"), SCHEMAS, ids=lambda value: str(value)[:60])
def test_schemas_in_gemmas_syntax(schema: dict, good: list[str], bad: list[str]) -> None:
    """V09."""
    tree = {"type": "object", "properties": {"left": {"$ref": "#/$defs/tree"}, "right": {"$ref": "#/$defs/tree"}}}
    defs = {"p": {"type": "integer"}, "tree": tree}
    source = grammar_for(GEMMA, [Tool("f", "", {"properties": {"v": schema}, "required": ["v"], "$defs": defs})])
    for value in good:
        assert is_answer(GEMMA, source, f"<|tool_call>call:f{{v:{value}}}<tool_call|>"), value
    for value in bad:
        assert not is_answer(GEMMA, source, f"<|tool_call>call:f{{v:{value}}}<tool_call|>"), value


def nested(depth: int) -> dict:
    """Lists in lists."""
    schema: dict = {"type": "null"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    ("schema", "where"),
    [
        ({"type": "string", "pattern": "a+"}, "#/properties/v/pattern cannot be enforced"),
        ({"type": "string", "format": "date"}, "#/properties/v/format cannot be enforced"),
        ({"type": "array", "items": {"type": "array", "uniqueItems": True}}, "#/properties/v/items/uniqueItems"),
        ({"not": {}}, "#/properties/v/type is None"),
        ({"oneOf": [{"type": "null"}]}, "#/properties/v/type is None"),
        ({"anyOf": [{"type": "null"}], "minimum": 3}, "#/properties/v/minimum beside 'anyOf'"),
        ({"anyOf": []}, "#/properties/v/anyOf is [], expected a list of schemas"),
        ({"$ref": "#/$defs/x"}, "#/properties/v/$ref is '#/$defs/x', which the schema does not have"),
        ({"$ref": "https://x"}, "#/properties/v/$ref is 'https://x', expected a reference within"),
        ({"type": "date"}, "#/properties/v/type is 'date', expected one of string"),
        ({"enum": [[1]]}, "#/properties/v/enum has [1], and only texts"),
        ({"enum": [Q]}, "#/properties/v/enum has a text with the quotation token"),
        ({"type": ["string", "date"]}, "#/properties/v/type cannot be enforced"),
        ({"type": "array", "maxItems": 99999}, "#/properties/v/maxItems is more than 1000"),
        ({"type": "object", "properties": {"a:b": {}}}, "#/properties/v/properties/a:b is no name"),
        ({"type": "array", "minItems": "2"}, "#/properties/v/minItems is '2', expected a whole number"),
        ({"type": "object", "required": 5}, "#/properties/v/required is 5, expected a list of names"),
        ({"type": "object", "properties": []}, "#/properties/v/properties is [], expected an object"),
        ({"type": {}}, "#/properties/v/type is {}, expected one of"),
        ({"$ref": {}}, "#/properties/v/$ref is {}, expected a reference"),
        (nested(300), "nested more than 100 deep"),
        (False, "#/properties/v is False, which cannot"),
    ],
)
def test_what_cannot_be_enforced_in_gemmas_syntax_is_refused_by_path_and_keyword(schema: object, where: str) -> None:
    """V09: it never fails open."""
    with pytest.raises(RequestError) as refusal:
        grammar_for(GEMMA, [Tool("f", "", {"properties": {"v": schema}, "required": ["v"]})])
    assert where in str(refusal.value)
    assert "the parameters of 'f'" in str(refusal.value)


@pytest.mark.parametrize("which", [QWEN3, LLAMA])
def test_options_for_the_compiler_do_not_come_in_with_a_schema(which: int) -> None:
    """V09: one of them is to ignore what it does not know."""
    with pytest.raises(RequestError, match="x-guidance"):
        grammar_for(which, [Tool("f", "", {"x-guidance": {"lenient": True}, "properties": {}})])


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 3), st.randoms(use_true_random=False))
def test_whatever_the_model_writes_under_the_grammar_is_read_as_calls(which: int, random: object) -> None:
    """C07: tokens drawn at random from what is allowed; what comes out is whole calls and nothing else."""
    tokenizer = TOKENIZERS[which]
    made = matcher(which, grammar_for(which, [WEATHER, NOW]))
    ids: list[int] = []
    while len(ids) < 400 and not made.is_stopped():
        mask = made.compute_bitmask()
        allowed = [id for id in range(tokenizer.n_tokens) if mask[id // 8] >> (id % 8) & 1]
        ends = [id for id in allowed if id in tokenizer.end_ids]
        # Tokens of white space and digits are always possible; without a preference no answer would ever end.
        ids.append(ends[0] if ends else random.choice(_preferred(tokenizer, allowed)))
        made.consume_token(ids[-1])
    if not made.is_stopped():
        return
    format = FORMATS[which]
    splitter = ReplySplitter(ReasoningSplitter(None), format, ("weather", "now"), "a")
    stream = tokenizer.stream([], keep_special=[tokenizer.vocabulary.control.get(tag, -1) for tag in format.tags])
    events = [event for id in ids for event in splitter.push(stream.push(id))]
    reply = collected([*events, *splitter.push(stream.finish()), *splitter.finish()])
    assert reply.calls
    assert (reply.content, reply.notes) == ("", [])


def _preferred(tokenizer: Tokenizer, allowed: list[int]) -> list[int]:
    closing = [id for id in allowed if tokenizer.token_bytes(id)[:1] in b'}"],' or id in tokenizer.control_ids]
    return closing or [id for id in allowed if tokenizer.token_bytes(id).strip()] or allowed


def test_a_prompt_has_the_grammar_that_the_choice_demands() -> None:
    ask = [Message("user", "weather?")]
    for choice in (None, ToolChoice("auto"), ToolChoice("none")):
        assert QWEN3_CHAT.prepare(ask, tools=TOOLS, tool_choice=choice).grammar is None
    source = QWEN3_CHAT.prepare(ask, tools=TOOLS, tool_choice=REQUIRED).grammar
    assert source is not None
    assert is_answer(QWEN3, source.source, '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>')
    one = QWEN3_CHAT.prepare(ask, tools=TOOLS, tool_choice=ToolChoice("named", "weather"), parallel_calls=False).grammar
    assert one is not None
    assert "now" not in one.source
    with pytest.raises(RequestError, match="the request has no tools"):
        QWEN3_CHAT.prepare(ask, tool_choice=REQUIRED)
    with pytest.raises(RequestError, match="names 'rm'"):
        QWEN3_CHAT.prepare(ask, tools=TOOLS, tool_choice=ToolChoice("named", "rm"))


def test_what_the_template_writes_for_a_call_is_what_the_grammar_allows(shared_dir: Path) -> None:
    """Letter by letter the family's own syntax."""
    ask = [Message("user", "weather?")]
    call = Message("assistant", "", tool_calls=(ToolCall("weather", {"city": "Bad \n X", "days": 3}),))
    for chat, which in ((QWEN3_CHAT, QWEN3), (LLAMA3_CHAT, LLAMA), (gemma4_chat(shared_dir), GEMMA)):
        thinking = chat.supports_thinking or None
        prompt = chat.prepare(ask, tools=TOOLS, thinking=thinking, tool_choice=REQUIRED)
        ids = chat.encode([*ask, call], tools=TOOLS, thinking=thinking, add_generation_prompt=False)[len(prompt.ids) :]
        end = next(at for at, id in enumerate(ids) if id in chat._tokenizer.end_ids)
        assert prompt.grammar is not None
        made = matcher(which, prompt.grammar.source)
        assert made.try_consume_tokens(ids[:end]) == end > 0
        assert made.is_accepting()


def test_every_format_has_a_grammar() -> None:
    formats: list[CallFormat] = [HERMES, LLAMA3, GEMMA4]
    for format in formats:
        assert call_grammar(format, [NOW], REQUIRED, lambda text: [text]) is not None
