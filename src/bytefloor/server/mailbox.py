"""What a request's reader waits for: all that has come, and not for ever."""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """Items in order, for one reader on the event loop. Whoever has waited with patience closes it.

    A token a millisecond is waited for, and nearly every one comes: so a timer stays when its item has come, and looks
    at the clock when it rings.
    """

    def __init__(self) -> None:
        self._items: list[T] = []
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: T) -> None:
        """On the event loop."""
        self._items.append(item)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self, patience_s: float | None = None) -> list[T]:
        """All that is there; waits for the first, and gives nothing where none came for so long."""
        if not self._items:
            loop = asyncio.get_running_loop()
            if patience_s is not None:
                self._due = loop.time() + patience_s
                if self._timer is None or self._timer.when() > self._due:
                    self._set_timer(loop)
            self._waiter = loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        items, self._items = self._items, []
        return items

    def close(self) -> None:
        """No more is waited for."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set_timer(self, loop: asyncio.AbstractEventLoop) -> None:
        self.close()
        self._timer = loop.call_at(self._due, self._ring, loop)

    def _ring(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        if self._waiter is None or self._waiter.done():
            return
        if loop.time() < self._due:
            self._set_timer(loop)
        else:
            self._waiter.set_result(None)
