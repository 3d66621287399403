"""What a stream that asked for `return_progress` tells beside the answer: how far it has come and how fast it goes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from bytefloor.server.answers import Event
from bytefloor.server.asked import Asked
from bytefloor.server.floor import Floor
from bytefloor.server.generation import Generation

Json = dict[str, Any]
EVERY_S = 0.2
"""Between two looks at a prompt, and between two figures of speed."""


class Progress:
    """Of one request.

    n_prompt: tokens of its first prompt. floor: None where there is no share to tell. clock: seconds, for tests.
    """

    def __init__(self, n_prompt: int, floor: Floor | None, clock: Callable[[], float] = time.perf_counter) -> None:
        self._n_prompt = n_prompt
        self._floor = floor
        self._clock = clock
        self._began = clock()
        self._first_at = self._told_at = 0.0
        self._n_generated = 0

    @classmethod
    def of(cls, asked: Asked, floor: Floor | None) -> Progress | None:
        """None where nobody asked for it."""
        if not asked.shows_progress:
            return None
        return cls(len(asked.choices[0].request.prompt_ids), floor if len(asked.choices) == 1 else None)

    @property
    def has_begun(self) -> bool:
        """Whether there is a token of the answer."""
        return self._n_generated > 0

    def reading(self, generation: Generation) -> Json:
        """``prompt_progress``: how many tokens of the prompt there are, are read, were cached, and the time since.

        waiting: requests in the queue while this one is among them, 0 while its prompt is read.
        """
        reading = generation.reading
        if reading is None:
            found = {"cache": 0, "processed": 0, "waiting": max(1, generation.n_waiting)}
        else:
            found = {"cache": reading.n_cached, "processed": reading.n_done, "waiting": 0}
        time_ms = round(1e3 * (self._clock() - self._began), 3)
        return {"prompt_progress": {"total": self._n_prompt, **found, "time_ms": time_ms}}

    def speed(self, event: Event) -> Json:
        """``timings`` so far, after an event; empty where they were told a moment ago, or stand in the last chunk."""
        if event.sampled is None:
            return {}
        now = self._clock()
        self._n_generated += 1
        if self._n_generated == 1:
            self._first_at = self._told_at = now
        if event.finish is not None or now - self._told_at < EVERY_S:
            return {}
        self._told_at = now
        n, decode_s = self._n_generated, now - self._first_at
        share = None if self._floor is None else self._floor.share(self._n_prompt, n, decode_s)
        timings = {
            "predicted_n": n,
            "predicted_ms": round(1e3 * decode_s, 3),
            "predicted_per_second": round((n - 1) / decode_s, 2),
        }
        return {"timings": timings if share is None else {**timings, "floor_share": round(share, 4)}}
