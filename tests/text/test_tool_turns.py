"""Conversations with tools: what the templates get, what they give, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_chats import GEMMA3_CHAT, HELLO, OPENING_CHAT
from tool_chats import HERMES_CHAT, LLAMA3_CHAT, QWEN3_CHAT, TOOLS, gemma4_chat

from bytefloor.errors import RequestError
from bytefloor.text.chat import ChatTemplate, Message, ToolCall
from bytefloor.text.reply import Reply, collected
from bytefloor.text.tokenizer import Tokenizer
from bytefloor.text.tools import Tool, ToolChoice, read_choice, read_tools

ASK = Message("user", "weather?")
CALL = ToolCall("weather", '{"city": "Rome", "days": 2}', "c1")
CALL_2 = ToolCall("now", "{}", "c2")
BOTH = Message("assistant", "", tool_calls=(CALL, CALL_2))
RESULT = Message("tool", '{"sky": "blue", "degrees": 20.5}', tool_call_id="c1")
RESULT_2 = Message("tool", "noon", tool_call_id="c2")
ANSWER = Message("assistant", "It is fine.")


def read(chat: ChatTemplate, calls: list[ToolCall]) -> Reply:
    """The turn with these calls as the template writes it, told apart token by token as an engine does with a reply.

    Tokens, not text: arguments may spell control tokens, and are none.
    """
    prompt = chat.prepare([ASK], tools=TOOLS, thinking=chat.supports_thinking or None)
    turn = Message("assistant", "", tool_calls=calls)
    ids = chat.encode([ASK, turn], tools=TOOLS, thinking=chat.supports_thinking or None, add_generation_prompt=False)
    assert ids[: len(prompt.ids)] == prompt.ids
    tokenizer = chat._tokenizer
    stream, splitter = tokenizer.stream(prompt.ids, keep_special=prompt.keep_special), prompt.reply("a")
    events = []
    for id in ids[len(prompt.ids) :]:
        if id in tokenizer.end_ids:
            break
        events += splitter.push(stream.push(id))
    return collected([*events, *splitter.push(stream.finish()), *splitter.finish()])


# --- round trips: what the family's template writes for calls is read as the same calls ---

# Keys are names, as in any schema that a tool has. Gemma 4 has no escape for its quotation token.
NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12).filter(lambda text: '<|"|>' not in text)
NUMBERS = st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)
ARGUMENTS = st.dictionaries(NAMES, VALUES, max_size=4)


def check_round_trip(chat: ChatTemplate, arguments: list[dict[str, Any]]) -> None:
    reply = read(chat, [ToolCall("weather", one) for one in arguments])
    assert [json.loads(call.arguments) for call in reply.calls] == arguments
    assert {call.name for call in reply.calls} == {"weather"}
    assert (reply.content, reply.notes) == ("", [])


@settings(max_examples=60, deadline=None)
@given(st.lists(ARGUMENTS, min_size=1, max_size=3), st.sampled_from([QWEN3_CHAT, HERMES_CHAT]))
def test_calls_of_hermes_come_back(arguments: list[dict], chat: ChatTemplate) -> None:
    """C07: also where the tags are no tokens of their own."""
    check_round_trip(chat, arguments)


@settings(max_examples=60, deadline=None)
@given(ARGUMENTS)
def test_calls_of_llama_come_back(arguments: dict) -> None:
    check_round_trip(LLAMA3_CHAT, [arguments])


def test_calls_of_gemma_come_back(shared_dir: Path) -> None:
    """C07: through Gemma 4's own template."""
    chat = gemma4_chat(shared_dir)

    @settings(max_examples=60, deadline=None)
    @given(st.lists(ARGUMENTS, min_size=1, max_size=3))
    def check(arguments: list[dict]) -> None:
        check_round_trip(chat, arguments)

    check()


# --- what the templates get ---


def test_qwen_shows_calls_as_objects_and_results_as_they_are() -> None:
    text = QWEN3_CHAT.render([ASK, BOTH, RESULT, RESULT_2, ANSWER], tools=TOOLS, add_generation_prompt=False)
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>'
    assert call + '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call><|im_end|>' in text
    assert "tool\n" + RESULT.content + "<|im_end|>" in text
    assert '"name": "weather", "description": "Does weather."' in text


def test_gemma_gets_results_inside_the_turn_that_called_and_the_answer_behind_them(shared_dir: Path) -> None:
    chat = gemma4_chat(shared_dir)
    q = '<|"|>'
    turn = (
        f"<|turn>model\n<|tool_call>call:weather{{city:{q}Rome{q},days:2}}<tool_call|><|tool_call>call:now{{}}<tool_call|>"
        f"<|tool_response>response:weather{{degrees:20.5,sky:{q}blue{q}}}<tool_response|>"
        f"<|tool_response>response:now{{value:{q}noon{q}}}<tool_response|>"
    )
    # The reply goes on inside the turn.
    assert chat.render([ASK, BOTH, RESULT, RESULT_2], tools=TOOLS, thinking=True).endswith(turn)
    text = chat.render([ASK, BOTH, RESULT, RESULT_2, ANSWER, ASK], tools=TOOLS)
    assert turn + "It is fine.<turn|>\n<|turn>user\nweather?" in text
    assert "declaration:weather{description:" in text


def test_llama_gets_one_call_a_turn_each_before_its_result() -> None:
    text = LLAMA3_CHAT.render([ASK, BOTH, RESULT_2, RESULT, ANSWER], tools=TOOLS, add_generation_prompt=False)
    turns = [turn.split("<|end_header_id|>\n\n") for turn in text.split("<|start_header_id|>")[2:]]
    assert [role for role, _ in turns] == ["assistant", "ipython", "assistant", "ipython", "assistant"]
    assert turns[0][1] == '{"name": "weather", "parameters": {"city": "Rome", "days": 2}}<|eot_id|>'
    assert json.loads(turns[1][1].removesuffix("<|eot_id|>")) == RESULT.content
    assert turns[3][1] == '"noon"<|eot_id|>'


def test_results_without_ids_answer_calls_in_order() -> None:
    same = Message("assistant", "", tool_calls=(ToolCall("now", {"a": 1}), ToolCall("now", {"a": 2})))
    messages = [ASK, same, Message("tool", "one"), Message("tool", "two", name="now")]
    text = LLAMA3_CHAT.render(messages)
    assert text.index('{"a": 1}') < text.index('"one"') < text.index('{"a": 2}') < text.index('"two"')


def test_with_the_choice_none_the_model_is_not_shown_the_tools_and_its_reply_has_no_calls() -> None:
    prompt = QWEN3_CHAT.prepare([ASK, BOTH, RESULT, RESULT_2], tools=TOOLS, tool_choice=ToolChoice("none"))
    assert "Does weather." not in prompt.text
    assert "<tool_call>" in prompt.text
    splitter = prompt.reply("a")
    text = '<tool_call>{"name": "now"}</tool_call>'
    assert collected([*splitter.push(text), *splitter.finish()]) == Reply(text)


def test_the_tags_of_calls_are_kept_where_they_are_tokens() -> None:
    texts = {QWEN3_CHAT._tokenizer.token_text(id) for id in QWEN3_CHAT.prepare([ASK], tools=TOOLS).keep_special}
    assert texts == {"<think>", "</think>", "<tool_call>", "</tool_call>"}
    assert not HERMES_CHAT.prepare([ASK], tools=TOOLS).keep_special
    texts = {LLAMA3_CHAT._tokenizer.token_text(id) for id in LLAMA3_CHAT.prepare([ASK], tools=TOOLS).keep_special}
    assert texts == {"<|python_tag|>"}
    assert not LLAMA3_CHAT.prepare([ASK]).keep_special


def test_raw_thoughts_stay_in_the_text_with_their_tags() -> None:
    """C04."""
    splitter = QWEN3_CHAT.prepare(HELLO).raw().reply("a")
    text = "<think>\nhm\n</think>\n\nhello"
    assert collected([*splitter.push(text), *splitter.finish()]) == Reply(text)


# --- what is refused ---


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([ASK, RESULT], r"messages\[1\]\.tool_call_id is 'c1', but no call waits.*result: none"),
        ([ASK, Message("tool", "x")], r"messages\[1\]\.role is 'tool', but no call waits"),
        ([ASK, BOTH, RESULT, RESULT], r"messages\[3\]\.tool_call_id is 'c1'.*a result: c2"),
        ([ASK, BOTH, RESULT, ASK, RESULT_2], r"messages\[4\]\.tool_call_id is 'c2'.*a result: none"),
        ([ASK, BOTH, Message("tool", "x", name="now", tool_call_id="c1")], r"name is 'now', but.*of 'weather'"),
        ([ASK, Message("assistant", "", tool_calls=(ToolCall("rm", "{}"),))], r"name is 'rm'.*tools: now, weather"),
        ([ASK, Message("assistant", "", tool_calls=(ToolCall("now", "{a"),))], r"tool_calls\[0\]\.function\.arguments"),
        ([ASK, Message("assistant", "", tool_calls=(ToolCall("now", "[1]"),))], r"'\[1\]', expected a JSON object"),
        ([ASK, Message("assistant", "", tool_calls=(ToolCall("now", '{"a": NaN}'),))], "NaN is no JSON number"),
        ([ASK, Message("assistant", "", tool_calls=(ToolCall("now", "[" * 99999),))], "is not JSON"),
        ([ASK, Message("assistant", "", tool_calls=(CALL, CALL))], r"messages\[1\]\.tool_calls: two calls.*same id"),
        ([Message("user", "x", tool_calls=(CALL,))], "the role 'user' has calls"),
    ],
)
def test_calls_and_results_that_do_not_fit_are_refused(messages: list[Message], reason: str) -> None:
    """C02: never a half-rendered prompt."""
    with pytest.raises(RequestError, match=reason):
        QWEN3_CHAT.render(messages, tools=TOOLS)


def test_old_calls_stand_where_the_request_brings_no_tools() -> None:
    old = Message("assistant", "", tool_calls=(ToolCall("gone", ""),))
    assert '"gone", "arguments": {}' in QWEN3_CHAT.render([ASK, old, Message("tool", "x")])


def test_templates_that_cannot_show_tools_or_calls_refuse_them(smollm2_path: Path) -> None:
    """SmolLM2 among them: its template has no word about tools."""
    from bytefloor.files.checkpoint import open_checkpoint

    smollm2 = ChatTemplate.for_tokenizer(Tokenizer.from_gguf(open_checkpoint(smollm2_path).metadata), "llama")
    for chat, family in ((smollm2, "llama"), (GEMMA3_CHAT, "gemma3"), (OPENING_CHAT, "qwen3")):
        with pytest.raises(RequestError, match=f"tools were given, but the chat template of this {family} model"):
            chat.render(HELLO, tools=TOOLS)
        with pytest.raises(RequestError, match=f"template of this {family} model does not show them"):
            chat.render([ASK, BOTH])


@pytest.mark.parametrize(
    ("tools", "reason"),
    [
        ([{}], r"tools\[0\]\.function is None, expected an object"),
        (["f"], r"tools\[0\]\.function is None"),
        ([{"type": "web", "function": {"name": "f"}}], r"tools\[0\]\.type is 'web', expected 'function'"),
        ([{"function": {}}], r"tools\[0\]\.function\.name is None, expected a name"),
        ([{"function": {"name": "a b"}}], r"name is 'a b', expected 1 to 128 letters"),
        ([TOOLS[0], TOOLS[0]], r"tools\[1\]\.function\.name is 'weather', which an earlier tool has"),
        ([{"function": {"name": "f", "description": 3}}], r"description is 3, expected a text"),
        ([{"function": {"name": "f", "parameters": []}}], r"parameters is \[\], expected a JSON schema"),
        ([{"function": {"name": "f", "parameters": {"type": "string"}}}], r"parameters\.type is 'string'"),
    ],
)
def test_tools_that_are_none_are_refused_by_the_field(tools: list, reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        read_tools(tools)


def test_choices() -> None:
    known = (Tool("f"), Tool("g"))
    assert read_choice(None, known) == ToolChoice("auto")
    assert read_choice(None, ()) == ToolChoice("none")
    assert read_choice("required", known) == ToolChoice("required")
    for value in ({"type": "function", "function": {"name": "g"}}, {"type": "function", "name": "g"}):
        assert read_choice(value, known) == ToolChoice("named", "g")
    for value, reason in (
        ("any", "expected 'auto', 'none', 'required'"),
        (3, "tool_choice is 3"),
        ({"type": "function"}, "an object of type 'function' with a name"),
        ({"type": "function", "name": "h"}, "names 'h', which is not among the tools: f, g"),
    ):
        with pytest.raises(RequestError, match=reason):
            read_choice(value, known)
    with pytest.raises(RequestError, match="the request has no tools"):
        read_choice("required", ())
