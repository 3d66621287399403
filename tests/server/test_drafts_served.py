"""Several tokens a step, over HTTP: the answers without drafts, and what became of drafts in numbers."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from bytefloor.engine.loading import Opened
from bytefloor.engine.speculation import Speculation
from drafted import Always
from server.live import Live, Scripted, live, scripted

TEXT = "one two three one two three one two three one two three, and done"


@pytest.fixture(scope="module")
def running(opened: Opened) -> Iterator[tuple[Live, Scripted, Opened]]:
    served, executor = scripted(opened)
    with live(served) as server:
        yield server, executor, served


def metric(server: Live, name: str) -> float:
    lines = server.http.get("/metrics").text.splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(f"bytefloor_{name}_total "))


@pytest.mark.parametrize("asked", [{}, {"stop": ["o three,"]}, {"max_tokens": 33}, {"n": 2}, {"logprobs": True}])
def test_an_answer_is_the_one_without_drafts(running: tuple[Live, Scripted, Opened], asked: dict) -> None:
    server, executor, opened = running
    executor.say(TEXT, server.n_prompt())
    replies = []
    for speculation in (Speculation(1), Always(16)):
        opened.engine._speculation = speculation
        counts = metric(server, "draft_tokens"), metric(server, "draft_tokens_accepted")
        before = len(executor.batches)
        reply = server.chat(**asked).json()
        n_steps = len(executor.batches) - before
        timings = reply["timings"]
        assert ("draft_n" in timings) == ("draft_n_accepted" in timings) == speculation.is_on
        if speculation.is_on:
            assert 5 < timings["draft_n_accepted"] <= timings["draft_n"]
            assert metric(server, "draft_tokens") == counts[0] + timings["draft_n"]
            assert metric(server, "draft_tokens_accepted") == counts[1] + timings["draft_n_accepted"]
            assert n_steps < timings["predicted_n"]
        replies.append((reply["choices"], reply["usage"]["completion_tokens"], timings["predicted_n"]))
    assert replies[0] == replies[1]


def test_a_stream_has_a_chunk_for_each_token_of_a_step(running: tuple[Live, Scripted, Opened]) -> None:
    server, executor, opened = running
    executor.say(TEXT, server.n_prompt())
    texts, counts = [], []
    for speculation in (Speculation(1), Always(16)):
        opened.engine._speculation = speculation
        lines = server.chat(stream=True).text.split("\n\n")
        chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        texts.append([chunk["choices"][0]["delta"].get("content") for chunk in chunks])
        counts.append(chunks[-1]["timings"].get("draft_n", 0))
    assert texts[0] == texts[1]
    assert "".join(filter(None, texts[0])) == TEXT
    assert counts[0] == 0 < counts[1]
