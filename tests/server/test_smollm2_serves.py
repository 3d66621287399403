"""A trained model behind the API: what the real client gets from SmolLM2 on the reference executor."""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from bytefloor.engine.loading import EngineOptions, open_engine
from bytefloor.server.service import ServerOptions
from server.live import Live, live

CAPITAL = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def server(smollm2_path: Path) -> Iterator[Live]:
    opened = open_engine(smollm2_path, EngineOptions(context=160, n_sequences=16, device="cpu"))
    with live(opened, ServerOptions(name="smollm2")) as running:
        yield running


@pytest.fixture
def client(server: Live) -> openai.OpenAI:
    return server.openai


def ask(client: openai.OpenAI, messages: Any = CAPITAL, **more: Any) -> Any:
    asked = {"model": "smollm2", "messages": messages, "temperature": 0, "max_tokens": 12, **more}
    return client.chat.completions.create(**asked)


def test_a_question_is_answered_and_ends_by_itself(client: openai.OpenAI) -> None:
    reply = ask(client)
    assert "Paris" in reply.choices[0].message.content
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    again = ask(client)
    assert again.choices[0].message.content == reply.choices[0].message.content
    assert again.usage.prompt_tokens_details.cached_tokens == reply.usage.prompt_tokens - 1


def test_a_conversation_goes_on(client: openai.OpenAI) -> None:
    turns = [
        {"role": "user", "content": "My dog is called Rex."},
        {"role": "assistant", "content": "What a nice name!"},
        {"role": "user", "content": "What is my dog called?"},
    ]
    assert "Rex" in ask(client, turns, max_tokens=8).choices[0].message.content


def test_a_stream_is_the_whole_in_pieces(client: openai.OpenAI) -> None:
    whole = ask(client)
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}))
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == whole.choices[0].message.content
    assert deltas[0].role == "assistant"
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-2].choices[0].finish_reason == "stop"


def test_text_is_continued(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "smollm2", "prompt": "The capital of France is", "temperature": 0}
    reply = client.completions.create(max_tokens=3, logprobs=3, **asked)
    choice = reply.choices[0]
    assert choice.text.startswith(" Paris")
    assert choice.finish_reason == "length"
    assert choice.logprobs.tokens[0] == " Paris"
    assert choice.logprobs.text_offset[:2] == [0, len(" Paris")]
    assert choice.logprobs.top_logprobs[0][" Paris"] == choice.logprobs.token_logprobs[0] > math.log(0.1)
    streamed = client.completions.create(max_tokens=3, stream=True, **asked)
    assert "".join(chunk.choices[0].text for chunk in streamed) == choice.text
    both = client.completions.create(max_tokens=3, **{**asked, "prompt": [asked["prompt"], "One, two, three,"]})
    assert [each.index for each in both.choices] == [0, 1]
    assert both.choices[0].text == choice.text
    assert both.choices[1].text.startswith(" four")


def test_logprobs_of_a_chat(client: openai.OpenAI) -> None:
    choice = ask(client, logprobs=True, top_logprobs=4).choices[0]
    entries = choice.logprobs.content
    assert "".join(entry.token for entry in entries) == choice.message.content
    for entry in entries:
        assert bytes(entry.bytes) == entry.token.encode()
        values = [top.logprob for top in entry.top_logprobs]
        assert values == sorted(values, reverse=True)
        assert entry.logprob == values[0] <= 0
        assert entry.token == entry.top_logprobs[0].token
        assert sum(math.exp(value) for value in values) <= 1


def test_a_stop_string_ends_before_itself(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "Count from one to ten in digits, with commas."}]
    free = ask(client, messages, max_tokens=14).choices[0].message.content
    at = free.index("4")
    for choice in (
        ask(client, messages, stop="4").choices[0],
        ask(client, messages, stop=["nothing", free[at - 1 : at + 1]]).choices[0],
    ):
        assert choice.finish_reason == "stop"
        assert free.startswith(choice.message.content)
        assert len(choice.message.content) in (at, at - 1)


def test_choices_have_seeds_that_give_them_again(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "Invent a name for a boat."}]
    sampled = {"temperature": 1.2, "max_tokens": 8}
    several = ask(client, messages, n=3, seed=0, **sampled)
    texts = [choice.message.content for choice in several.choices]
    assert len(set(texts)) == 3
    assert [ask(client, messages, seed=i, **sampled).choices[0].message.content for i in range(3)] == texts


class Person(BaseModel):
    name: str
    age: int
    job: Literal["baker", "pilot", "nurse"]


def test_an_answer_of_a_schema_is_parsed_by_the_client(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "Tom is a pilot, 40 years old. Describe Tom as JSON."}]
    reply = client.chat.completions.parse(
        model="smollm2", messages=messages, temperature=0, max_tokens=50, response_format=Person
    )
    assert reply.choices[0].finish_reason == "stop"
    assert reply.choices[0].message.parsed == Person(name="Tom", age=40, job="pilot")


@pytest.mark.parametrize(
    ("more", "param", "words"),
    [
        ({"tools": [TOOL]}, "tools", "does not tell it to write calls"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tools", "does not tell it to write calls"),
        ({"reasoning_effort": "low"}, "reasoning_effort", "no thinking"),
        ({"extra_body": {"thinking_budget": 64}}, "thinking_budget", "no thinking"),
        ({"messages": [{"role": "user", "content": "word " * 200}]}, "messages", "the context holds 160"),
    ],
)
def test_what_this_model_cannot_do_is_refused_by_name(
    client: openai.OpenAI, more: dict[str, Any], param: str, words: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=words) as refused:
        ask(client, **more)
    assert refused.value.param == param


def test_sixteen_unequal_prompts_at_once_say_what_each_says_alone(client: openai.OpenAI) -> None:
    things = ["a dog", "rain", "the sea at night", "gold", "bread", "a train", "snow", "tea", "Mars", "an owl", "salt"]
    things += ["a long walk along the old canal in spring", "paper", "glass and how it is made", "a clock", "wool"]
    prompts = [[{"role": "user", "content": f"Say something about {thing}."}] for thing in things]

    def one(messages: Any) -> str:
        return ask(client, messages, max_tokens=6).choices[0].message.content

    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(one, prompts))
    assert together == [one(messages) for messages in prompts]
    assert len(set(together)) > 12
