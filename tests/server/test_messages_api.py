"""Anthropic's Messages API: the real client, and an executor that says what the test wants."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import pytest

from bytefloor.engine.loading import EngineOptions, Opened, open_engine
from bytefloor.engine.request import Request
from server.live import Live, Scripted, chatty, eventually, live, scripted
from text.small_chats import QWEN3_TEMPLATE
from text.tool_chats import TOOLS

Stage = tuple[Live, Scripted]
USER = {"role": "user", "content": "and?"}
WEATHER = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
CLIENT_TOOLS = [
    {
        "name": tool["function"]["name"],
        "description": tool["function"]["description"],
        "input_schema": tool["function"]["parameters"],
    }
    for tool in TOOLS
]
#: The client has no arguments for these any more; the API has the fields.
GREEDY = {"temperature": 0}
PING = 'event: ping\ndata: {"type":"ping"}\n\n'
MARK = {"type": "ephemeral", "ttl": "1h"}
COUNTED = {"model", "messages", "system", "tools", "tool_choice", "thinking"}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chatty(tmp_path_factory.mktemp("messages"), "qwen3", QWEN3_TEMPLATE)


@pytest.fixture
def stage(directory: Path) -> Iterator[Stage]:
    engine, executor = scripted(open_engine(directory, EngineOptions(context=64)), capacity=2048)
    with live(engine) as running:
        yield running, executor
        executor.gate.set()


def client(running: Live) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=running.url, api_key="unused", max_retries=0, timeout=60)


def blocks(message: Any) -> list[dict[str, Any]]:
    """Ids of calls are each answer's own."""
    return [{key: value for key, value in block.to_dict().items() if key != "id"} for block in message.content]


def ask(stage: Stage, script: str, *, ends: bool = True, **body: Any) -> Any:
    """A whole message, which the stream's must equal."""
    running, executor = stage
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 500, "messages": [USER], "extra_body": GREEDY, **body}
    messages = client(running).messages
    counted = messages.count_tokens(**{key: value for key, value in asked.items() if key in COUNTED})
    executor.say(script, counted.input_tokens, ends=ends)
    whole = messages.create(**asked)
    assert whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0) == counted.input_tokens
    with messages.stream(**asked) as stream:
        streamed = stream.get_final_message()
    assert blocks(streamed) == blocks(whole)
    assert (streamed.stop_reason, streamed.stop_sequence) == (whole.stop_reason, whole.stop_sequence)
    assert streamed.usage.input_tokens + (streamed.usage.cache_read_input_tokens or 0) == counted.input_tokens
    return whole


def reached(stage: Stage, **body: Any) -> tuple[str, Request]:
    """(the prompt's text, what the engine is asked)."""
    running, executor = stage
    engine, found = running.service.served.engine, []
    executor.say("", 0)
    with pytest.MonkeyPatch.context() as patch:
        add = engine.add
        patch.setattr(engine, "add", lambda request: found.append(request) or add(request))
        client(running).messages.create(**{"model": "tiny", "max_tokens": 1, "messages": [USER], **body})
    (asked,) = found
    return running.post("/detokenize", tokens=list(asked.prompt_ids)).json()["content"], asked


def test_a_message_is_its_text_and_what_it_took(stage: Stage) -> None:
    message = ask(stage, "Hello you.")
    assert blocks(message) == [{"type": "text", "text": "Hello you."}]
    assert (message.type, message.role, message.model) == ("message", "assistant", "tiny")
    assert message.id.startswith("msg_")
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    n_said = len(stage[0].post("/tokenize", content="Hello you.").json()["tokens"])
    assert message.usage.output_tokens == n_said + 1
    assert message.usage.cache_read_input_tokens == 0
    assert message._request_id.startswith("req-")


def test_what_is_in_the_cache_is_told(stage: Stage) -> None:
    body = {"model": "tiny", "max_tokens": 3, "messages": [{"role": "user", "content": "long " * 40}]}
    first, second = (client(stage[0]).messages.create(**body).usage for _ in range(2))
    assert second.cache_read_input_tokens > 0
    assert second.input_tokens + second.cache_read_input_tokens == first.input_tokens
    assert second.cache_creation_input_tokens == 0
    with client(stage[0]).messages.stream(**body) as stream:
        begun = next(event for event in stream if event.type == "message_start").message.usage
        ended = stream.get_final_message().usage
    assert (begun.input_tokens, begun.cache_read_input_tokens) == (first.input_tokens, None)
    assert ended.cache_read_input_tokens == second.cache_read_input_tokens


@pytest.mark.parametrize(
    ("script", "ends", "body", "text", "reason", "sequence"),
    [
        ("one two", True, {}, "one two", "end_turn", None),
        ("one STOP two", True, {"stop_sequences": ["zzz", "STOP"]}, "one ", "stop_sequence", "STOP"),
        ("one STOP", True, {"stop_sequences": ["OP", "STOP"]}, "one ", "stop_sequence", "STOP"),
        ("", False, {"max_tokens": 4}, "aaaa", "max_tokens", None),
    ],
)
def test_how_an_answer_ends(
    stage: Stage, script: str, ends: bool, body: dict[str, Any], text: str, reason: str, sequence: str | None
) -> None:
    message = ask(stage, script, ends=ends, **body)
    assert message.content[0].text == text
    assert (message.stop_reason, message.stop_sequence) == (reason, sequence)


def test_an_answer_that_repeats_itself_says_so(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Opened, "detects_loops", True)
    engine, executor = scripted(open_engine(directory, EngineOptions(context=64)), capacity=2048)
    with live(engine) as running:
        message = ask((running, executor), "", ends=False)
    assert message.stop_reason == "max_tokens"
    assert message.to_dict()["finish_detail"] == "the answer repeats itself"


def test_an_answer_may_repeat_itself_where_it_is_asked_to(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a form, or by whoever does not want to be watched."""
    monkeypatch.setattr(Opened, "detects_loops", True)
    engine, _ = scripted(open_engine(directory, EngineOptions(context=64)), capacity=2048)
    with live(engine) as running:
        for body, detail in (
            ({}, "the answer repeats itself"),
            ({"detect_loops": True}, "the answer repeats itself"),
            ({"detect_loops": False}, "max_tokens 200"),
            ({"regex": "a+"}, "max_tokens 200"),
        ):
            (choice,) = running.chat(max_tokens=200, **body).json()["choices"]
            assert (choice["finish_reason"], choice["finish_detail"]) == ("length", detail)


def test_an_answer_that_fills_the_context(directory: Path) -> None:
    engine, executor = scripted(open_engine(directory, EngineOptions(context=64)), capacity=80)
    with live(engine) as running:
        message = ask((running, executor), "abc def ghi jkl mno pqr stu vwx yz " * 4, ends=False)
        assert message.stop_reason == "model_context_window_exceeded"
        assert message.to_dict()["finish_detail"].startswith("context of 80")


def test_an_empty_answer_has_no_blocks_and_can_be_sent_back(stage: Stage) -> None:
    message = ask(stage, "")
    assert message.content == []
    assert message.stop_reason == "end_turn"
    ask(stage, "yes", messages=[USER, {"role": "assistant", "content": message.content}, USER])


def test_a_thought_is_a_block(stage: Stage) -> None:
    message = ask(stage, "<think>\nhm, so\n</think>\n\nYes.", thinking={"type": "adaptive"})
    assert blocks(message) == [
        {"type": "thinking", "thinking": "hm, so", "signature": ""},
        {"type": "text", "text": "Yes."},
    ]


@pytest.mark.parametrize(("kind", "is_off"), [("enabled", False), ("disabled", True), (None, False)])
def test_thinking_reaches_the_template(stage: Stage, kind: str | None, is_off: bool) -> None:
    body = {} if kind is None else {"thinking": {"type": kind}}
    assert ("</think>" in reached(stage, **body)[0]) == is_off


def test_a_thought_is_closed_when_its_budget_is_spent(stage: Stage) -> None:
    message = ask(stage, "<think>\nhm, so and so and so on", thinking={"type": "enabled", "budget_tokens": 4})
    thought, *_ = message.content
    assert thought.type == "thinking"
    assert 0 < len(thought.thinking) < len("hm, so and so and so on")
    assert message.usage.output_tokens_details.thinking_tokens == 4


def test_calls_are_blocks_beside_text(stage: Stage) -> None:
    message = ask(stage, f"<think>\nhm\n</think>\n\nLet me see.\n{WEATHER}\n{NOW}", tools=CLIENT_TOOLS)
    kinds = [block.type for block in message.content]
    assert kinds == ["thinking", "text", "tool_use", "tool_use"]
    assert message.content[2].name == "weather"
    assert message.content[2].input == {"city": "Rome", "days": 2}
    assert message.content[3].input == {}
    assert message.content[2].id != message.content[3].id
    assert message.stop_reason == "tool_use"


@pytest.mark.parametrize("script", [NOW[:-25], '<tool_call>\n{"name": "shell", "arguments": {}}\n</tool_call>'])
def test_what_is_no_call_is_text(stage: Stage, script: str) -> None:
    message = ask(stage, script, tools=CLIENT_TOOLS)
    assert blocks(message) == [{"type": "text", "text": script}]
    assert message.stop_reason == "end_turn"
    assert message.to_dict()["finish_detail"] != "end of turn"


def test_a_stop_string_after_a_call_is_what_ended_it(stage: Stage) -> None:
    message = ask(stage, f"{NOW} and STOP", tools=CLIENT_TOOLS, stop_sequences=["STOP"])
    assert [block.type for block in message.content] == ["tool_use", "text"]
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "STOP")


def test_none_reads_no_calls(stage: Stage) -> None:
    message = ask(stage, NOW, tools=CLIENT_TOOLS, tool_choice={"type": "none"})
    assert [block.type for block in message.content] == ["text"]


def test_one_call_is_all_where_that_is_asked_over_both_apis(stage: Stage) -> None:
    script = f"Well.\n{NOW}\n{WEATHER}\nand more"
    stage[1].pause_s = 0.005
    one = {"type": "auto", "disable_parallel_tool_use": True}
    message = ask(stage, script, tools=CLIENT_TOOLS, tool_choice=one)
    assert [block.type for block in message.content] == ["text", "tool_use"]
    assert message.stop_reason == "tool_use"
    several = ask(stage, script, tools=CLIENT_TOOLS, tool_choice={"type": "auto"})
    assert [block.type for block in several.content] == ["text", "tool_use", "tool_use", "text"]
    assert message.usage.output_tokens < several.usage.output_tokens
    openais = stage[0].chat("and?", tools=TOOLS, parallel_tool_calls=False, temperature=0).json()["choices"][0]
    assert [call["function"]["name"] for call in openais["message"]["tool_calls"]] == ["now"]
    assert (openais["finish_reason"], openais["message"]["content"]) == ("tool_calls", "Well.")
    eventually(lambda: stage[0].service.worker.n_open == 0, "nothing is left open")


OFF = {"type": "disabled"}


def test_calls_are_demanded_by_grammar(stage: Stage) -> None:
    """What the grammar does not allow cannot be said, though the model would."""
    tools = [{**tool, "strict": True} for tool in CLIENT_TOOLS]
    named = {"type": "tool", "name": "now"}
    some = ask(stage, f"{WEATHER}\n{NOW}", tools=tools, tool_choice={"type": "any"}, thinking=OFF)
    assert [block.name for block in some.content] == ["weather", "now"]
    one = {"type": "any", "disable_parallel_tool_use": True}
    (call,) = ask(stage, f"{WEATHER}\n{NOW}", tools=tools, tool_choice=one, thinking=OFF).content
    assert (call.name, call.input) == ("weather", {"city": "Rome", "days": 2})
    (call,) = ask(stage, NOW, tools=tools, tool_choice=named, thinking=OFF, max_tokens=60).content
    assert (call.name, call.input) == ("now", {})
    other = ask(stage, WEATHER, tools=tools, tool_choice=named, thinking=OFF, max_tokens=60)
    assert other.stop_reason == "max_tokens"
    assert other.content[0].text.startswith('<tool_call>\n{"name": "now')


def test_an_answer_of_a_schema(directory: Path) -> None:
    schema = {"type": "object", "properties": {"k": {"enum": ["a", "b"]}}, "required": ["k"]}
    form = {"format": {"type": "json_schema", "schema": {**schema, "additionalProperties": False}}}
    with live(open_engine(directory, EngineOptions(context=400))) as running:
        message = client(running).messages.create(
            model="tiny", messages=[USER], max_tokens=100, output_config=form, thinking={"type": "disabled"},
            extra_body=GREEDY,
        )  # fmt: skip
    assert json.loads(message.content[0].text)["k"] in ("a", "b")


def test_a_conversation_with_everything_in_it_reaches_the_template(stage: Stage) -> None:
    first = ask(stage, f"<think>\nhm\n</think>\n\nWait.\n{WEATHER}\n{NOW}", tools=CLIENT_TOOLS)
    weather, now = first.content[2:]
    results = [
        {"type": "tool_result", "tool_use_id": now.id, "content": [{"type": "text", "text": "noon"}]},
        {"type": "tool_result", "tool_use_id": weather.id, "content": "gone", "is_error": True, "cache_control": MARK},
        {"type": "text", "text": "so?"},
    ]
    shown, _ = reached(
        stage,
        system=[{"type": "text", "text": "Be"}, {"type": "text", "text": "brief.", "cache_control": MARK}],
        messages=[
            USER,
            {"role": "user", "content": [{"type": "text", "text": "well?"}]},
            {"role": "assistant", "content": first.content[:2]},
            {"role": "assistant", "content": first.content[2:]},
            {"role": "user", "content": results},
            {"role": "user", "content": "quick!"},
        ],
        tools=[{**tool, "cache_control": MARK, "type": "custom"} for tool in CLIENT_TOOLS],
        metadata={"user_id": "u"},
        service_tier="auto",
        thinking={"type": "disabled"},
    )
    tools, _, turns = shown.partition("<|im_start|>system\nBe\nbrief.<|im_end|>\n")
    assert '"name": "weather"' in tools
    calls = "".join(
        f'<tool_call>\n{{"name": "{call.name}", "arguments": {json.dumps(call.input)}}}\n</tool_call>'
        for call in (weather, now)
    )
    assert turns == (
        "<|im_start|>user\nand?\nwell?<|im_end|>\n"
        f"<|im_start|>assistant\nWait.{calls}<|im_end|>\n"
        "<|im_start|>tool\nnoon<|im_end|>\n"
        '<|im_start|>tool\n{"error": "gone"}<|im_end|>\n'
        "<|im_start|>user\nso?\nquick!<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


def test_parameters_reach_the_engine(stage: Stage) -> None:
    sampling = {"temperature": 0.3, "top_p": 0.7, "top_k": 9}
    _, asked = reached(stage, max_tokens=7, stop_sequences=["x", "yz"], extra_body=sampling)
    found = {name: getattr(asked.sampling, name) for name in sampling}
    assert (found, asked.max_tokens, asked.stops) == (sampling, 7, ("x", "yz"))


def test_the_events_of_a_stream_byte_for_byte(stage: Stage) -> None:
    running, executor = stage
    body = {"max_tokens": 99, "messages": [USER], "tools": CLIENT_TOOLS, "temperature": 0}
    asked = {key: body[key] for key in ("messages", "tools")}
    n_prompt = running.post("/v1/messages/count_tokens", **asked).json()["input_tokens"]
    executor.say(f"<think>m</think>Ab\n{NOW}", n_prompt)
    reply = running.post("/v1/messages", stream=True, **body)
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    id = json.loads(reply.text.split("\n")[1].removeprefix("data: "))["message"]["id"]
    call = reply.text.split('"tool_use","id":"')[1].split('"')[0]
    n_said = len(running.post("/tokenize", content=f"<think>m</think>Ab\n{NOW}").json()["tokens"]) + 1
    text = reply.text.replace(id, "ID").replace(call, "CALL").replace(PING, "")  # on a slow machine
    events = [line for line in text.split("\n\n") if line]
    deltas = [line for line in events if '"text_delta"' in line]
    assert "".join(json.loads(line.split("data: ")[1])["delta"]["text"] for line in deltas) == "Ab"
    events = [line for line in events if line not in deltas[1:]]

    def named(name: str, rest: str) -> str:
        return f'event: {name}\ndata: {{"type":"{name}"{rest}}}'

    usage = f'"usage":{{"input_tokens":{n_prompt},"cache_read_input_tokens":null,"output_tokens":0}}'
    spent = f'"cache_creation_input_tokens":0,"cache_read_input_tokens":0,"output_tokens":{n_said}'
    n_thought = re.findall(r'"thinking_tokens":([1-9])', reply.text)[0]  # the closing tag is spelled in several tokens
    spent += f',"output_tokens_details":{{"thinking_tokens":{n_thought}}}'
    assert events == [
        named(
            "message_start",
            ',"message":{"id":"ID","type":"message","role":"assistant","model":"tiny","content":[],'
            f'"stop_reason":null,"stop_sequence":null,{usage}}}',
        ),
        named("content_block_start", ',"index":0,"content_block":{"type":"thinking","thinking":"","signature":""}'),
        named("content_block_delta", ',"index":0,"delta":{"type":"thinking_delta","thinking":"m"}'),
        named("content_block_stop", ',"index":0'),
        named("content_block_start", ',"index":1,"content_block":{"type":"text","text":""}'),
        deltas[0],
        named("content_block_stop", ',"index":1'),
        named(
            "content_block_start",
            ',"index":2,"content_block":{"type":"tool_use","id":"CALL","name":"now","input":{}}',
        ),
        named("content_block_delta", ',"index":2,"delta":{"type":"input_json_delta","partial_json":"{}"}'),
        named("content_block_stop", ',"index":2'),
        named(
            "message_delta",
            ',"delta":{"stop_reason":"tool_use","stop_sequence":null,"finish_detail":"end of turn"},'
            f'"usage":{{"input_tokens":{n_prompt},{spent}}}',
        ),
        named("message_stop", ""),
    ]
    assert deltas[0].startswith('event: content_block_delta\ndata: {"type":"content_block_delta","index":1,"delta":')
    assert reply.text.endswith("\n\n")


@pytest.mark.parametrize("script", ["slow", NOW], ids=["waiting", "held back"])
def test_a_quiet_stream_is_pinged(stage: Stage, script: str) -> None:
    running, executor = stage
    asked = {"messages": [USER], "tools": CLIENT_TOOLS}
    executor.say(script, running.post("/v1/messages/count_tokens", **asked).json()["input_tokens"])
    executor.pause_s = 0.6 if script == "slow" else 0.02
    text = running.post("/v1/messages", max_tokens=60, stream=True, **asked).text
    before, _, after = text.partition("event: content_block_start\n")
    assert 'event: ping\ndata: {"type":"ping"}\n\n' in before
    assert "event: message_stop" in after
