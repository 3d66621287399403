"""The choices of one request on their way through the worker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

from bytefloor.engine.request import Delta, Reading
from bytefloor.errors import RequestError
from bytefloor.server.answers import Event
from bytefloor.server.asked import Choice
from bytefloor.server.refusal import Refusal
from bytefloor.server.worker import Handle, Mailbox, Unavailable, Worker


class Generation:
    """Submits choices, gives their events as they come, and leaves nothing behind: whoever makes one closes it.

    Choices of one prompt begin when the first of them has read it: then the others find it in the cache.
    """

    def __init__(self, worker: Worker, choices: tuple[Choice, ...], timeout_s: float) -> None:
        self._worker = worker
        self._choices = choices
        self._timeout_s = timeout_s
        self._ends_at = time.perf_counter() + timeout_s
        self._mailbox: Mailbox = asyncio.Queue()
        self._places: dict[Handle, int] = {}
        self._waiting = list(range(len(choices)))
        self._n_ended = 0

    async def start(self) -> None:
        """Submit the first choice of each prompt. Refusal when the engine does not take it."""
        firsts = {self._choices[place].prompt: place for place in reversed(self._waiting)}
        for place in sorted(firsts.values()):
            await self._submit(place)

    async def events(self, patience_s: float) -> AsyncIterator[Event | None]:
        """To the last choice's end; None when nothing has happened for so long.

        Refusal where a choice ends in an error, is cancelled from outside, or the time is over.
        """
        while self._n_ended < len(self._choices):
            found = await self._next(patience_s)
            if found is None:
                yield None
                continue
            handle, delta = found
            place = self._places[handle]
            yield self._event(place, handle, delta)
            for follower in [at for at in self._waiting if self._choices[at].prompt == self._choices[place].prompt]:
                await self._submit(follower)

    @property
    def reading(self) -> Reading | None:
        """How far the first choice's prompt has been read; None before it has begun and once it is answered."""
        return next((self._worker.reading(handle) for handle in self._places), None)

    @property
    def n_waiting(self) -> int:
        """Requests in the queue, everybody's, as the last step left it."""
        return self._worker.load.n_waiting

    def close(self) -> None:
        """Cancel what has not ended."""
        for handle in self._places:
            if handle.finish is None:
                self._worker.cancel(handle)

    async def _submit(self, place: int) -> None:
        self._waiting.remove(place)
        try:
            handle = await self._worker.submit(self._choices[place].request, self._mailbox)
        except RequestError as error:
            raise Refusal(400, str(error)) from None
        except Unavailable as error:
            raise Refusal(503, str(error), code="unavailable") from None
        self._places[handle] = place

    async def _next(self, patience_s: float) -> tuple[Handle, Delta] | None:
        try:
            return self._mailbox.get_nowait()
        except asyncio.QueueEmpty:
            pass
        left = self._ends_at - time.perf_counter()
        try:
            async with asyncio.timeout(max(0.0, min(patience_s, left))):  # wait_for would make a task each time
                return await self._mailbox.get()
        except TimeoutError:
            if time.perf_counter() >= self._ends_at:
                message = f"the request took longer than {self._timeout_s:g} s, this server's limit (--timeout)"
                raise Refusal(504, message, code="timeout") from None
            return None

    def _event(self, place: int, handle: Handle, delta: Delta) -> Event:
        finish, parser = delta.finish, self._choices[place].parser
        if finish is None:
            return Event(place, parser.push(delta.text), delta.sampled)
        self._n_ended += 1
        if finish.reason == "error":
            raise Refusal(500, finish.detail, code="engine_error")
        if finish.reason == "cancelled":
            raise Refusal(503, "the server is stopping: the answer was cut short", code="unavailable")
        pieces = [*parser.push(delta.text), *parser.finish()]
        first = handle.first_token_at or time.perf_counter()
        queue_s = max(0.0, first - handle.submitted_at - finish.prompt_s)
        return Event(place, pieces, delta.sampled, finish, queue_s)
