"""The choices of one request on their way through the worker."""

from __future__ import annotations

import time
from dataclasses import replace

from bytefloor.engine.request import Delta, Reading
from bytefloor.errors import RequestError
from bytefloor.server.answers import Event
from bytefloor.server.asked import Choice
from bytefloor.server.mailbox import Mailbox
from bytefloor.server.refusal import Refusal
from bytefloor.server.worker import Handle, Mail, Unavailable, Worker
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
        self._mailbox: Mail = Mailbox()
        self._places: dict[Handle, int] = {}
        self._waiting = list(range(len(choices)))
        self._read: set[int] = set()  # prompts that have been read, and are in the cache
        self._n_ended = 0
        self._refusal: Refusal | None = None
        self._cut: set[int] = set()  # places of choices that are over, whatever the engine still says

    async def start(self) -> None:
        """Submit the first choice of each prompt. Refusal when the engine does not take it."""
        firsts = {self._choices[place].prompt: place for place in reversed(self._waiting)}
        for place in sorted(firsts.values()):
            await self._submit(place)

    @property
    def is_over(self) -> bool:
        """Whether all events were given."""
        return self._n_ended == len(self._choices) and self._refusal is None

    async def events(self, patience_s: float) -> list[Event]:
        """All that has come since the last time; waits for the first, and gives none where none came for so long.

        Refusal where a choice ends in an error, is cancelled from outside, or the time is over; not before the events
        that came until then were given.
        """
        if self._refusal is not None:
            raise self._refusal
        for place in [place for place in self._waiting if self._choices[place].prompt in self._read]:
            await self._submit(place)
        found = await self._mailbox.take(max(0.0, min(patience_s, self._ends_at - time.perf_counter())))
        if not found and time.perf_counter() >= self._ends_at:
            message = f"the request took longer than {self._timeout_s:g} s, this server's limit (--timeout)"
            raise Refusal(504, message, code="timeout")
        events: list[Event] = []
        for handle, delta in found:
            place = self._places[handle]
            self._read.add(self._choices[place].prompt)
            try:
                events.append(self._event(place, handle, delta))
            except Refusal as refusal:
                if not events:
                    raise
                self._refusal = refusal
                break
        return events

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
        self._mailbox.close()
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
        if not choice.ends_with_call:
            return pieces
        ends = [at for at, piece in enumerate(pieces, 1) if isinstance(piece, CallEnd)]
        if not ends:
            return pieces
        self._cut.add(place)
        self._worker.cancel(handle)
        return pieces[: ends[0]]
