"""C01 to C10, G14, T08: cases of conversations, over HTTP."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from bytefloor.engine.loading import EngineOptions, open_engine
from bytefloor.text.reply import ReplySplitter
from server.live import Live, Scripted, chatty, eventually, live, scripted
from text.small_chats import GEMMA_TEMPLATE, OPENING_TEMPLATE, QWEN3_TEMPLATE
from text.tool_chats import TOOLS
from tiny import build_tiny

Stage = tuple[Live, Scripted]
Serve = Callable[[str], Stage]
USER = {"role": "user", "content": "hello"}


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """A scripted server with a template."""
    contexts: list[Any] = []

    def start(template: str) -> Stage:
        directory = chatty(tmp_path, "qwen3", template)
        engine, executor = scripted(open_engine(directory, EngineOptions(context=64)), capacity=1024)
        contexts.append(live(engine))
        return contexts[-1].__enter__(), executor

    yield start
    for context in contexts:
        context.__exit__(None, None, None)


def streamed(running: Live, field: str = "content", **body: Any) -> str:
    asked = {"model": "tiny", "messages": [USER], "temperature": 0, **body}
    stream = running.openai.chat.completions.create(stream=True, **asked)  # type: ignore[call-overload]
    return "".join(getattr(chunk.choices[0].delta, field, None) or "" for chunk in stream)


# --- templates that refuse


def test_a_system_message_that_the_template_refuses_is_a_400_in_its_words(serve: Serve) -> None:
    """C01: and there is a way to say it all the same."""
    running, executor = serve(GEMMA_TEMPLATE)
    messages = [{"role": "system", "content": "Be brief."}, USER]
    for path in ("/v1/chat/completions", "/apply-template"):
        reply = running.post(path, messages=messages)
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == "messages"
        assert "System role not supported" in reply.json()["error"]["message"]
    shown = running.post("/apply-template", messages=messages, fold_system=True).json()
    assert "<start_of_turn>user\nBe brief.\n\nhello<end_of_turn>" in shown["prompt"]
    executor.say("ok", shown["n_tokens"])
    reply = running.post("/v1/chat/completions", messages=messages, fold_system=True)
    assert reply.json()["choices"][0]["message"]["content"] == "ok"


@pytest.mark.parametrize(
    "roles", [["user", "user"], ["assistant"], ["assistant", "user"], ["user", "assistant", "user", "user"]]
)
@pytest.mark.parametrize("is_streamed", [False, True])
def test_roles_that_must_alternate(serve: Serve, roles: list[str], is_streamed: bool) -> None:
    """C02: nothing half-rendered is ever computed, and the next request is served."""
    running, executor = serve(GEMMA_TEMPLATE)
    messages = [{"role": role, "content": "x"} for role in roles]
    reply = running.post("/v1/chat/completions", messages=messages, stream=is_streamed)
    assert reply.status_code == 400
    assert "roles must alternate" in reply.json()["error"]["message"]
    assert executor.batches == []
    assert running.chat(max_tokens=1).status_code == 200


def test_a_result_that_answers_no_call(serve: Serve) -> None:
    """C02: a tool's turn behind a user's."""
    running, executor = serve(QWEN3_TEMPLATE)
    reply = running.post("/v1/chat/completions", messages=[USER, {"role": "tool", "content": "noon"}], tools=TOOLS)
    assert reply.status_code == 400
    assert "messages[1]" in reply.json()["error"]["message"]
    assert executor.batches == []


def test_a_file_without_a_template_answers_with_advice(tmp_path: Path) -> None:
    """G14: the route for chats is a 400, plain text goes on."""
    engine, _ = scripted(open_engine(build_tiny("qwen3", tmp_path).directory, EngineOptions(context=64)))
    with live(engine) as running:
        for path in ("/v1/chat/completions", "/apply-template"):
            reply = running.post(path, messages=[USER])
            assert reply.status_code == 400
            assert reply.json()["error"]["code"] == "no_chat_template"
            assert "chat_template.jinja" in reply.json()["error"]["message"]
        assert running.http.get("/props").json()["chat_template"] is None
        assert running.post("/v1/completions", prompt="once", max_tokens=2).status_code == 200


# --- thoughts


@pytest.mark.parametrize("template", [OPENING_TEMPLATE, QWEN3_TEMPLATE], ids=["opened by the template", "by the model"])
def test_raw_thoughts_are_text_to_the_letter(serve: Serve, template: str) -> None:
    """C04: the stream is the whole text exactly, tags and white space and all."""
    running, executor = serve(template)
    script = "\n why \n</think>\n\n so " if template is OPENING_TEMPLATE else "<think>\n why \n</think>\n\n so "
    executor.say(script, running.n_prompt())
    message = running.chat(temperature=0, reasoning_format="none").json()["choices"][0]["message"]
    assert message["content"] == script
    assert "reasoning_content" not in message
    assert streamed(running, extra_body={"reasoning_format": "none"}) == script
    for format in ({}, {"reasoning_format": "auto"}):
        message = running.chat(temperature=0, **format).json()["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("why", "so ")


def test_old_thoughts_are_not_shown_again(serve: Serve) -> None:
    """C06: whichever way the client sends them, as its own field or inside the text."""
    running, _ = serve(QWEN3_TEMPLATE)
    long = "hm " * 200
    plain = {"role": "assistant", "content": "hi"}
    told = {**plain, "reasoning_content": long}
    within = {**plain, "content": f"<think>\n{long}\n</think>\n\nhi"}
    prompts = [
        running.post("/apply-template", messages=[USER, answer, USER]).json() for answer in (plain, told, within)
    ]
    assert prompts[1] == prompts[0] == prompts[2]
    assert "hm" not in prompts[0]["prompt"]


def test_a_conversation_that_is_too_long_says_by_how_much(serve: Serve) -> None:
    """C06"""
    running, executor = serve(QWEN3_TEMPLATE)
    messages = [USER, {"role": "assistant", "content": "word " * 400}, USER]
    n_prompt = running.post("/apply-template", messages=messages).json()["n_tokens"]
    assert n_prompt > 1024
    reply = running.post("/v1/chat/completions", messages=messages)
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert f"{n_prompt} tokens" in error["message"]
    assert "1024" in error["message"]
    assert executor.batches == []


# --- tools


def test_the_clients_helper_puts_two_streamed_calls_together(serve: Serve) -> None:
    """C07: an index for each, a name and an id once, arguments as JSON text, and the reason that clients wait for."""
    running, executor = serve(QWEN3_TEMPLATE)
    calls = [("weather", {"city": "Rome", "days": 2}), ("now", {})]
    script = "\n".join(
        f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'
        for name, arguments in calls
    )
    shown = running.post("/apply-template", messages=[USER], tools=TOOLS).json()
    executor.say(script, shown["n_tokens"])
    with running.openai.chat.completions.stream(
        model="tiny",
        messages=[USER],
        tools=TOOLS,
        temperature=0,  # type: ignore[arg-type, list-item]
    ) as stream:
        seen = list(stream)
        final = stream.get_final_completion()
    choice = final.choices[0]
    assert choice.finish_reason == "tool_calls"
    found = [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls or []]
    assert found == calls
    assert all(isinstance(call.function.arguments, str) for call in choice.message.tool_calls or [])
    ids = [call.id for call in choice.message.tool_calls or []]
    assert len(set(ids)) == 2
    pieces = [
        call
        for event in seen
        if event.type == "chunk"
        for part in event.chunk.choices
        for call in part.delta.tool_calls or []
    ]
    assert [call.index for call in pieces] == sorted(call.index for call in pieces)
    assert [call.id for call in pieces if call.id] == ids
    assert [call.function.name for call in pieces if call.function and call.function.name] == ["weather", "now"]


# --- faults of the server's own


@pytest.mark.parametrize("is_streamed", [True, False])
def test_a_parser_that_fails_ends_its_own_answer(
    serve: Serve, is_streamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C10: with an error that clients see; the place is free, and the next answer is whole."""
    running, executor = serve(QWEN3_TEMPLATE)
    executor.say("abc" * 40, running.n_prompt(), ends=False)
    healthy = ReplySplitter.push
    n_pushed = 0

    def push(self: ReplySplitter, text: str) -> Any:
        nonlocal n_pushed
        n_pushed += 1
        if n_pushed == 12:
            raise ZeroDivisionError("in the parser")
        return healthy(self, text)

    with monkeypatch.context() as broken:
        broken.setattr(ReplySplitter, "push", push)
        if is_streamed:
            with pytest.raises(openai.APIError, match="the server failed: ZeroDivisionError"):
                streamed(running)
            n_pushed = 0
            reply = running.chat(stream=True)
            assert "[DONE]" not in reply.text
            assert reply.text.count('"delta"') > 2
        else:
            reply = running.chat()
            assert reply.status_code == 500
            assert reply.json()["error"]["code"] == "internal_error"
    eventually(lambda: running.service.worker.n_open == 0, "the place is free")
    executor.say("fine", running.n_prompt())
    assert running.chat(temperature=0).json()["choices"][0]["message"]["content"] == "fine"


# --- text


@pytest.mark.parametrize("n_kept", [1, 2, 3])
def test_a_character_that_is_cut_is_one_replacement(serve: Serve, n_kept: int) -> None:
    """T08: four bytes, four tokens, the answer over before the last one."""
    running, executor = serve(QWEN3_TEMPLATE)
    executor.say("a\N{RAINBOW}b\N{RAINBOW}", running.n_prompt(), ends=False)
    asked = {"max_tokens": 6 + n_kept}
    whole = running.chat(temperature=0, **asked).json()["choices"][0]["message"]["content"]
    assert whole == "a\N{RAINBOW}b\N{REPLACEMENT CHARACTER}"
    assert streamed(running, **asked) == whole
    asked = {"max_tokens": 1 + n_kept}
    assert streamed(running, **asked) == "a\N{REPLACEMENT CHARACTER}"
