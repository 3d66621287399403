"""A load without HTTP: what the engine does with the requests of ``bench serve`` when nothing stands before it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

from bytefloor.engine.engine import Engine
from bytefloor.engine.request import Delta, Request
from bytefloor.tools.load_client import Load, Outcome, digest


class _Under:
    """A request that the engine has."""

    def __init__(self, due: float) -> None:
        self.outcome = Outcome(due)
        self.texts: list[str] = []

    def take(self, delta: Delta) -> None:
        """Times as a client would see them: of tokens that are no text yet there is nothing to see."""
        now = time.perf_counter()
        outcome, finish = self.outcome, delta.finish
        if delta.text or finish is not None:
            outcome.first, outcome.last = outcome.first or now, now
        self.texts.append(delta.text)
        if finish is not None:
            outcome.end, outcome.n_tokens = now, finish.n_generated
            outcome.n_prompt, outcome.n_cached = finish.n_prompt, finish.n_cached
            outcome.error = "engine" if finish.reason in ("error", "cancelled") else None


def drive(engine: Engine, requests: Sequence[Request], n_streams: int, due_s: Sequence[float] | None = None) -> Load:
    """Serve requests, n_streams at a time, each followed by the next; or, with due_s, each as it is due."""
    waiting = deque(zip(requests, due_s or [0.0] * len(requests), strict=True))
    under: dict[int, _Under] = {}
    done: list[_Under] = []
    start, cpu_s = time.perf_counter(), time.process_time()
    while waiting or under:
        while waiting and _is_due(len(under), n_streams, None if due_s is None else start + waiting[0][1]):
            request, due = waiting.popleft()
            under[engine.add(request)] = _Under(time.perf_counter() if due_s is None else start + due)
        if not under:
            time.sleep(max(0.0, start + waiting[0][1] - time.perf_counter()))
            continue
        for delta in engine.step():
            under[delta.request_id].take(delta)
            if delta.finish is not None:
                done.append(under.pop(delta.request_id))
    wall_s, cpu_s = time.perf_counter() - start, time.process_time() - cpu_s
    for each in done:
        each.outcome.digest = digest("".join(each.texts))
    return Load([each.outcome for each in sorted(done, key=lambda each: each.outcome.due)], wall_s, cpu_s)


def _is_due(n_under: int, n_streams: int, due: float | None) -> bool:
    return n_under < n_streams if due is None else due <= time.perf_counter()
