"""Texts to vectors: what a body asks, and its texts on their way through the worker."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bytefloor.engine.request import Delta, EmbeddingRequest
from bytefloor.errors import RequestError
from bytefloor.server.asked import plain_prompts
from bytefloor.server.bodies import EmbeddingBody
from bytefloor.server.mailbox import Mailbox
from bytefloor.server.refusal import Refusal, bad_field
from bytefloor.server.served import Served
from bytefloor.server.worker import Handle, Mail, Unavailable, Worker

MAX_INPUTS = 2048
"""OpenAI's own limit, which clients that cut long lists for it rely on."""
AHEAD = 2
"""Texts of one body that the engine has at a time, for each sequence it runs: whoever asks next waits for no more."""
LABEL = {"pooling": "mean", "layer": "last, after the final norm", "is_normalized": True}
"""What the vectors are, in answers and in /props."""


@dataclass(frozen=True)
class AskedEmbeddings:
    """A body, understood. is_base64: vectors come as the bytes of their float32 numbers, little-endian, in base64."""

    requests: tuple[EmbeddingRequest, ...]
    is_base64: bool

    @property
    def n_tokens(self) -> int:
        return sum(len(request.prompt_ids) for request in self.requests)


def n_dimensions(served: Served) -> int:
    """Numbers of a vector: the model's width."""
    width = served.engine.executor.step.hidden.shape[-1]
    assert isinstance(width, int)
    return width


def ask_embeddings(body: EmbeddingBody, served: Served) -> AskedEmbeddings:
    """What /v1/embeddings is asked: texts as the tokenizer has them, without a template. Refusal 400 with the field."""
    served.check_name(body.model)
    if body.encoding_format not in (None, "float", "base64"):
        message = f"encoding_format = {body.encoding_format!r}: expected 'float' or 'base64'"
        raise bad_field("encoding_format", message)
    width = n_dimensions(served)
    if body.dimensions not in (None, width):
        message = f"dimensions = {body.dimensions}: expected {width} or nothing, the model's own size"
        raise bad_field("dimensions", message)
    requests = []
    for at, prompt in plain_prompts(body.input, served, "input", MAX_INPUTS):
        request = EmbeddingRequest(tuple(prompt.ids))
        try:
            served.engine.check(request)
        except RequestError as error:
            is_long = len(prompt.ids) > served.engine.capacity
            raise bad_field(at, f"{at}: {error}", "context_length_exceeded" if is_long else None) from None
        requests.append(request)
    return AskedEmbeddings(tuple(requests), body.encoding_format == "base64")


class Embedding:
    """Hands texts to the worker, a few at a time, and gathers their vectors; whoever makes one closes it."""

    def __init__(self, worker: Worker, asked: AskedEmbeddings, n_sequences: int, timeout_s: float) -> None:
        self.n_ahead = min(AHEAD * n_sequences, len(asked.requests))
        self._worker = worker
        self._requests = asked.requests
        self._n_tokens = asked.n_tokens
        self._timeout_s = timeout_s
        self._began = time.perf_counter()
        self._found: dict[int, tuple[float, ...]] = {}
        self._handles: set[Handle] = set()

    async def vectors(self) -> list[tuple[float, ...]]:
        """Of all texts, in their order. Refusal where one ends in an error, is cut short, or the time is over."""
        places = iter(range(len(self._requests)))
        try:
            # As many at a time as there are lanes. One after another they would come to the engine a step apart.
            async with asyncio.timeout(self._timeout_s), asyncio.TaskGroup() as lanes:
                for _ in range(self.n_ahead):
                    lanes.create_task(self._lane(places))
        except TimeoutError:
            message = f"the request took longer than {self._timeout_s:g} s, this server's limit (--timeout)"
            raise Refusal(504, message, code="timeout") from None
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        return [self._found[place] for place in range(len(self._requests))]

    async def _lane(self, places: Iterator[int]) -> None:
        """Texts that nobody else has taken, one after another."""
        for place in places:
            mailbox: Mail = Mailbox()
            try:
                handle = await self._worker.submit(self._requests[place], mailbox)
            except Unavailable as error:
                raise Refusal(503, str(error), code="unavailable") from None
            self._handles.add(handle)
            ((_, delta),) = await mailbox.take()
            self._found[place] = _vector(delta)
            self._handles.remove(handle)

    @property
    def facts(self) -> dict[str, Any]:
        """For the log."""
        embedding_ms = round(1e3 * (time.perf_counter() - self._began), 3)
        return {"texts": len(self._requests), "prompt": self._n_tokens, "embedding_ms": embedding_ms}

    def close(self) -> None:
        """Cancel what has not ended."""
        for handle in self._handles:
            if handle.finish is None:
                self._worker.cancel(handle)


def _vector(delta: Delta) -> tuple[float, ...]:
    """A text has one delta, its last."""
    assert delta.finish is not None
    if delta.embedding is not None:
        return delta.embedding
    if delta.finish.reason == "cancelled":
        raise Refusal(503, "the server is stopping: the text was not read to its end", code="unavailable")
    raise Refusal(500, delta.finish.detail, code="engine_error")


def embeddings_answer(asked: AskedEmbeddings, vectors: Sequence[Sequence[float]], model: str) -> dict[str, Any]:
    """OpenAI's list of vectors, with what they are beside it."""
    # Rounded in both forms, so that they are the same numbers.
    arrays = [np.asarray(vector, "<f4") for vector in vectors]
    shown = [base64.b64encode(array.tobytes()).decode() if asked.is_base64 else array.tolist() for array in arrays]
    data = [{"object": "embedding", "index": place, "embedding": value} for place, value in enumerate(shown)]
    usage = {"prompt_tokens": asked.n_tokens, "total_tokens": asked.n_tokens}
    return {"object": "list", "data": data, "model": model, "usage": usage, **LABEL}
