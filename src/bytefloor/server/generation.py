"""The choices of one request on their way through the worker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace

from bytefloor.engine.request import Delta, Reading
from bytefloor.errors import RequestError
from bytefloor.server.answers import Event
from bytefloor.server.asked import Choice
from bytefloor.server.refusal import Refusal
from bytefloor.server.worker import Handle, Mailbox, Unavailable, Worker
from bytefloor.text.reply import CallEnd
from bytefloor.text.reply import Event as Piece


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
        self._cut: set[int] = set()  # places of choices that are over, whatever the engine still says

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
        finish, was_cut = delta.finish, place in self._cut
        pieces = [] if was_cut else self._pieces(place, handle, delta)
        sampled = None if was_cut else delta.sampled
        if finish is None:
            return Event(place, pieces, sampled)
        self._n_ended += 1
        if finish.reason == "error":
            raise Refusal(500, finish.detail, code="engine_error")
        if finish.reason == "cancelled" and place not in self._cut:
            raise Refusal(503, "the server is stopping: the answer was cut short", code="unavailable")
        if place in self._cut:
            finish = replace(finish, reason="stop", detail="one call, as many as there may be", stop=None)
        first = handle.first_token_at or time.perf_counter()
        queue_s = max(0.0, first - handle.submitted_at - finish.prompt_s)
        return Event(place, pieces, sampled, finish, queue_s)

    def _pieces(self, place: int, handle: Handle, delta: Delta) -> list[Piece]:
        """What the delta says; up to the end of its first call, and no more from the engine, where that is all."""
        choice = self._choices[place]
        pieces = choice.parser.push(delta.text)
        if delta.finish is not None:
            pieces = [*pieces, *choice.parser.finish()]
        ends = [at for at, piece in enumerate(pieces, 1) if isinstance(piece, CallEnd)]
        if not choice.ends_with_call or not ends:
            return pieces
        self._cut.add(place)
        self._worker.cancel(handle)
        return pieces[: ends[0]]
