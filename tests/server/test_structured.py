"""Answers of a given form over the API: the real client, a model of random weights that only the grammar can hold."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import openai
import pytest

from server.live import Live

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}, "k": {"enum": ["a", "b"]}},
    "required": ["n", "k"],
    "additionalProperties": False,
}
ASKED = [{"role": "user", "content": "answer"}]


def json_schema(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "reply", "strict": True, "schema": schema}}


def ask(server: Live, **more: Any) -> Any:
    return server.openai.chat.completions.create(
        **{"model": "tiny", "messages": ASKED, "max_tokens": 100, "temperature": 2, "seed": 3, **more}
    )


def test_answers_of_a_schema_are_valid_streamed_or_not(server: Live) -> None:
    reasons = set()
    for seed in range(8):
        choice = ask(server, seed=seed, response_format=json_schema(SCHEMA)).choices[0]
        pieces = [
            chunk.choices[0]
            for chunk in ask(server, seed=seed, response_format=json_schema(SCHEMA), stream=True)
            if chunk.choices
        ]
        assert "".join(piece.delta.content or "" for piece in pieces) == choice.message.content
        assert pieces[-1].finish_reason == choice.finish_reason
        reasons.add(choice.finish_reason)
        if choice.finish_reason == "stop":
            jsonschema.validate(json.loads(choice.message.content), SCHEMA)
    assert "stop" in reasons


def test_a_regex_holds_for_each_of_several_at_once(server: Live) -> None:
    def one(seed: int) -> str:
        return ask(server, seed=seed, extra_body={"regex": "[a-c]{2,5}-[0-9]{3}"}).choices[0].message.content

    alone = [one(seed) for seed in range(5)]
    with ThreadPoolExecutor(5) as pool:
        together = list(pool.map(one, range(5)))
    assert together == alone
    assert all(re.fullmatch("[a-c]{2,5}-[0-9]{3}", text) for text in alone)


@pytest.mark.parametrize("grammar", ['root ::= "yes" | "no"', 'start: "yes" | "no"'])
def test_a_grammar_of_either_notation_holds(server: Live, grammar: str) -> None:
    said = {ask(server, seed=seed, extra_body={"grammar": grammar}).choices[0].message.content for seed in range(4)}
    assert said <= {"yes", "no"}


def test_text_after_a_plain_prompt_is_held_too(server: Live) -> None:
    reply = server.openai.completions.create(
        model="tiny", prompt="count:", max_tokens=40, extra_body={"regex": "[0-9]{4}"}
    )
    assert re.fullmatch("[0-9]{4}", reply.choices[0].text)


def test_what_is_cut_says_length(server: Live) -> None:
    choice = ask(server, max_tokens=2, response_format=json_schema(SCHEMA)).choices[0]
    assert choice.finish_reason == "length"
    with pytest.raises(json.JSONDecodeError):
        json.loads(choice.message.content)


@pytest.mark.parametrize(
    ("more", "param", "words"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type", "expected text, json_object or json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "an object with a schema"),
        ({"response_format": {"type": "json_object", "schema": {}}}, "response_format.schema", "not known"),
        (
            {"response_format": json_schema({"type": "object", "properties": {"a": {"type": "strin"}}})},
            "response_format.json_schema.schema",
            "#/properties/a",
        ),
        (
            {"response_format": json_schema({"type": "array", "uniqueItems": True})},
            "response_format.json_schema.schema",
            "uniqueItems",
        ),
        ({"extra_body": {"regex": "("}}, "regex", "regex"),
        ({"extra_body": {"grammar": "root ::= nothing"}}, "grammar", "nothing"),
        ({"extra_body": {"grammar": 7}}, "grammar", "expected text"),
        ({"extra_body": {"grammar": 'start: "a"', "regex": "a"}}, "regex", "given together"),
    ],
)
def test_forms_that_cannot_be_held_to_are_refused_by_name(
    server: Live, more: dict[str, Any], param: str, words: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(server, **more)
    assert caught.value.body["param"] == param  # type: ignore[index]
    assert words in caught.value.body["message"]  # type: ignore[index]
