"""S04, S06, S07, S17: cases of the cache, over HTTP, on a model with sliding and global layers."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from bytefloor.engine.batch import Batch
from bytefloor.engine.cache import CachePlan
from bytefloor.engine.engine import Engine
from bytefloor.engine.loading import Opened
from bytefloor.engine.reference import ReferenceExecutor
from server.live import Live, live
from tiny_variants import WINDOW


def with_plan(opened: Opened, **plan: int) -> Opened:
    """The model on a cache of its own, filled with NaN."""
    settings = {"capacity": 128, "chunk": 16, "n_sequences": 1, "page_size": 4} | plan
    executor = ReferenceExecutor(opened.engine.executor.step, CachePlan(**settings))
    executor.poison()
    return replace(opened, engine=Engine(executor, opened.tokenizer, opened.engine.vocabulary_size))


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each step that the executor is given."""
    rows: list[int] = []
    real = ReferenceExecutor.run

    def run(self: ReferenceExecutor, batch: Batch) -> Any:
        rows.append(len(batch.tokens))
        return real(self, batch)

    monkeypatch.setattr(ReferenceExecutor, "run", run)
    return rows


def said(server: Live, ids: list[int], **body: Any) -> dict[str, Any]:
    reply = server.post("/v1/completions", prompt=ids, **{"temperature": 0, "max_tokens": 8, **body})
    assert reply.status_code == 200, reply.text
    return reply.json()


def numbers(n: int, seed: int) -> list[int]:
    """Ordinary tokens of the tiny vocabulary."""
    return [4 + (seed * 37 + i * i * 11 + i) % 256 for i in range(n)]


@pytest.mark.parametrize("n_shared", [WINDOW // 2, WINDOW, 2 * WINDOW, 3 * WINDOW - 1])
def test_a_prompt_that_parts_from_an_earlier_one_is_answered_as_if_alone(
    opened: Opened, computed: list[int], n_shared: int
) -> None:
    """S04: the window has moved on; what is not there any more is computed again, and told as such."""
    first = numbers(3 * WINDOW, seed=1)
    second = first[:n_shared] + numbers(3 * WINDOW - n_shared, seed=2)
    with live(with_plan(opened)) as cold:
        wanted = said(cold, second)
    with live(with_plan(opened)) as warm:
        said(warm, first)
        computed.clear()
        found = said(warm, second)
        assert found["choices"] == wanted["choices"]
        usage, timings = found["usage"], found["timings"]
        n_cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert n_cached <= n_shared
        assert sum(computed) == timings["prompt_n"] + usage["completion_tokens"] - 1
        assert timings["prompt_n"] + n_cached == usage["prompt_tokens"] == len(second)
        # The same once more is there but for its last token.
        computed.clear()
        again = said(warm, second)
        assert again["choices"] == wanted["choices"]
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == len(second) - 1
        assert computed[0] == 1


@pytest.fixture
def crowd(opened: Opened) -> Iterator[Live]:
    with live(with_plan(opened, n_sequences=16, chunk=24)) as running:
        yield running


def test_prompts_of_every_length_beside_each_other(crowd: Live) -> None:
    """S06: shorter than the window, around it, several times as long; greedy text as one at a time."""
    lengths = [1, 2, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW, 3 * WINDOW + 1, 40, 41, 60, 77, 90, 5, 33, 17, 100]
    prompts = [numbers(length, seed=i) for i, length in enumerate(lengths)]
    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(lambda ids: said(crowd, ids)["choices"], prompts))
    assert together == [said(crowd, ids)["choices"] for ids in prompts]


def test_no_token_of_one_answer_is_in_another(crowd: Live) -> None:
    """S07: each of sixteen is held to a letter of its own."""
    letters = "abcdefghijklmnop"

    def one(letter: str) -> str:
        (id,) = crowd.post("/tokenize", content=letter).json()["tokens"]
        reply = said(crowd, numbers(3 + 5 * ord(letter) % 40, seed=id), logit_bias={str(id): 100}, max_tokens=20)
        return reply["choices"][0]["text"]

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(one, letters)) == [20 * letter for letter in letters]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_pool_for_two_serves_six(opened: Opened, is_streamed: bool) -> None:
    """S17: pages run out in the middle of answers; all six come, each as if alone."""
    prompts = [numbers(20 + 3 * i, seed=i) for i in range(6)]
    asked = {"max_tokens": 30, "logit_bias": {"1": -100}}
    with live(with_plan(opened, capacity=72, positions=120, n_sequences=6)) as server:

        def one(ids: list[int]) -> str:
            if not is_streamed:
                return said(server, ids, **asked)["choices"][0]["text"]
            stream = server.openai.completions.create(
                model="tiny",
                prompt=ids,
                temperature=0,
                stream=True,
                **asked,  # type: ignore[call-overload]
            )
            return "".join(chunk.choices[0].text for chunk in stream)

        with ThreadPoolExecutor(6) as pool:
            together = list(pool.map(one, prompts))
        assert server.service.worker.load.n_preempted > 0
        assert server.http.get("/health").status_code == 200
        assert together == [one(ids) for ids in prompts]
