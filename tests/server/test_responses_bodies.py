"""Bodies of the Responses API: items as the messages of a chat, and what is refused by name."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bytefloor.server.bodies import convert
from bytefloor.server.responses_bodies import ResponseBody
from bytefloor.server.responses_chat import ask_response
from server.responses import FLAT, PATH, Stage, chat_prompt_of, prompt_of
from server.test_bad_bodies import spoiled
from text.tool_chats import TOOLS

CALL = {"id": "c1", "function": {"name": "now", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("given", "messages"),
    [
        ({"input": "hi"}, [{"role": "user", "content": "hi"}]),
        (
            {"instructions": "be", "input": [{"type": "message", "role": "user", "content": "hi"}]},
            [{"role": "system", "content": "be"}, {"role": "user", "content": "hi"}],
        ),
        (
            {
                "input": [
                    {"role": "system", "content": [{"type": "input_text", "text": "be"}]},
                    {"role": "user", "content": [{"type": "input_text", "text": t} for t in ("one", "two")]},
                    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
                    {
                        "type": "message",
                        "role": "assistant",
                        "id": "msg_1",
                        "status": "completed",
                        "content": [{"type": "output_text", "text": "a", "annotations": [], "logprobs": []}],
                    },
                    {"type": "function_call", "call_id": "c1", "name": "now", "arguments": "{}", "id": "fc_1"},
                    {"type": "function_call_output", "call_id": "c1", "output": "noon"},
                    {"role": "assistant", "content": "noon, then"},
                    {"role": "user", "content": "ok"},
                ]
            },
            [
                {"role": "system", "content": "be"},
                {"role": "user", "content": "one\ntwo"},
                {"role": "assistant", "content": "a", "reasoning_content": "hm", "tool_calls": [CALL]},
                {"role": "tool", "content": "noon", "tool_call_id": "c1"},
                {"role": "assistant", "content": "noon, then"},
                {"role": "user", "content": "ok"},
            ],
        ),
        (
            {
                "input": [
                    {"role": "user", "content": "hi"},
                    {"type": "function_call", "call_id": "c1", "name": "now", "arguments": "{}"},
                    {"type": "function_call", "call_id": "c2", "name": "now", "arguments": "{}"},
                    {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "x"}]},
                    {"type": "function_call_output", "call_id": "c2", "output": "y"},
                ]
            },
            [
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": None, "tool_calls": [CALL, {**CALL, "id": "c2"}]},
                {"role": "tool", "content": "x", "tool_call_id": "c1"},
                {"role": "tool", "content": "y", "tool_call_id": "c2"},
            ],
        ),
    ],
    ids=["text", "instructions", "a talk", "calls"],
)
def test_items_are_the_messages_of_a_chat(caller: Stage, given: dict[str, Any], messages: list[Any]) -> None:
    running, _ = caller
    assert prompt_of(running, tools=FLAT, **given) == chat_prompt_of(running, messages, tools=TOOLS)
    assert prompt_of(running, tools=FLAT, **given) != prompt_of(running, **given)


def test_the_rest_of_the_body_reaches_the_engine(caller: Stage) -> None:
    running, _ = caller
    body = {
        "input": "x", "max_output_tokens": 7, "temperature": 0.3, "top_p": 0.4, "top_k": 5, "seed": 9,
        "reasoning": {"effort": "low"}, "store": False, "truncation": "disabled", "include": [], "background": False,
        "service_tier": "auto", "prompt_cache_key": "k", "safety_identifier": "s", "stream": True,
        "stream_options": {"include_obfuscation": False}, "top_logprobs": 0,
    }  # fmt: skip
    asked, repeated = ask_response(convert(body, ResponseBody, ""), running.service.served)
    request = asked.choices[0].request
    assert request.max_tokens == 7
    assert (request.sampling.temperature, request.sampling.top_p, request.sampling.seed) == (0.3, 0.4, 9)
    assert request.sampling.top_k == 5
    assert request.thinking is not None
    assert request.thinking.n_most == 1024
    assert asked.is_streamed
    assert repeated["reasoning"] == {"effort": "low", "summary": None}
    off, _ = ask_response(
        convert({"input": "x", "reasoning": {"effort": "none"}}, ResponseBody, ""), running.service.served
    )
    assert off.choices[0].request.prompt_ids != request.prompt_ids


USER = {"role": "user", "content": "hi"}
SCHEMA = {"type": "json_schema", "name": "x", "schema": {"type": "object", "propertyNames": {"pattern": "a"}}}
TWICE = [FLAT[0], FLAT[0]]


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "input", "missing"),
        ({"input": 5}, "input", "input:"),
        ({"input": ["hi"]}, "input[0]", "found str"),
        ({"input": []}, "input", "no messages"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role", "robot"),
        ({"input": [USER, {"type": "web_search_call"}]}, "input[1].type", "expected message, function_call"),
        ({"input": [{"content": "x"}]}, "input[0].type", "None"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type", "nothing is stored"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].type",
            "only text",
        ),
        ({"input": [{**USER, "name": "x"}]}, "input[0].name", "no such field"),
        ({"input": [{"type": "function_call", "name": "x", "arguments": "{}"}]}, "input[0].call_id", "missing"),
        ({"input": [USER, {"type": "reasoning", "encrypted_content": "x"}]}, "input[1].encrypted_content", ""),
        (
            {"input": [USER, {"type": "reasoning", "summary": [{"type": "summary_text", "text": "x"}]}]},
            "input[1].summary",
            "not what the model thought",
        ),
        ({"input": "x", "max_output_tokens": 0}, "max_output_tokens", "max_output_tokens"),
        ({"input": "x", "temperature": 3000}, "temperature", "temperature"),
        ({"input": "x", "store": True}, "store", "nothing is stored"),
        ({"input": "x", "previous_response_id": "resp_1"}, "previous_response_id", "nothing is stored"),
        ({"input": "x", "conversation": "conv_1"}, "conversation", "nothing is stored"),
        ({"input": "x", "background": True}, "background", "in the reply"),
        ({"input": "x", "truncation": "auto"}, "truncation", "nothing is ever cut"),
        ({"input": "x", "include": ["reasoning.encrypted_content"]}, "include", "encrypted_content"),
        ({"input": "x", "top_logprobs": 2}, "top_logprobs", "expected 0"),
        ({"input": "x", "prompt": {"id": "p"}}, "prompt", "not supported"),
        ({"input": "x", "max_tool_calls": 2}, "max_tool_calls", "not supported"),
        ({"input": "x", "text": {"verbosity": "low"}}, "text.verbosity", "'medium'"),
        ({"input": "x", "text": {"format": {"type": "yaml"}}}, "text.format.type", "text.format.type = 'yaml'"),
        ({"input": "x", "text": {"format": {"type": "json_schema"}}}, "text.format", "text.format: expected"),
        ({"input": "x", "text": {"format": SCHEMA}}, "text.format.schema", "text.format.schema"),
        (
            {"input": "x", "text": {"format": {"type": "json_object"}}, "tools": FLAT},
            "text.format",
            "text.format and tools",
        ),
        ({"input": "x", "reasoning": {"effort": "huge"}}, "reasoning.effort", "reasoning.effort = 'huge'"),
        ({"input": "x", "reasoning": {"summary": "auto"}}, "reasoning.summary", "no summaries"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "tools[0].type", "'web_search'"),
        ({"input": "x", "tools": [{"type": "function"}]}, "tools[0].name", "missing"),
        ({"input": "x", "tools": [{"type": "function", "name": "a b"}]}, "tools", "tools[0].name is 'a b'"),
        ({"input": "x", "tools": TWICE}, "tools", "tools[1].name is 'weather'"),
        ({"input": "x", "tools": TOOLS}, "tools[0].function", "no such field"),
        ({"input": "x", "tools": FLAT, "tool_choice": {"type": "function", "name": "z"}}, "tool_choice", "'z'"),
        ({"input": "x", "tool_choice": {"type": "web_search"}}, "tool_choice", "web_search"),
        ({"input": "x", "stream_options": {"include_obfuscation": True}}, "stream_options", "without stream"),
        ({"input": "x", "stream": True, "stream_options": {"include_usage": True}}, "stream_options.include_usage", ""),
        ({"input": "x", "metadata": {"a": 1}}, "metadata[...]", ""),
        ({"input": "x", "messages": []}, "messages", "no such field"),
        ({"input": "x" * 3000}, "input", "context holds 2048"),
        ({"input": [USER, {"type": "function_call_output", "call_id": "z", "output": "x"}]}, "input", "z"),
    ],
)
def test_what_cannot_be_is_refused_by_name(caller: Stage, body: dict[str, Any], param: str, words: str) -> None:
    reply = caller[0].post(PATH, **body)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["param"] == param, error
    assert words in error["message"]


def test_what_was_never_stored_is_not_found(caller: Stage) -> None:
    client = caller[0].openai
    for ask_for in (
        lambda: client.responses.retrieve("resp_1"),
        lambda: client.responses.delete("resp_1"),
        lambda: client.responses.cancel("resp_1"),
        lambda: list(client.responses.input_items.list("resp_1")),
    ):
        with pytest.raises(openai.NotFoundError, match="not stored"):
            ask_for()


FULL: dict[str, Any] = {
    "input": [
        {"role": "system", "content": [{"type": "input_text", "text": "be"}]},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "a", "annotations": []}], "id": "m"},
        {"type": "function_call", "call_id": "1", "name": "now", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "x"}]},
        USER,
    ],
    "instructions": "be", "tools": FLAT, "tool_choice": "auto", "text": {"format": {"type": "text"}},
    "reasoning": {"effort": "low"}, "metadata": {"a": "b"}, "temperature": 0, "max_output_tokens": 2, "stream": False,
    "include": [], "store": False, "parallel_tool_calls": True, "chat_template_kwargs": {"a": 1},
}  # fmt: skip


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_no_change_to_a_good_body_makes_a_500(caller: Stage, data: st.DataObject) -> None:
    sent = spoiled(data, FULL, least=0)
    reply = caller[0].http.post(PATH, content=sent, headers={"content-type": "application/json"})
    assert reply.status_code in (200, 400), reply.text
    assert reply.status_code == 200 or json.loads(sent) != FULL
