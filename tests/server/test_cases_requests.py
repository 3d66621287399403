"""P08, P10, V01, V03, V04, V07, V09, V11: cases of single requests, over HTTP."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import jsonschema
import numpy as np
import pytest

from bytefloor.engine.loading import Opened
from server.live import SHORT, Live, Scripted, live, scripted

Stage = tuple[Live, Scripted]
USER = {"role": "user", "content": "hello"}


# --- seeds


def said(server: Live, text: str, **body: Any) -> str:
    reply = server.post("/v1/completions", prompt=text, **{"max_tokens": 16, "temperature": 1.5, **body})
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]["text"]


def test_a_seed_gives_the_same_text_alone_and_in_any_company(server: Live) -> None:
    """P08: 0 is a seed; mates without one, greedy ones and ones with the same seed change nothing."""
    seeded = [("one", 0), ("one", 0), ("two", 0), ("one", 1), ("three", 2**64 - 1)]
    alone = [said(server, text, seed=seed) for text, seed in seeded]
    assert alone[0] == alone[1]
    assert len(set(alone)) == 4
    mates: list[dict[str, Any]] = [{}, {"temperature": 0}, {"temperature": 0.3}, {"top_k": 1}, {}]
    with ThreadPoolExecutor(10) as pool:
        others = [pool.submit(said, server, "mate", **mate) for mate in mates]
        together = list(pool.map(lambda each: said(server, each[0], seed=each[1]), seeded))
    assert together == alone
    assert all(isinstance(other.result(), str) for other in others)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_the_seed_that_is_told_gives_the_answer_again(server: Live, is_streamed: bool) -> None:
    """P08: where the client gave none, a new one each time."""
    texts, seeds = [], []
    for _ in range(3):
        if is_streamed:
            stream = server.openai.completions.create(
                model="tiny", prompt="again", max_tokens=16, temperature=1.5, stream=True
            )
            chunks = list(stream)
            texts.append("".join(chunk.choices[0].text for chunk in chunks))
            seeds.append(chunks[-1].model_extra["timings"]["seed"])  # type: ignore[index]
        else:
            reply = server.post("/v1/completions", prompt="again", max_tokens=16, temperature=1.5).json()
            texts.append(reply["choices"][0]["text"])
            seeds.append(reply["timings"]["seed"])
    assert len(set(seeds)) == len(set(texts)) == 3
    assert [said(server, "again", seed=seed) for seed in seeds] == texts


# --- log-probabilities


def own_logprobs(opened: Opened, ids: list[int]) -> np.ndarray:
    """[V]: the model's own for the token behind `ids`, in float64."""
    from bytefloor.engine.cache import CachePlan
    from bytefloor.engine.reference import ReferenceExecutor
    from bytefloor.engine.score import score_chunks

    executor = ReferenceExecutor(opened.engine.executor.step, CachePlan(128, 64))
    executor.poison()
    logits = np.concatenate([rows.double().numpy() for rows in score_chunks(executor, ids, 64)])[-1]
    shifted = logits - logits.max()
    return shifted - math.log(np.exp(shifted).sum())


@pytest.mark.parametrize(
    "sampling",
    [{"temperature": 0}, {"temperature": 0.7, "seed": 3}, {"temperature": 0.7, "top_p": 0.1, "seed": 3}],
    ids=["greedy", "sampled", "cut"],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_logprobs_are_the_models_own(server: Live, opened: Opened, path: str, sampling: dict[str, Any]) -> None:
    """P10: a log-softmax of the raw logits, whatever the token was drawn with; sorted, never above 0."""
    if path.endswith("chat/completions"):
        asked: dict[str, Any] = {"messages": [USER], "logprobs": True, "top_logprobs": 5}
        prompt = server.post("/apply-template", messages=[USER]).json()["prompt"]
    else:
        prompt, asked = "once upon", {"prompt": "once upon", "logprobs": 5}
    ids = server.post("/tokenize", content=prompt, add_special=True).json()["tokens"]
    found = server.post(path, max_tokens=4, **asked, **sampling).json()["choices"][0]["logprobs"]
    if path.endswith("chat/completions"):
        told = [(each["logprob"], [top["logprob"] for top in each["top_logprobs"]]) for each in found["content"]]
    else:
        tops = [list(top.values()) for top in found["top_logprobs"]]
        told = list(zip(found["token_logprobs"], tops, strict=True))
    wanted = own_logprobs(opened, ids)
    best = np.sort(wanted)[::-1][:5]
    assert told[0][1] == pytest.approx(best, abs=1e-4)
    assert min(abs(wanted - told[0][0])) < 1e-4
    for logprob, top in told:
        assert len(top) == 5
        assert top == sorted(top, reverse=True)
        assert logprob <= top[0] <= 0
        assert sum(math.exp(each) for each in top) <= 1 + 1e-9
        if sampling["temperature"] == 0:
            assert logprob == top[0]


def test_logprobs_after_sampling_are_there_where_they_are_asked_for(server: Live) -> None:
    """P10: those that the token was drawn with, and only what was left to draw from."""
    asked = {"messages": [USER], "logprobs": True, "top_logprobs": 5, "max_tokens": 6, "temperature": 0.7, "seed": 3}
    reply = server.post("/v1/chat/completions", top_k=2, logprobs_after=True, **asked).json()
    for each in reply["choices"][0]["logprobs"]["content"]:
        top = [entry["logprob"] for entry in each["top_logprobs"]]
        assert len(top) == 2
        assert sum(math.exp(value) for value in top) == pytest.approx(1)
        assert each["logprob"] in top
    greedy = server.post("/v1/chat/completions", logprobs_after=True, **{**asked, "temperature": 0}).json()
    assert [each["logprob"] for each in greedy["choices"][0]["logprobs"]["content"]] == [0.0] * 6


# --- stops


@pytest.fixture
def speaker(opened: Opened) -> Iterator[Stage]:
    engine, executor = scripted(opened)
    with live(engine) as running:
        yield running, executor


@pytest.mark.parametrize(
    ("script", "stop", "content"),
    [
        # "the" with its space is one token of this vocabulary.
        ("say the word", "he", "say t"),
        ("say the word", " t", "say"),
        ("aaaab", "aab", "aa"),
        ("one two", ["two", "ne tw"], "o"),
        ("one two", "two", "one "),
        ("naïve 🙂", "🙂", "naïve "),
        ("one two", "two!", "one two"),
    ],
)
def test_a_stop_is_found_wherever_tokens_end(speaker: Stage, script: str, stop: str | list[str], content: str) -> None:
    """V01: inside one token, over several, at the very end; streamed as not streamed."""
    running, executor = speaker
    executor.say(script, running.n_prompt())
    choice = running.chat(temperature=0, stop=stop).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (content, "stop")
    asked: dict[str, Any] = {"model": "tiny", "messages": [USER], "temperature": 0, "stop": stop}
    chunks = list(running.openai.chat.completions.create(stream=True, **asked))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == content
    assert chunks[-1].choices[0].finish_reason == "stop"


# --- lengths


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(("n", "status"), [(127, 200), (128, 400), (129, 400), (384, 400)])
def test_prompts_around_the_context(server: Live, n: int, status: int, is_streamed: bool) -> None:
    """V03, V04: with room for one token there is one; one more is an error with both numbers, streamed or not."""
    reply = server.post("/v1/completions", prompt=[40] * n, max_tokens=20, temperature=0, stream=is_streamed)
    assert reply.status_code == status
    if status == 200:
        assert '"finish_reason":"length"' in reply.text
        if not is_streamed:
            assert reply.json()["usage"]["prompt_tokens"] == n
            assert reply.json()["usage"]["completion_tokens"] == 1
        return
    error = reply.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert f"{n} tokens" in error["message"]
    assert "holds 128" in error["message"]


def test_an_answer_that_fills_the_context_ends_there(server: Live) -> None:
    """V03: no shifting; the reason is length and the detail says which."""
    reply = server.post("/v1/completions", prompt=[40] * 100, max_tokens=500, seed=1, logit_bias={"1": -100})
    choice = reply.json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["finish_detail"] == "context of 128 is full"
    assert reply.json()["usage"]["total_tokens"] == 128
    assert server.http.get("/props").json()["context"] == 128


# --- usage in streams


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("n", [1, 3])
def test_the_last_chunk_alone_has_the_usage(server: Live, path: str, n: int) -> None:
    """V07: no choices in it, null in all before; without the option nowhere a word of it."""
    prompt = {"messages": [USER]} if "chat" in path else {"prompt": "hello"}
    asked = {**prompt, "max_tokens": 5, "n": n, "seed": 2, "logit_bias": {"1": -100}, "stream": True}

    def chunks(**more: Any) -> list[dict[str, Any]]:
        lines = [line[6:] for line in server.post(path, **asked, **more).text.split("\n\n") if line.startswith("data")]
        assert lines.pop() == "[DONE]"
        return [json.loads(line) for line in lines]

    *before, last = chunks(stream_options={"include_usage": True})
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 5 * n
    assert [chunk["usage"] for chunk in before] == [None] * len(before)
    assert all(len(chunk["choices"]) == 1 for chunk in before)
    for more in ({}, {"stream_options": {"include_usage": False}}):
        assert not any("usage" in chunk for chunk in chunks(**more))


# --- schemas


def form(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "reply", "schema": schema}}


@pytest.mark.parametrize(
    ("schema", "path", "keyword"),
    [
        ({"type": "object", "properties": {"a": {"not": {}}}, "required": ["a"]}, "#/properties/a", "not"),
        ({"type": "object", "properties": {"a": {"$ref": "#/$defs/none"}}}, "#/properties/a", "$ref"),
        ({"type": "array", "items": {"type": "string", "pattern": "("}}, "#/items", "pattern"),
        ({"type": "object", "properties": {"a": {"type": "strin"}}}, "#/properties/a", "type"),
        ({"type": "array", "uniqueItems": True}, "#", "uniqueItems"),
        ({"type": "string", "minLength": 5, "maxLength": 2}, "#", "Length"),
        ({"type": "object", "patternProperties": {"(": {}}}, "#", "patternProperties"),
        ({"enum": []}, "#", "enum"),
        ({"type": "integer", "frobnicate": 1}, "#", "frobnicate"),
        (False, "#", "false"),
    ],
)
@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_schema_that_cannot_be_held_to_is_never_a_200(
    server: Live, schema: Any, path: str, keyword: str, is_streamed: bool
) -> None:
    """V09: the place inside the schema, and what is wrong there."""
    reply = server.chat(response_format=form(schema), stream=is_streamed, max_tokens=5)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["param"] == "response_format.json_schema.schema"
    assert f"{path}:" in error["message"] or f"{path}/" in error["message"], error["message"]
    assert keyword in error["message"]


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "minLength": 3, "maxLength": 2000},
        {"$defs": {"way": {"enum": ["left", "right"]}}, "type": "array", "items": {"$ref": "#/$defs/way"},
         "maxItems": 3},
        {"type": "object", "properties": {"a": {"anyOf": [{"const": 1}, {"type": "null"}]}}, "required": ["a"],
         "additionalProperties": False},
        {"type": "string", "pattern": "^[a-f]{4}$"},
        {"type": "integer", "minimum": -3, "maximum": 17},
    ],
    ids=["a long string", "an enum behind a reference", "either", "a pattern", "a range"],
)  # fmt: skip
def test_a_schema_that_can_be_held_to_is(server: Live, schema: dict[str, Any]) -> None:
    """V09: by random weights, which know nothing of JSON; what ends by itself is valid."""
    # A quotation mark is made likely, or a string would go on to its two thousandth letter.
    (mark,) = server.post("/tokenize", content='"').json()["tokens"]
    n_whole = 0
    for seed in range(6):
        asked = {"temperature": 2, "seed": seed, "max_tokens": 100, "logit_bias": {str(mark): 4}}
        choice = server.chat("x", response_format=form(schema), **asked).json()["choices"][0]
        if choice["finish_reason"] == "stop":
            n_whole += 1
            jsonschema.validate(json.loads(choice["message"]["content"]), schema)
    assert n_whole > 0


# --- errors


def test_every_error_has_its_status_and_its_shape(opened: Opened) -> None:
    """V11: from every layer, the status of the answer is that of the error, and a word of its kind is in it."""
    engine, executor = scripted(opened)
    options = replace(SHORT, api_key="key", max_body_bytes=500)
    key = {"authorization": "Bearer key"}
    with live(engine, options) as running:
        http = running.http
        json_type = {**key, "content-type": "application/json"}
        chat = "/v1/chat/completions"
        asked = {"messages": [USER]}
        found = {
            401: [http.post(chat, json=asked), http.get("/v1/models", headers={"authorization": "Bearer no"})],
            404: [http.get("/v1/none", headers=key), http.post(chat, json={**asked, "model": "no"}, headers=key)],
            405: [http.get(chat, headers=key), http.delete("/v1/models", headers=key)],
            413: [http.post(chat, json={"messages": [{**USER, "content": "x" * 600}]}, headers=key)],
            415: [http.post(chat, content=b"{}", headers={**key, "content-type": "text/plain"})],
            400: [http.post(chat, content=b"{", headers=json_type), http.post(chat, json={"x": 1}, headers=key)],
        }
        executor.failure = RuntimeError("oops")
        found[500] = [http.post(chat, json=asked, headers=key)]
    kinds = {401: "authentication_error", 404: "not_found_error", 500: "server_error"}
    for status, replies in found.items():
        for reply in replies:
            assert reply.status_code == status, reply.text
            assert reply.headers["content-type"] == "application/json"
            error = reply.json()["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert error["type"] == kinds.get(status, "invalid_request_error")
            assert error["message"]
