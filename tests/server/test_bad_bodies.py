"""Bodies that are wrong: 400 with the field's name, never 500, and never an answer to something else."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bytefloor.engine.loading import Opened
from server.live import Live, live, scripted

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
USER = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def patient(opened: Opened) -> Iterator[Live]:
    """Answers end with their first token."""
    engine, executor = scripted(opened, n_sequences=4)
    executor.say("", 0)
    executor._script, executor._start = [1] * 512, 0
    with live(engine) as running:
        yield running


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("temperature", -1, "temperature = -1.0: expected a number from 0 to 100"),
        ("temperature", "hot", "temperature: Expected `float | null`, got `str`"),
        ("top_p", 1.5, "top_p = 1.5: expected a number from 0 to 1"),
        ("top_k", -1, "top_k = -1: expected an integer from 0"),
        ("top_k", 1.5, "top_k: Expected `int | null`, got `float`"),
        ("top_k", True, "top_k: Expected `int | null`, got `bool`"),
        ("min_p", 2, "min_p = 2.0: expected a number from 0 to 1"),
        ("repetition_penalty", 0, "repetition_penalty = 0.0: expected a number from 0.01 to 100"),
        ("presence_penalty", 3, "presence_penalty = 3.0: expected a number from -2 to 2"),
        ("seed", -1, "seed = -1: expected an integer from 0"),
        ("seed", 2**64, "expected an integer from 0 to 18446744073709551615"),
        ("n", 0, "n = 0: expected an integer from 1 to 16"),
        ("n", 17, "n = 17: expected an integer from 1 to 16"),
        ("max_tokens", 0, "max_tokens = 0: expected an integer from 1"),
        ("max_completion_tokens", -5, "max_completion_tokens = -5: expected an integer from 1"),
        ("stop", "", "a stop string is empty"),
        ("stop", ["a", ""], "a stop string is empty"),
        ("stop", ["a"] * 17, "stop has 17 strings: expected at most 16"),
        ("stop", "x" * 1001, "stop has a string of 1001 characters"),
        ("top_logprobs", 2, "top_logprobs is given without logprobs"),
        ("stream_options", {"include_usage": True}, "stream_options is given without stream"),
        ("tools", [{"type": "function"}], "tools[0].function"),
        ("tool_choice", "required", "the request has no tools"),
        ("tools", {}, "tools: expected a list, found dict"),
        ("functions", [{}], "functions is not supported"),
        ("reasoning_effort", "much", "reasoning_effort = 'much': expected none, minimal, low"),
        ("reasoning_effort", "low", "no thinking to turn on"),
        ("reasoning_effort", "none", None),
        ("thinking_budget", -1, "thinking_budget = -1: expected an integer from 0"),
        ("thinking_budget", 8, "no thinking to turn on"),
        ("modalities", ["audio"], "modalities = ['audio']: expected ['text']"),
        ("frob", 1, "frob: no such field here"),
        ("repeat_penalty", 1.1, "repeat_penalty: no such field here; it is repetition_penalty"),
        ("n_predict", 9, "n_predict: no such field here; it is max_tokens"),
        ("mirostat_tau", 5, None),
    ],
)
def test_a_field_that_is_wrong_is_named(patient: Live, field: str, value: Any, message: str | None) -> None:
    reply = patient.post(CHAT, messages=[USER], **{field: value})
    if message is None:
        assert reply.status_code == 200
        return
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert message in error["message"]
    assert error["param"] == field
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({}, "messages", "the field is missing"),
        ({"messages": []}, "messages", "no messages to reply to"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages", "'king', expected one of system"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "null, expected a text"),
        ({"messages": [USER, {"role": "user", "content": 5}]}, "messages[1].content", "got `int`"),
        ({"messages": [{**USER, "x": 1}]}, "messages[0].x", "no such field"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0].type",
            "'image_url': expected 'text'",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text", "missing"),
        ({"messages": [{"role": "user", "content": ["a"]}]}, "messages[0].content[0]", "got `str`"),
        ({"messages": [USER], "logit_bias": {"x": 1}}, "logit_bias.x", "expected a token id from 0 to"),
        ({"messages": [USER], "logit_bias": {"99999": 1}}, "logit_bias.99999", "expected a token id from 0 to"),
        ({"messages": [USER], "logit_bias": {"5": 101}}, "logit_bias", "logit_bias[5] = 101.0"),
        ({"messages": [USER], "logit_bias": {str(i): -100 for i in range(271)}}, "logit_bias", "bans every token"),
        ({"messages": [USER], "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages", "itself"),
        ({"messages": [USER], "chat_template_kwargs": {"self": 1}}, "chat_template_kwargs.self", "itself"),
        (
            {"messages": [USER], "chat_template_kwargs": {"enable_thinking": 1}},
            "chat_template_kwargs.enable_thinking",
            "expected true or false",
        ),
        ({"messages": [USER], "max_tokens": 5, "max_completion_tokens": 6}, "max_tokens", "give one of them"),
        ({"messages": [USER], "mirostat_tau": 5, "typical_p": 0.5}, "typical_p", "mirostat_tau = 5.0 replaces"),
        ({"messages": [USER], "stream": True, "stream_options": {"x": 1}}, "stream_options.x", "no such field"),
    ],
)
def test_a_chat_that_is_wrong(patient: Live, body: dict[str, Any], param: str, message: str) -> None:
    reply = patient.post(CHAT, **body)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param
    assert message in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt[0]"),
        ({"prompt": [1, "a"]}, "prompt[0]"),
        ({"prompt": ["a", 1]}, "prompt[1]"),
        ({"prompt": [[1], [99999]]}, "prompt[1][0]"),
        ({"prompt": [-1]}, "prompt[0]"),
        ({"prompt": [True]}, "prompt[0]"),
        ({"prompt": ["a"] * 65}, "prompt"),
        ({"prompt": ["a"] * 5, "n": 16}, "prompt"),
        ({"prompt": "a", "echo": True}, "echo"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "best_of": 3}, "best_of"),
        ({"prompt": "a", "logprobs": 21}, "logprobs"),
        ({"prompt": "a", "logprobs": True}, "logprobs"),
    ],
)
def test_a_completion_that_is_wrong(patient: Live, body: dict[str, Any], param: str) -> None:
    reply = patient.post(TEXT, **body)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"x"',
        b"\xff\xfe",
        b'{"messages": [{"role": "user", "content": "\xff"}]}',
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"messages": [], "temperature": NaN}',
        b'{"messages": [], "temperature": 1e999}',
        b'{"messages": [], "seed": ' + b"9" * 5000 + b"}",
        b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"messages": [{"role":"user","content":"x"}], "chat_template_kwargs": {"a":'
        + b"[" * 700
        + b"]" * 700
        + b"}}",
        b'{"messages": [{"role":"user","content":"x"}], "chat_template_kwargs": {"a":'
        + b"[" * 990
        + b"]" * 990
        + b"}}",
    ],
)
@pytest.mark.parametrize("path", [CHAT, TEXT, "/tokenize", "/detokenize", "/apply-template"])
def test_what_is_no_body_at_all(patient: Live, data: bytes, path: str) -> None:
    reply = patient.http.post(path, content=data, headers={"content-type": "application/json"})
    assert reply.status_code == 400 or (b"chat_template_kwargs" in data and reply.status_code == 200)
    if reply.status_code == 400:
        assert set(reply.json()["error"]) == {"message", "type", "param", "code"}


def test_what_changes_nothing_is_accepted(patient: Live) -> None:
    harmless = {
        "user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "parallel_tool_calls": True,
        "tools": [], "tool_choice": "auto", "response_format": {"type": "text"}, "modalities": ["text"], "n": None,
        "temperature": None, "stop": None, "logit_bias": None, "stream": None, "top_logprobs": None,
        "cache_prompt": True,
    }  # fmt: skip
    answer = {
        "role": "assistant",
        "content": "a",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "tool_calls": None,
    }
    assert patient.post(CHAT, messages=[USER, answer, USER], **harmless).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/detokenize", {"tokens": [99999]}, "tokens[0]"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
        ("/tokenize", {"content": 5}, "content"),
        ("/tokenize", {"text": "a"}, "text"),
        ("/apply-template", {"messages": [USER], "tools": [{}]}, "tools"),
        ("/apply-template", {"messages": [USER], "temperature": 1}, "temperature"),
    ],
)
def test_the_small_paths(patient: Live, path: str, body: dict[str, Any], param: str) -> None:
    reply = patient.post(path, **body)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param


CALL = {"function": {"name": "f", "arguments": "{}"}, "id": "1"}
FULL: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": [{"type": "text", "text": "be"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "x", "tool_call_id": "1"},
        USER,
    ],
    "temperature": 1, "top_p": 1, "top_k": 3, "min_p": 0, "seed": 1, "n": 2, "stop": ["x"], "max_tokens": 3,
    "logit_bias": {"5": 1}, "logprobs": True, "top_logprobs": 2, "stream": False, "chat_template_kwargs": {"a": [1]},
    "presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1, "dry_multiplier": 0.5,
    "xtc_probability": 0.1,
}  # fmt: skip
JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*path, key)
        yield from places(item, (*path, key))


def spoiled(data: st.DataObject, whole: dict[str, Any], least: int = 1) -> bytes:
    """The body with one or two of its values, or with ``least`` 0 perhaps none, changed or gone."""
    body = copy.deepcopy(whole)
    for _ in range(data.draw(st.integers(least, 2))):
        path = data.draw(st.sampled_from(sorted(places(body), key=str)))
        owner = body
        for key in path[:-1]:
            owner = owner[key]
        if data.draw(st.booleans()):
            owner[path[-1]] = data.draw(JUNK)
        else:
            del owner[path[-1]]
        if not list(places(body)):
            break
    return json.dumps(body).encode("utf-8", errors="replace")


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_no_change_to_a_good_body_makes_a_500(patient: Live, data: st.DataObject) -> None:
    reply = patient.http.post(CHAT, content=spoiled(data, FULL), headers={"content-type": "application/json"})
    assert reply.status_code in (200, 400), reply.text
    if reply.status_code == 400:
        assert reply.json()["error"]["message"]
