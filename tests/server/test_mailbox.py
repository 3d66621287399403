"""What waits for a token."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

from bytefloor.server.mailbox import Mailbox


def on_a_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def run() -> None:
        asyncio.run(test())

    run.__name__ = test.__name__
    return run


@on_a_loop
async def test_all_that_has_come_is_given_in_order_and_once() -> None:
    box = Mailbox[int]()
    box.put(1)
    box.put(2)
    assert len(box) == 2
    assert await box.take() == [1, 2]
    waiting = asyncio.ensure_future(box.take())
    await asyncio.sleep(0)
    box.put(3)
    box.put(4)
    assert await waiting == [3, 4]
    assert len(box) == 0


@on_a_loop
async def test_patience_counts_from_the_last_time_that_somebody_began_to_wait() -> None:
    box = Mailbox[int]()
    loop = asyncio.get_running_loop()
    loop.call_later(0.1, box.put, 1)
    assert await box.take(0.15) == [1]
    began = time.perf_counter()
    assert await box.take(0.15) == []
    assert time.perf_counter() - began + 1e-3 >= 0.15
    box.close()


@on_a_loop
async def test_less_patience_than_before_is_less() -> None:
    box = Mailbox[int]()
    asyncio.get_running_loop().call_later(0.01, box.put, 1)
    assert await box.take(60) == [1]
    assert await asyncio.wait_for(box.take(0.01), 20) == []
    box.close()


@on_a_loop
async def test_what_comes_is_not_given_to_a_timer_or_to_whoever_has_gone() -> None:
    box = Mailbox[int]()
    trouble: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: trouble.append(context))
    gone = asyncio.ensure_future(box.take(0.02))
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    await asyncio.sleep(0.05)
    box.put(1)
    assert await box.take(0.02) == [1]
    assert trouble == []
    box.close()


@on_a_loop
async def test_many_items_take_one_timer_and_closing_takes_it_back() -> None:
    box = Mailbox[int]()
    loop = asyncio.get_running_loop()
    set_at: list[float] = []
    real = loop.call_at

    def noted(when: float, *rest: Any, **more: Any) -> asyncio.TimerHandle:
        set_at.append(when)
        handles.append(real(when, *rest, **more))
        return handles[-1]

    handles: list[asyncio.TimerHandle] = []
    loop.call_at = noted  # type: ignore[method-assign]
    for item in range(50):
        loop.call_soon(loop.call_soon, box.put, item)
        assert await box.take(30) == [item]
    assert len(set_at) == 1
    box.close()
    assert handles[0].cancelled()
