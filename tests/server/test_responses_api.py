"""The Responses API: the real client, an executor that says what the test wants, and events that join to the whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.responses import Response
from pydantic import BaseModel

from bytefloor.engine.loading import EngineOptions, open_engine
from server.live import live
from server.responses import FLAT, NOW, PATH, THOUGHT, WEATHER, Stage, chat_prompt_of, n_prompt, prompt_of


def plain(output: list[Any]) -> list[dict[str, Any]]:
    """Items without what no two responses share."""
    shown = [item if isinstance(item, dict) else item.model_dump(exclude_none=True) for item in output]
    return [{key: value for key, value in item.items() if key not in ("id", "call_id")} for item in shown]


def followed(events: list[Any]) -> list[dict[str, Any]]:
    """The output as its events tell it, which are checked to come in order, each about what is open."""
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:2] == ["created", "in_progress"]
    assert kinds[-1] in ("completed", "incomplete", "failed")
    items: list[dict[str, Any]] = []
    is_open, part = False, None
    for kind, event in zip(kinds[2:-1], events[2:-1], strict=True):
        if kind == "output_item.added":
            assert not is_open
            assert event.output_index == len(items)
            items.append(event.item.model_dump(exclude_none=True))
            assert items[-1]["status"] == "in_progress"
            assert not items[-1].get("content")
            assert not items[-1].get("arguments")
            is_open, text = True, ""
            continue
        assert is_open
        assert event.output_index == len(items) - 1
        if kind == "output_item.done":
            assert part is None
            done = event.item.model_dump(exclude_none=True)
            assert done["id"] == items[-1]["id"]
            told = done["arguments"] if done["type"] == "function_call" else done["content"][0]["text"]
            assert told == text
            items[-1], is_open = done, False
            continue
        assert event.item_id == items[-1]["id"]
        name = {"message": "output_text", "reasoning": "reasoning_text"}.get(items[-1]["type"])
        if kind == "content_part.added":
            part = event.part
            assert (part.type, part.text) == (name, "")
        elif kind == "content_part.done":
            assert (event.part.type, event.part.text) == (name, text)
            part = None
        elif kind.endswith(".delta"):
            assert kind == f"{name or 'function_call_arguments'}.delta"
            assert event.delta
            text += event.delta
        else:
            assert kind == f"{name or 'function_call_arguments'}.done"
            assert (event.text if name else event.arguments) == text
    assert not is_open
    return items


def ask(stage: Stage, script: str, ends: bool = True, **body: Any) -> Response:
    """The whole response, which the stream's events and its last response must equal."""
    running, executor = stage
    asked: dict[str, Any] = {"input": "and?", "temperature": 0, **body}
    executor.say(script, n_prompt(running, asked), ends=ends)
    extra = {"extra_body": asked.pop("extra")} if "extra" in asked else {}
    whole = running.openai.responses.create(model="tiny", **asked, **extra)
    events = list(running.openai.responses.create(model="tiny", stream=True, **asked, **extra))
    items, last = followed(events), events[-1]
    assert last.type == f"response.{whole.status}"
    assert [item.model_dump(exclude_none=True) for item in last.response.output] == items
    assert plain(items) == plain(whole.output)
    same = ("status", "incomplete_details", "instructions", "metadata", "temperature", "text", "tools", "tool_choice")
    for name in (*same, "max_output_tokens", "error"):
        assert getattr(last.response, name) == getattr(whole, name)
    assert last.response.usage.output_tokens == whole.usage.output_tokens
    return whole


# --- what comes back


def test_a_text(caller: Stage) -> None:
    whole = ask(caller, "Rain, it seems.", metadata={"a": "b"}, user="me")
    assert whole.status == "completed"
    assert whole.output_text == "Rain, it seems."
    (item,) = whole.output
    assert (item.type, item.role, item.status) == ("message", "assistant", "completed")
    assert (item.content[0].type, item.content[0].annotations) == ("output_text", [])
    assert whole.error is whole.incomplete_details is whole.previous_response_id is None
    assert (whole.metadata, whole.user, whole.temperature) == ({"a": "b"}, "me", 0)
    assert (whole.object, whole.model, whole.truncation, whole.store) == ("response", "tiny", "disabled", False)
    assert whole.parallel_tool_calls is True
    assert whole.tools == []
    assert whole.id.startswith("resp_")


def test_usage_is_what_was_computed(caller: Stage) -> None:
    running, _ = caller
    first = ask(caller, THOUGHT + "Rain.", input="will it rain?")
    n = n_prompt(running, {"input": "will it rain?"})
    tokenizer = running.service.served.tokenizer
    usage = first.usage
    assert usage is not None
    assert usage.input_tokens == n
    assert usage.output_tokens == len(tokenizer.encode(THOUGHT + "Rain.", add_bos=False)) + 1
    assert usage.total_tokens == n + usage.output_tokens
    # White space between the tags included. This vocabulary spells tags, and the closing one is known by its end.
    n_thought, n_tag = (len(tokenizer.encode(text, add_bos=False)) for text in ("\nIt may rain.\n", "</think>"))
    assert n_thought <= usage.output_tokens_details.reasoning_tokens < n_thought + n_tag
    assert usage.input_tokens_details.cached_tokens == 0
    again = running.openai.responses.create(model="tiny", input="will it rain?", temperature=0).usage
    assert again is not None
    assert again.input_tokens_details.cached_tokens == n - 1


def test_a_thought_is_an_item_before_the_text(caller: Stage) -> None:
    whole = ask(caller, THOUGHT + "Take an umbrella.")
    thought, message = whole.output
    assert thought.type == "reasoning"
    assert thought.summary == []
    assert [(part.type, part.text) for part in thought.content] == [("reasoning_text", "It may rain.")]
    assert message.content[0].text == whole.output_text == "Take an umbrella."


def test_calls_are_items_behind_the_text(caller: Stage) -> None:
    whole = ask(caller, f"{THOUGHT}Let me see.\n{WEATHER}\n{NOW}", tools=FLAT)
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call", "function_call"]
    calls = whole.output[2:]
    assert [call.name for call in calls] == ["weather", "now"]
    assert json.loads(calls[0].arguments) == {"city": "Rome", "days": 2}
    assert len({call.call_id for call in calls}) == 2
    assert {call.status for call in calls} == {"completed"}
    assert whole.status == "completed"
    assert whole.output_text == "Let me see."
    assert [tool.name for tool in whole.tools] == ["weather", "now"]


@pytest.mark.parametrize("script", ["nothing", '<tool_call>\n{"name": "shell", "arguments": {}}\n</tool_call>'])
def test_what_is_no_call_is_text(caller: Stage, script: str) -> None:
    whole = ask(caller, script, tools=FLAT)
    assert whole.output_text == script
    assert [item.type for item in whole.output] == ["message"]
    assert ("'shell'" in whole.model_extra["finish_detail"]) == ("shell" in script)  # type: ignore[index]


def test_a_call_that_breaks_off_stays_incomplete_and_is_told_as_text(caller: Stage) -> None:
    script = WEATHER[:50]
    whole = ask(caller, script, tools=FLAT)
    call, message = whole.output
    assert (call.type, call.name, call.status) == ("function_call", "weather", "incomplete")
    assert call.arguments in WEATHER
    assert message.content[0].text == script
    # Sent back, it is the text alone.
    sent = [item.model_dump(exclude_none=True) for item in whole.output]
    running, _ = caller
    text = [{"role": "user", "content": "x"}, {"role": "assistant", "content": script}]
    assert prompt_of(running, input=[{"role": "user", "content": "x"}, *sent]) == chat_prompt_of(running, text)


@pytest.mark.parametrize(
    ("script", "kinds"),
    [
        ("abcdefgh" * 9, ["message"]),
        (f"<think>{'abcdefgh' * 9}", ["reasoning"]),
        (THOUGHT + "x" * 60, ["reasoning", "message"]),
    ],
)
def test_an_answer_that_is_cut_is_incomplete(caller: Stage, script: str, kinds: list[str]) -> None:
    whole = ask(caller, script, max_output_tokens=40)
    assert whole.status == "incomplete"
    assert whole.incomplete_details.reason == "max_output_tokens"
    assert whole.max_output_tokens == 40
    assert [item.type for item in whole.output] == kinds
    assert [item.status for item in whole.output] == ["completed"] * (len(kinds) - 1) + ["incomplete"]
    assert whole.usage.output_tokens == 40


def test_an_empty_answer_has_no_items(caller: Stage) -> None:
    whole = ask(caller, "")
    assert (whole.output, whole.output_text, whole.status) == ([], "", "completed")


# --- the client's own helpers


def test_the_clients_stream_follows_text_and_calls(caller: Stage) -> None:
    running, executor = caller
    executor.say(f"{THOUGHT}So.\n{WEATHER}", n_prompt(running, {"input": "and?", "tools": FLAT}))
    texts, arguments = [], []
    with running.openai.responses.stream(model="tiny", input="and?", tools=FLAT, temperature=0) as stream:
        for event in stream:
            if event.type == "response.output_text.delta":
                texts.append(event.snapshot)
            if event.type == "response.function_call_arguments.delta":
                arguments.append(event.snapshot)
        final = stream.get_final_response()
    assert texts[-1] == final.output_text == "So."
    assert len(texts) > 1
    assert json.loads(arguments[-1]) == {"city": "Rome", "days": 2}
    assert len(arguments) > 1
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]


class Day(BaseModel):
    rain: bool
    n: int


def test_the_clients_parse_gets_its_model(qwen: Path) -> None:
    """Only the grammar can make these weights write it; what it gave goes back as it is."""
    with live(open_engine(qwen, EngineOptions(context=300))) as running:
        for seed in range(4):
            asked: dict[str, Any] = {"model": "tiny", "input": "and?", "text_format": Day, "max_output_tokens": 80}
            extra = {"seed": seed, "chat_template_kwargs": {"enable_thinking": False}}
            try:
                found = running.openai.responses.parse(**asked, extra_body=extra)
            except ValueError:  # cut in the middle of a long number
                continue
            if found.status == "completed":
                break
        assert isinstance(found.output_parsed, Day)
        assert json.loads(found.output_text) == found.output_parsed.model_dump()
        assert found.text.format.type == "json_schema"
        assert found.text.format.name == "Day"
        with running.openai.responses.stream(**asked, extra_body={**extra, "seed": seed}) as stream:
            assert stream.get_final_response().output_parsed == found.output_parsed
        items: list[Any] = [{"role": "user", "content": "and?"}, *found.output, {"role": "user", "content": "sure?"}]
        again = running.openai.responses.create(model="tiny", input=items, max_output_tokens=1)
        assert again.usage.output_tokens == 1


def test_json_without_a_schema(qwen: Path) -> None:
    with live(open_engine(qwen, EngineOptions(context=200))) as running:
        text = {"format": {"type": "json_object"}, "verbosity": "medium"}
        extra = {"chat_template_kwargs": {"enable_thinking": False}}
        found = running.openai.responses.create(
            model="tiny", input="and?", text=text, max_output_tokens=30, extra_body=extra
        )
        assert found.output_text.startswith("{")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "now"}])
def test_a_demanded_call_is_made_by_random_weights(qwen: Path, choice: Any) -> None:
    with live(open_engine(qwen, EngineOptions(context=400))) as running:
        for seed in range(4):
            extra = {"seed": seed, "chat_template_kwargs": {"enable_thinking": False}}
            found = running.openai.responses.create(
                model="tiny", input="and?", tools=FLAT[1:], tool_choice=choice, temperature=2, max_output_tokens=150,
                extra_body=extra, parallel_tool_calls=False,
            )  # fmt: skip
            if found.status == "completed":
                break
    (call,) = (item for item in found.output if item.type == "function_call")
    assert (call.name, json.loads(call.arguments)) == ("now", {})
    assert found.parallel_tool_calls is False


def test_what_came_back_can_be_sent_back(caller: Stage) -> None:
    running, _ = caller
    first = ask(caller, f"{THOUGHT}Let me see.\n{NOW}", tools=FLAT)
    items: list[Any] = [{"role": "user", "content": "and?"}, *first.output]
    items.append({"type": "function_call_output", "call_id": first.output[2].call_id, "output": "noon"})
    sent = [item if isinstance(item, dict) else item.model_dump(exclude_none=True) for item in items]
    shown = prompt_of(running, input=sent, tools=FLAT)
    for text in ("It may rain.", "Let me see.", "noon", '"name": "now"'):
        assert text in shown
    running.openai.responses.create(model="tiny", input=items, tools=FLAT, max_output_tokens=1)


# --- what goes wrong


def test_a_stream_that_fails_ends_in_a_failed_response(caller: Stage) -> None:
    running, executor = caller
    executor.say("a long answer", n_prompt(running, {"input": "and?"}))
    events: list[Any] = []
    for event in running.openai.responses.create(model="tiny", input="and?", temperature=0, stream=True):
        events.append(event)
        if event.type == "response.output_text.delta":
            executor.failure = RuntimeError("oops")
    (item,) = followed(events)
    assert item["status"] == "incomplete"
    last = events[-1]
    assert last.type == "response.failed"
    assert last.response.status == "failed"
    assert "oops" in last.response.error.message
    assert last.response.error.code == "server_error"
    assert last.response.output[0].id == item["id"]
    executor.failure = RuntimeError("oops")
    with pytest.raises(openai.InternalServerError, match="oops"):
        running.openai.responses.create(model="tiny", input="and?")


def test_events_are_named_and_a_stream_has_no_other_end(caller: Stage) -> None:
    running, executor = caller
    executor.say("hi", n_prompt(running, {"input": "x"}))
    lines = running.post(PATH, input="x", stream=True, temperature=0).text.splitlines()
    names = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    data = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    assert [each["type"] for each in data] == names
    assert names[-1] == "response.completed"
