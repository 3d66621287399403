"""What the Messages API refuses: by the field's own name, in Anthropic's shape, whoever refuses it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import anthropic
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bytefloor.engine.loading import EngineOptions, open_engine
from server.live import SHORT, Live, Scripted, chatty, eventually, live, scripted
from server.test_bad_bodies import spoiled
from text.small_chats import QWEN3_TEMPLATE

KEY = "s3cret"
USER = {"role": "user", "content": "hi"}
TOOL = {"name": "now", "input_schema": {"type": "object"}}
CALL = {"type": "tool_use", "id": "c1", "name": "now", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "c1"}
MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chatty(tmp_path_factory.mktemp("refused"), "qwen3", QWEN3_TEMPLATE)


@pytest.fixture(scope="module")
def strict(directory: Path) -> Iterator[Live]:
    options = replace(SHORT, api_key=KEY, max_body_bytes=20_000, max_open=1, timeout_s=2)
    engine, executor = scripted(open_engine(directory, EngineOptions(context=64)), capacity=128)
    with live(engine, options) as running:
        running.executor = executor  # type: ignore[attr-defined]
        yield running
        executor.gate.set()


@pytest.fixture(scope="module")
def plain(directory: Path) -> Iterator[Live]:
    """Answers end with their first token."""
    engine, executor = scripted(open_engine(directory, EngineOptions(context=64)), capacity=512)
    executor._script = [1] * 512
    with live(engine) as running:
        yield running


def refused(running: Live, path: str = MESSAGES, *, status: int = 400, **body: Any) -> str:
    """The message; the shape is checked."""
    asked = {"max_tokens": 5, **body} if path == MESSAGES else body
    reply = running.http.post(path, json=asked, headers={"x-api-key": KEY})
    assert reply.status_code == status, reply.text
    return told(reply)["message"]


def told(reply: Any) -> dict[str, str]:
    found = reply.json()
    assert set(found) == {"type", "error", "request_id"}
    assert found["type"] == "error"
    assert set(found["error"]) == {"type", "message"}
    assert found["request_id"] == reply.headers["request-id"] == reply.headers["x-request-id"]
    return found["error"]


def turns(*blocks: Any, role: str = "user") -> dict[str, Any]:
    """Messages whose second holds the blocks."""
    return {"messages": [USER, {"role": role, "content": list(blocks)}, *([USER] if role != "user" else [])]}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"max_tokens": None}, "max_tokens: Expected `int`"),
        ({"max_tokens": 0}, "max_tokens = 0: expected an integer from 1"),
        ({"messages": []}, "there are no messages"),
        ({"frob": 1}, "frob: no such field here"),
        ({"n_predict": 1}, "n_predict: no such field here; it is max_tokens"),
        ({"container": "x"}, "container: no such field here"),
        ({"temperature": -1}, "temperature = -1.0: expected a number from 0"),
        ({"top_k": -1}, "top_k = -1: expected an integer"),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences has 17 strings: expected at most 16"),
        ({"stop_sequences": [""]}, "a stop string is empty"),
        ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking.budget_tokens = -1: expected an integer"),
        ({"thinking": {"type": "disabled", "budget_tokens": 9}}, "thinking.budget_tokens: expected only where"),
        ({"thinking": {"type": "on"}}, "thinking.type: Invalid enum value 'on'"),
        ({"thinking": {"type": "adaptive", "display": "omitted"}}, "thinking.display: Invalid enum value 'omitted'"),
        ({"system": [{"type": "image"}]}, "system[0].type = 'image': expected 'text' here"),
        (
            {"system": [{"type": "text", "text": "x", "cache_control": {"type": "long"}}]},
            "system[0].cache_control.type",
        ),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role = 'tool': expected 'user'"),
        (turns({"type": "image", "source": {}}), "messages[1].content[0].type = 'image': expected 'text' or 'tool_r"),
        (turns({"type": "document"}), "messages[1].content[0].type = 'document'"),
        (turns({"text": "x"}), "messages[1].content[0].type = None"),
        (turns("x"), "messages[1].content[0]: expected a block, found str"),
        (turns({"type": "text", "text": "x", "y": 1}), "messages[1].content[0].y: no such field here"),
        (turns({"type": "redacted_thinking", "data": "x"}, role="assistant"), "content[0].type = 'redacted_thinking'"),
        (turns({"type": "tool_use", "id": "c"}, role="assistant"), "messages[1].content[0].name: the field is missing"),
        (
            {"messages": [USER, {"role": "assistant", "content": "We"}]},
            "messages[1].role = 'assistant': expected 'user'",
        ),
        (turns({"type": "text", "text": "x"}, RESULT), "messages[1].content[1]: a tool_result comes after text"),
        (turns(RESULT), "messages[1].content[0].tool_use_id is 'c1', but no call waits"),
        (turns(CALL, CALL, role="assistant"), "messages[1].content: two calls have the same id"),
        (
            {**turns({"type": "text", "text": "x"}, {**CALL, "name": "no"}, role="assistant"), "tools": [TOOL]},
            "messages[1].content[1].name is 'no', which is not among the tools: now",
        ),
        (
            turns({**RESULT, "content": [{"type": "image", "source": {}}]}),
            "messages[1].content[0].content[0].type = 'image'",
        ),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "tools[0].type = 'web_search_20250305': expected"),
        ({"tools": [{"name": "x"}]}, "tools[0].input_schema: the field is missing"),
        ({"tools": [{**TOOL, "input_schema": 5}]}, "tools[0].input_schema: expected a JSON schema, found int"),
        ({"tools": [{**TOOL, "name": "a b"}]}, "tools[0].name is 'a b', expected 1 to 128"),
        ({"tools": [{**TOOL, "input_schema": {"type": "array"}}]}, "tools[0].input_schema.type is 'array'"),
        ({"tools": [TOOL, TOOL]}, "tools[1].name is 'now', which an earlier tool has"),
        ({"tools": [{**TOOL, "strict": True}]}, "tools[0].strict = true"),
        ({"tools": [{**TOOL, "defer_loading": True}]}, "tools[0].defer_loading: no such field"),
        ({"tool_choice": {"type": "any"}}, "tool_choice.type = 'any': the request has no tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name = None: expected a tool's name"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice names 'x'"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "auto", "name": "now"}},
            "tool_choice.name = 'now': expected a name",
        ),
        ({"output_config": {"effort": "low"}}, "output_config.effort: no such field here"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object", "if": {}}}}},
            "output_config.format.schema",
        ),
        ({"messages": [{"role": "user", "content": "long " * 200}]}, "the context holds 128"),
    ],
)
def test_a_body_that_is_wrong(strict: Live, body: dict[str, Any], message: str) -> None:
    assert message in refused(strict, **{"messages": [USER], **body})


def test_max_tokens_must_be_there_but_for_counting(strict: Live) -> None:
    reply = strict.http.post(MESSAGES, json={"messages": [USER]}, headers={"x-api-key": KEY})
    assert told(reply) == {"type": "invalid_request_error", "message": "max_tokens: the field is missing"}
    assert "max_tokens: no such field" in refused(strict, COUNT, messages=[USER], max_tokens=1)


def test_errors_have_the_types_that_the_client_knows(strict: Live) -> None:
    def asked(**options: Any) -> anthropic.Anthropic:
        options = {"api_key": KEY, **options}
        return anthropic.Anthropic(base_url=strict.url, max_retries=0, timeout=30, **options)

    body: dict[str, Any] = {"model": "tiny", "max_tokens": 5, "messages": [USER]}
    with pytest.raises(anthropic.AuthenticationError) as key:
        asked(api_key="no").messages.create(**body)
    with pytest.raises(anthropic.NotFoundError) as model:
        asked().messages.create(**{**body, "model": "claude"})
    with pytest.raises(anthropic.NotFoundError):
        asked().messages.count_tokens(model="claude", messages=[USER])
    with pytest.raises(anthropic.APIStatusError) as size:
        asked().messages.create(**{**body, "messages": [{"role": "user", "content": "x" * 30_000}]})
    found = [(each.value.status_code, each.value.body["error"]["type"]) for each in (key, model, size)]  # type: ignore[index]
    assert found == [(401, "authentication_error"), (404, "not_found_error"), (413, "request_too_large")]
    assert "model 'claude' is not here" in str(model.value)
    assert model.value.request_id == model.value.body["request_id"]  # type: ignore[index]


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"\xff", b'{"messages": ' + b"[" * 100_000, b'{"max_tokens": ' + b"9" * 5000 + b"}"]
)
@pytest.mark.parametrize("path", [MESSAGES, COUNT])
def test_what_is_no_body_at_all(plain: Live, path: str, data: bytes) -> None:
    reply = plain.http.post(path, content=data, headers={"content-type": "application/json"})
    assert (reply.status_code, told(reply)["type"]) == (400, "invalid_request_error")


FULL: dict[str, Any] = {
    "model": "tiny", "max_tokens": 3, "temperature": 1, "top_p": 1, "top_k": 3, "stop_sequences": ["x"],
    "stream": False,
    "system": [{"type": "text", "text": "be", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        USER,
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "x", "signature": "y"}, CALL]},
        {"role": "user", "content": [{**RESULT, "content": [{"type": "text", "text": "z"}], "is_error": True}]},
        USER,
    ],
    "tools": [{**TOOL, "description": "x", "strict": False}],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "thinking": {"type": "adaptive"},
    "metadata": {"user_id": "u"},
}  # fmt: skip


@pytest.mark.parametrize("path", [MESSAGES, COUNT])
def test_no_change_to_a_good_body_makes_a_500(plain: Live, path: str) -> None:
    whole = FULL if path == MESSAGES else {key: FULL[key] for key in ("messages", "tools", "tool_choice", "thinking")}

    @settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
    @given(data=st.data())
    def ask(data: st.DataObject) -> None:
        reply = plain.http.post(path, content=spoiled(data, whole), headers={"content-type": "application/json"})
        assert reply.status_code in (200, 400, 404), reply.text
        assert reply.status_code == 200 or told(reply)["message"]

    assert plain.post(path, **whole).status_code == 200
    ask()


@pytest.mark.parametrize(
    ("method", "path", "kind", "status"),
    [("GET", MESSAGES, "invalid_request_error", 405), ("GET", f"{MESSAGES}/batches", "not_found_error", 404)],
)
def test_wrong_paths(strict: Live, method: str, path: str, kind: str, status: int) -> None:
    reply = strict.http.request(method, path, headers={"x-api-key": KEY})
    assert (reply.status_code, told(reply)["type"]) == (status, kind)


def test_more_than_may_be_open_and_a_time_that_is_over(strict: Live) -> None:
    executor: Scripted = strict.executor  # type: ignore[attr-defined]
    executor.gate.clear()
    body = {"max_tokens": 5, "messages": [USER]}
    with strict.http.stream("POST", MESSAGES, json={**body, "stream": True}, headers={"x-api-key": KEY}) as stream:
        lines = stream.iter_lines()
        next(lines)
        full = strict.http.post(MESSAGES, json=body, headers={"x-api-key": KEY})
        assert (full.status_code, told(full)["type"]) == (429, "rate_limit_error")
        rest = list(lines)
    executor.gate.set()
    at = rest.index("event: error")
    error = json.loads(rest[at + 1].removeprefix("data: "))
    assert error["error"]["type"] == "timeout_error"
    assert error["request_id"] == stream.headers["request-id"]
    assert "event: message_stop" not in rest
    eventually(lambda: strict.service.worker.n_open == 0, "the place is free again")


def test_the_engine_fails_and_the_server_drains(directory: Path) -> None:
    engine, executor = scripted(open_engine(directory, EngineOptions(context=64)))
    body = {"max_tokens": 5, "messages": [USER]}
    with live(engine) as running:
        executor.failure = ValueError("oops")
        failed = running.http.post(MESSAGES, json=body)
        assert (failed.status_code, told(failed)["type"]) == (500, "api_error")
        executor.failure = ValueError("oops")
        with (
            pytest.raises(anthropic.APIStatusError, match="api_error"),
            anthropic.Anthropic(base_url=running.url, api_key="x", max_retries=0).messages.stream(
                model="tiny", **body
            ) as stream,
        ):
            stream.get_final_message()
        running.call(running.service.drain())
        closed = running.http.post(MESSAGES, json=body)
        assert (closed.status_code, told(closed)["type"]) == (529, "overloaded_error")
        assert closed.headers["retry-after"] == "1"
        assert running.chat().status_code == 503
