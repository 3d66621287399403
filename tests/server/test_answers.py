"""What goes over the wire, with an executor that says what the test wants."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bytefloor.engine.loading import EngineOptions, open_engine
from server.live import Live, Scripted, chatty, live, scripted

Stage = tuple[Live, Scripted]
#: Opens the thought itself where thinking is on.
THINKING = """\
{% for m in messages %}[{{ m.role }}] {{ m.content }}
{% endfor %}[assistant]{% if enable_thinking is defined and enable_thinking %}<think>{% endif %}"""


@pytest.fixture
def thinker(tmp_path: Path) -> Iterator[Stage]:
    opened = open_engine(chatty(tmp_path, "qwen3", THINKING), EngineOptions(context=64))
    engine, executor = scripted(opened)
    with live(engine) as running:
        yield running, executor


def events(text: str) -> list[Any]:
    """The stream's objects. Each event is one line and an empty one; [DONE] is the last."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line and not line.startswith(":")]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def both(stage: Stage, script: str, **body: Any) -> dict[str, Any]:
    """Content, reasoning and finish of a whole answer, which the stream's must equal."""
    running, executor = stage
    kwargs = {"enable_thinking": body.pop("thinking")} if "thinking" in body else {}
    messages = [{"role": "user", "content": "hello"}]
    n_prompt = running.post("/apply-template", messages=messages, chat_template_kwargs=kwargs).json()["n_tokens"]
    executor.say(script, n_prompt)
    asked = {"messages": messages, "chat_template_kwargs": kwargs, **body}
    choice = running.post("/v1/chat/completions", **asked).json()["choices"][0]
    found = {
        "content": choice["message"]["content"],
        "reasoning_content": choice["message"].get("reasoning_content", ""),
        "finish_reason": choice["finish_reason"],
    }
    streamed = {"content": "", "reasoning_content": "", "finish_reason": None}
    for chunk in events(running.post("/v1/chat/completions", stream=True, **asked).text):
        delta = chunk["choices"][0]["delta"]
        streamed["content"] += delta.get("content", "")
        streamed["reasoning_content"] += delta.get("reasoning_content", "")
        streamed["finish_reason"] = chunk["choices"][0]["finish_reason"]
    assert streamed == found
    return found


@pytest.mark.parametrize(
    ("script", "options", "content", "reasoning"),
    [
        ("<think>why</think>because", {}, "because", "why"),
        ("why</think>because", {"thinking": True}, "because", "why"),
        ("why not, it goes on and on", {"thinking": True, "max_tokens": 5}, "", "why n"),
        ("<think>shown", {"thinking": False}, "<think>shown", ""),
        ("no tags", {}, "no tags", ""),
        ("<thin", {}, "<thin", ""),
    ],
    ids=["in the answer", "opened by the template", "cut in the thought", "off", "none", "a tag's beginning"],
)
def test_thoughts_are_told_from_answers(
    thinker: Stage, script: str, options: dict[str, Any], content: str, reasoning: str
) -> None:
    """C03, C05"""
    found = both(thinker, script, **options)
    assert (found["content"], found["reasoning_content"]) == (content, reasoning)


@pytest.mark.parametrize(
    ("stop", "content"),
    [
        ("O P Q", "A B C D E F G H I J K L M N "),
        (["never", "C D"], "A B "),
        ("A", ""),
        ("Z", "A B C D E F G H I J K L M N O P Q"),
        ("Q Z", "A B C D E F G H I J K L M N O P Q"),
    ],
)
def test_text_before_a_stop_comes_exactly_once(stage: Stage, stop: str | list[str], content: str) -> None:
    """V01"""
    found = both(stage, "A B C D E F G H I J K L M N O P Q", stop=stop)
    assert found["content"] == content
    assert found["finish_reason"] == "stop"


def test_characters_of_several_tokens_are_never_halved(stage: Stage) -> None:
    found = both(stage, "naïve 🙂 ok")
    assert found["content"] == "naïve 🙂 ok"


def test_the_end_of_the_turn_has_no_logprob(stage: Stage) -> None:
    running, executor = stage
    executor.say("ab", running.n_prompt())
    reply = running.chat(logprobs=True, top_logprobs=2).json()
    entries = reply["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == ["a", "b"]
    assert [entry["bytes"] for entry in entries] == [[97], [98]]
    assert [len(entry["top_logprobs"]) for entry in entries] == [2, 2]
    assert reply["usage"]["completion_tokens"] == 3
    assert reply["choices"][0]["finish_reason"] == "stop"


def test_the_first_chunk_says_who_speaks_and_the_last_one_how_it_ended(stage: Stage) -> None:
    running, executor = stage
    executor.say("hi", running.n_prompt())
    reply = running.chat(stream=True)
    assert reply.headers["content-type"].startswith("text/event-stream")
    first, *others = events(reply.text)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "usage" not in first
    assert others[-1]["choices"][0]["delta"] == {}
    assert others[-1]["choices"][0]["finish_reason"] == "stop"
    assert others[-1]["timings"]["predicted_n"] == 3
    assert not any("timings" in chunk for chunk in others[:-1])


def test_an_answer_that_repeats_itself_is_cut_and_says_so(stage: Stage) -> None:
    running, _ = stage
    choice = running.chat(max_tokens=400).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["finish_detail"] == "the answer repeats itself"


def test_choices_whose_prompt_is_read_together_come_from_one_reading(stage: Stage) -> None:
    running, executor = stage
    n_prompt = running.n_prompt()
    executor.say("abc", n_prompt)
    executor.batches.clear()
    reply = running.chat(n=2).json()
    assert [choice["message"]["content"] for choice in reply["choices"]] == ["abc", "abc"]
    n_rows = sum(len(batch.tokens) for batch in executor.batches)
    # The prompt, its last token once more for the second choice, and three more tokens of each.
    assert n_rows == n_prompt + 1 + 6
