"""The thread that owns the engine, without HTTP around it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest

from bytefloor.engine.loading import Opened
from bytefloor.engine.request import Delta, Request
from bytefloor.errors import RequestError
from bytefloor.server.worker import Handle, Unavailable, Worker
from server.live import Scripted, scripted

PROMPT = tuple(range(2, 12))


@asynccontextmanager
async def working(opened: Opened, **plan: int) -> AsyncIterator[tuple[Worker, Scripted]]:
    engine, executor = scripted(opened, **plan)
    worker = Worker(engine.engine)
    worker.start()
    try:
        yield worker, executor
    finally:
        executor.gate.set()
        await worker.stop()
        assert worker.n_open == 0
        assert not worker._thread.is_alive()


async def to_the_end(handle: Handle) -> list[Delta]:
    deltas: list[Delta] = []
    while not deltas or deltas[-1].finish is None:
        found = await handle.mailbox.take(10)
        assert {each for each, _ in found} == {handle}
        deltas += [delta for _, delta in found]
    return deltas


def on_a_loop(test: Callable[[Opened], Coroutine[Any, Any, None]]) -> Callable[[Opened], None]:
    def run(opened: Opened) -> None:
        asyncio.run(test(opened))

    run.__name__ = test.__name__
    return run


@on_a_loop
async def test_deltas_arrive_in_order_while_the_loop_does_other_things(opened: Opened) -> None:
    async with working(opened) as (worker, executor):
        executor.say("abcdef", len(PROMPT))
        handle = await worker.submit(Request(PROMPT))
        # Nobody reads yet, and nobody is waited for.
        await worker.drain(10)
        assert len(handle.mailbox) == 7
        deltas = await to_the_end(handle)
        assert "".join(delta.text for delta in deltas) == "abcdef"
        assert handle.finish is not None
        assert handle.finish.n_generated == 7


@on_a_loop
async def test_what_the_engine_refuses_is_raised_where_it_was_asked(opened: Opened) -> None:
    async with working(opened) as (worker, _):
        with pytest.raises(RequestError, match="the prompt is empty"):
            await worker.submit(Request(()))
        with pytest.raises(RequestError, match="a stop string is empty"):
            await worker.submit(Request(PROMPT, stops=("",)))
        assert worker.n_open == 0


@on_a_loop
async def test_whoever_gives_up_before_the_engine_has_taken_it_leaves_nothing(opened: Opened) -> None:
    async with working(opened) as (worker, executor):
        executor.gate.clear()
        first = await worker.submit(Request(PROMPT, max_tokens=2))
        await asyncio.to_thread(executor.is_inside.wait, 10)
        good = asyncio.ensure_future(worker.submit(Request(PROMPT[:5])))
        refused = asyncio.ensure_future(worker.submit(Request(())))
        await asyncio.sleep(0)
        assert worker.n_open == 3
        good.cancel()
        refused.cancel()
        await asyncio.gather(good, refused, return_exceptions=True)
        executor.gate.set()
        await worker.drain(10)
        assert (await to_the_end(first))[-1].finish is not None
        assert len(executor.batches) == 2


@on_a_loop
async def test_cancelling_keeps_what_was_made_and_ends_once(opened: Opened) -> None:
    async with working(opened) as (worker, executor):
        executor.pause_s = 0.005
        handle = await worker.submit(Request(PROMPT))
        while len(handle.mailbox) < 5:
            await asyncio.sleep(0.001)
        worker.cancel(handle)
        worker.cancel(handle)
        deltas = await to_the_end(handle)
        worker.cancel(handle)
        await worker.drain(10)
        finish = deltas[-1].finish
        assert finish is not None
        assert finish.reason == "cancelled"
        assert finish.n_generated == len(deltas) - 1 >= 5
        assert not len(handle.mailbox)


@on_a_loop
async def test_stopping_ends_what_runs_and_what_waits(opened: Opened) -> None:
    async with working(opened, n_sequences=1) as (worker, executor):
        executor.pause_s = 0.005
        handles = [await worker.submit(Request(PROMPT)) for _ in range(3)]
        await worker.stop()
        for handle in handles:
            finish = (await to_the_end(handle))[-1].finish
            assert finish is not None
            assert finish.reason == "cancelled"
        with pytest.raises(Unavailable, match="stopping"):
            await worker.submit(Request(PROMPT))


@on_a_loop
async def test_a_failed_step_says_how_many_tokens_there_were(opened: Opened) -> None:
    async with working(opened) as (worker, executor):
        executor.pause_s = 0.005
        handle = await worker.submit(Request(PROMPT))
        while len(handle.mailbox) < 3:
            await asyncio.sleep(0.001)
        executor.failure = MemoryError("no room")
        finish = (await to_the_end(handle))[-1].finish
        assert finish is not None
        assert (finish.reason, finish.detail) == ("error", "a step of the engine failed: MemoryError: no room")
        assert finish.n_generated == handle.n_generated >= 3
        assert worker.broken is None
