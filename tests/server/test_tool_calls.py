"""Tool calls over the API: the real client, an executor that says what the test wants, and a grammar that demands."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from bytefloor.engine.loading import EngineOptions, open_engine
from server.live import Live, Scripted, chatty, live, scripted
from text.small_chats import QWEN3_TEMPLATE
from text.tool_chats import TOOLS

Stage = tuple[Live, Scripted]
WEATHER = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
USER = {"role": "user", "content": "and?"}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chatty(tmp_path_factory.mktemp("tools"), "qwen3", QWEN3_TEMPLATE)


@pytest.fixture
def caller(directory: Path) -> Iterator[Stage]:
    engine, executor = scripted(open_engine(directory, EngineOptions(context=64)), capacity=2048)
    with live(engine) as running:
        yield running, executor


def ask(stage: Stage, script: str, **body: Any) -> Any:
    """The choice of a whole answer, which the stream's deltas must join to."""
    running, executor = stage
    asked: dict[str, Any] = {"messages": [USER], "tools": TOOLS, "temperature": 0, **body}
    shown = {key: asked[key] for key in ("messages", "tools", "tool_choice", "chat_template_kwargs") if key in asked}
    prompt = running.post("/apply-template", **shown)
    assert prompt.status_code == 200, prompt.text
    executor.say(script, prompt.json()["n_tokens"])
    choice = running.openai.chat.completions.create(model="tiny", **asked).choices[0]
    content, calls, reason = "", {}, None
    for chunk in running.openai.chat.completions.create(model="tiny", stream=True, **asked):
        delta, reason = chunk.choices[0].delta, chunk.choices[0].finish_reason
        content += delta.content or ""
        for call in delta.tool_calls or []:
            name, arguments = calls.get(call.index, (None, ""))
            calls[call.index] = (name or call.function.name, arguments + (call.function.arguments or ""))
    assert reason == choice.finish_reason
    assert content == (choice.message.content or "")
    whole = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or []]
    assert [calls[index] for index in sorted(calls)] == whole
    assert sorted(calls) == list(range(len(whole)))
    return choice


def test_a_call_is_no_text(caller: Stage) -> None:
    choice = ask(caller, WEATHER)
    (call,) = choice.message.tool_calls
    assert call.type == "function"
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments) == {"city": "Rome", "days": 2}
    assert choice.message.content is None
    assert choice.finish_reason == "tool_calls"


def test_calls_beside_each_other_and_text_before_them(caller: Stage) -> None:
    choice = ask(caller, f"Let me see.\n{WEATHER}\n{NOW}")
    assert [call.function.name for call in choice.message.tool_calls] == ["weather", "now"]
    assert len({call.id for call in choice.message.tool_calls}) == 2
    assert choice.message.content == "Let me see."


@pytest.mark.parametrize(
    "script", ["no call at all", '<tool_call>\n{"name": "shell", "arguments": {}}\n</tool_call>', "<tool_call>\n{oops}"]
)
def test_what_is_no_call_is_text(caller: Stage, script: str) -> None:
    choice = ask(caller, script)
    assert choice.message.content == script
    assert not choice.message.tool_calls
    assert choice.finish_reason == "stop"
    assert (choice.model_extra["finish_detail"] != "end of turn") == ("<tool_call>" in script)


def test_none_reads_no_calls(caller: Stage) -> None:
    choice = ask(caller, NOW, tool_choice="none")
    assert choice.message.content == NOW
    assert not choice.message.tool_calls


def test_results_go_back_to_the_model(caller: Stage) -> None:
    running, _ = caller
    call = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    messages = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "noon"},
    ]
    prompt = running.post("/apply-template", messages=messages, tools=TOOLS).json()["prompt"]
    assert "noon" in prompt
    assert '"name": "now"' in prompt
    assert ask(caller, "It is noon.", messages=messages).message.content == "It is noon."


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "now"}}])
def test_a_demanded_call_is_made_by_random_weights(directory: Path, choice: Any) -> None:
    """Only the grammar can make these weights call a tool."""
    tools = [TOOLS[1]]
    with live(open_engine(directory, EngineOptions(context=400))) as running:
        for seed in range(3):
            reply = running.openai.chat.completions.create(
                model="tiny", messages=[USER], tools=tools, tool_choice=choice, seed=seed, temperature=2,
                max_tokens=150,
                extra_body={"chat_template_kwargs": {"enable_thinking": False}},
            )  # fmt: skip
            found = reply.choices[0]
            if found.finish_reason == "tool_calls":
                break
    (call, *_) = found.message.tool_calls
    assert call.function.name == "now"
    assert json.loads(call.function.arguments) == {}


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"tools": [{"type": "function", "function": {}}]}, "tools", "name"),
        ({"tools": "all"}, "tools", "expected a list"),
        ({"tools": TOOLS, "tool_choice": "maybe"}, "tool_choice", "maybe"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", "'x'"),
        ({"tool_choice": "required"}, "tool_choice", "no tools"),
        ({"tools": TOOLS, "response_format": {"type": "json_object"}}, "response_format", "one form"),
    ],
)
def test_what_cannot_be_is_refused_by_name(caller: Stage, body: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        caller[0].openai.chat.completions.create(model="tiny", messages=[USER], extra_body=body)  # type: ignore[list-item]
    assert caught.value.body["param"] == param  # type: ignore[index]
    assert words in caught.value.body["message"]  # type: ignore[index]
