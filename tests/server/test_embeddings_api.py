"""Embeddings over the API: the real client, and vectors as a mean by hand gives them."""

from __future__ import annotations

import base64
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import openai
import pytest
import torch

from bytefloor.engine.batch import Batch
from bytefloor.engine.cache import SequenceCache, make_pools
from bytefloor.engine.engine import Engine
from bytefloor.engine.loading import Opened
from bytefloor.engine.reference import ReferenceExecutor
from server.live import SHORT, Live, Scripted, eventually, live

PATH = "/v1/embeddings"


def by_hand(opened: Opened, ids: list[int]) -> np.ndarray:
    """The last norm's output of a run of its own, its mean and its length in float64."""
    executor = opened.engine.executor
    assert isinstance(executor, ReferenceExecutor)
    batch, rows = Batch(), []
    cache = SequenceCache(executor.plan, executor.step.kinds, make_pools(executor.plan, executor.step.kinds))
    cache.append_rows(batch, ids, range(len(ids)))
    executor.run(batch, lambda call, result: rows.append(result) if call.op.name == "rms_norm" else None)
    mean = rows[-1].double().numpy().mean(0)
    assert rows[-1].shape[0] == len(ids)
    return mean / np.sqrt((mean**2).sum())


def close(found: Any, expected: np.ndarray) -> None:
    np.testing.assert_allclose(np.asarray(found), expected, rtol=0, atol=1e-6)


def test_the_client_gets_the_mean_of_all_positions(server: Live, opened: Opened) -> None:
    """It asks for base64, and decodes it."""
    texts = ["what is in a name?", "x", "a rose " * 9]
    reply = server.openai.embeddings.create(model="tiny", input=texts)
    ids = [opened.tokenizer.encode(text) for text in texts]
    assert [entry.index for entry in reply.data] == [0, 1, 2]
    for entry, each in zip(reply.data, ids, strict=True):
        close(entry.embedding, by_hand(opened, each))
    assert reply.usage.prompt_tokens == reply.usage.total_tokens == sum(map(len, ids))
    assert reply.model == "tiny"
    assert reply.object == "list"
    assert reply.model_extra == {"pooling": "mean", "layer": "last, after the final norm", "is_normalized": True}


@pytest.mark.parametrize("kind", ["text", "ids", "texts", "lists of ids"])
def test_texts_and_ids_in_both_encodings(server: Live, opened: Opened, kind: str) -> None:
    text = "a name"
    ids = opened.tokenizer.encode(text)
    given = {"text": text, "ids": ids, "texts": [text, text], "lists of ids": [ids, ids]}[kind]
    floats = server.openai.embeddings.create(model="tiny", input=given, encoding_format="float").data
    packed = server.post(PATH, input=given, encoding_format="base64").json()["data"]
    plain = server.post(PATH, input=given).json()["data"]
    assert len(floats) == len(packed) == len(plain) == (1 if kind in ("text", "ids") else 2)
    for entry, other, third in zip(floats, packed, plain, strict=True):
        close(entry.embedding, by_hand(opened, ids))
        bits = np.frombuffer(base64.b64decode(other["embedding"]), "<f4")
        # Beside another text, sums may be taken in another order.
        close(bits, np.asarray(entry.embedding))
        close(third["embedding"], bits)
        assert np.linalg.norm(bits) == pytest.approx(1, abs=1e-6)


def test_dimensions_may_be_the_models_own(server: Live) -> None:
    props = server.http.get("/props").json()["embeddings"]
    reply = server.openai.embeddings.create(model="tiny", input="a", dimensions=props["dimensions"])
    assert len(reply.data[0].embedding) == props["dimensions"]
    assert props["pooling"] == "mean"
    assert props["is_normalized"] is True


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"input": "a", "dimensions": 16}, "dimensions", "dimensions = 16: expected"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "'float' or 'base64'"),
        ({"input": []}, "input", "empty"),
        ({"input": ["a", []]}, "input[1]", "empty"),
        ({"input": ["a", 5]}, "input[1]", "found int"),
        ({"input": [[5, "a"]]}, "input[0]", "a list of token ids"),
        ({"input": [10**6]}, "input[0]", "expected a token id"),
        ({"input": [[3], [10**6]]}, "input[1][0]", "expected a token id"),
        ({"input": ["a", "x" * 200]}, "input[1]", "the context holds 128"),
        ({"input": ["a"] * 2049}, "input", "at most 2048"),
        ({"input": {"a": 1}}, "input", ""),
        ({}, "input", "missing"),
        ({"input": "a", "pooling": "last"}, "pooling", "no such field"),
    ],
)
def test_what_cannot_be_is_refused_by_name(server: Live, body: dict[str, Any], param: str, words: str) -> None:
    reply = server.post(PATH, **body)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["param"] == param
    assert words in error["message"]


def test_another_models_name_is_not_here(server: Live) -> None:
    with pytest.raises(openai.NotFoundError):
        server.openai.embeddings.create(model="text-embedding-3-small", input="a")


def test_more_texts_than_run_at_once_come_in_order(server: Live, opened: Opened) -> None:
    texts = ["y" * (i % 17) + chr(97 + i % 26) for i in range(60)]
    reply = server.openai.embeddings.create(model="tiny", input=texts)
    for text, entry in zip(texts, reply.data, strict=True):
        close(entry.embedding, by_hand(opened, opened.tokenizer.encode(text)))


def test_beside_chats_nothing_changes(server: Live, opened: Opened) -> None:
    """Neither the words of an answer nor a vector."""
    prompts = [f"{i} {'word ' * i}" for i in range(8)]
    asked = {"model": "tiny", "temperature": 0, "max_tokens": 25}

    def chat(text: str) -> Any:
        messages: Any = [{"role": "user", "content": text}]
        return server.openai.chat.completions.create(messages=messages, **asked).choices[0].message.content

    def embed(text: str) -> Any:
        return server.openai.embeddings.create(model="tiny", input=[text, text[::-1]]).data

    alone = [chat(text) for text in prompts]
    with ThreadPoolExecutor(16) as pool:
        chats, vectors = [pool.submit(chat, text) for text in prompts], [pool.submit(embed, text) for text in prompts]
    assert [each.result() for each in chats] == alone
    for text, each in zip(prompts, vectors, strict=True):
        for entry, given in zip(each.result(), (text, text[::-1]), strict=True):
            close(entry.embedding, by_hand(opened, opened.tokenizer.encode(given)))


class Summing(Scripted):
    """Sums of ones, when the gate is open."""

    def sum_hidden(self, batch: Batch) -> torch.Tensor:
        self.run(batch)
        return torch.stack([torch.full((8,), float(n), dtype=torch.float64) for _, n in batch.spans])


@pytest.fixture
def stage(opened: Opened) -> Any:
    plan = replace(opened.engine.executor.plan, n_sequences=2, chunk=16)
    executor = Summing(opened, plan)
    engine = Engine(executor, opened.tokenizer, opened.engine.vocabulary_size)
    with live(replace(opened, engine=engine), replace(SHORT, timeout_s=2.0, max_open=6)) as running:
        yield running, executor
        executor.gate.set()


def all_free(running: Live) -> None:
    eventually(lambda: running.service.worker.n_open == 0, "closed")
    eventually(lambda: {use.n_used for use in running.service.worker.load.pages.values()} == {0}, "freed")


def test_a_step_that_raises_is_a_500_and_leaves_nothing(stage: tuple[Live, Summing]) -> None:
    running, executor = stage
    executor.failure = RuntimeError("oops")
    reply = running.post(PATH, input=["a", "b", "c"])
    assert reply.status_code == 500
    assert "oops" in reply.json()["error"]["message"]
    all_free(running)
    assert running.post(PATH, input="a").json()["data"][0]["embedding"] == pytest.approx([8**-0.5] * 8)


def test_a_client_that_goes_and_a_time_that_is_over_end_the_work(stage: tuple[Live, Summing]) -> None:
    running, executor = stage
    executor.pause_s = 0.1
    with pytest.raises(openai.APITimeoutError):
        running.openai.with_options(timeout=0.5).embeddings.create(model="tiny", input=["a" * 100] * 40)
    all_free(running)
    assert len(executor.batches) < 18
    reply = running.post(PATH, input=["a"] * 100)
    assert reply.status_code == 504
    assert "2 s" in reply.json()["error"]["message"]
    all_free(running)


def test_no_more_wait_than_may(stage: tuple[Live, Summing]) -> None:
    """A long list takes four places, two for each sequence, and gives way to nobody's request."""
    running, executor = stage
    executor.gate.clear()
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(running.post, PATH, input=["a"] * 30)
        eventually(lambda: running.service.worker.n_open == 4, "four are there")
        second = running.post(PATH, input=["a"] * 30)
        assert second.status_code == 429
        third = pool.submit(running.chat, max_tokens=2)
        eventually(lambda: running.service.worker.n_open == 5, "one more")
        executor.gate.set()
    assert third.result().status_code == 200
    assert len(first.result().json()["data"]) == 30
    # The chat waited for the texts that were before it in the queue, not for the whole list.
    at = next(place for place, batch in enumerate(executor.batches) if batch.wanted)
    assert sum(len(batch.spans) for batch in executor.batches[:at]) < 10
