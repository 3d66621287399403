"""Two thousand requests, many of them rude: nothing stays behind, and no answer is another's."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import random
import re
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import pytest

from bytefloor.engine.loading import EngineOptions, Opened, open_engine
from bytefloor.engine.request import Request
from bytefloor.engine.sampling_params import SamplingParams
from bytefloor.engine.sequence import SequenceState
from bytefloor.server.answers import Answer
from bytefloor.server.generation import Generation
from bytefloor.server.worker import Handle
from server.live import Live, chatty, eventually, live
from server.rough_client import STAGES, Reply, send

SEED, N_REQUESTS, AT_ONCE, CONTEXT = 2026, 2000, 16, 160
EVERY = 100
"""Requests between two looks at the memory."""
LEVEL_BYTES = 2 << 20
"""What the allocator keeps or gives back from one look to the next, whatever the requests were."""
LENGTHS, LONG = (1, 3, 10), 75
"""Tokens of answers; long ones cross two pages, of which the engine keeps only one in hand."""
TEMPLATE = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}"
TEXTS = [*(f"{word} {i}" for i, word in enumerate(("ab", "hello", "x", "the thin"))), *(c * 58 for c in "mnop")]
"""The last four end just before a page does: their answers need another one."""


@dataclass(frozen=True)
class Case:
    """What is asked, and what the engine says when it is alone."""

    text: str
    n_tokens: int
    chat: str
    completion: str
    ids: list[int]


Body = dict[str, Any] | None


@dataclass(frozen=True)
class Kind:
    """A way to ask: body of a case, None for a GET; what a whole reply is read as, and what that should be."""

    path: str
    body: Callable[[Case], Body]
    read: Callable[[Reply], Any]
    right: Callable[[Case], Any]


def chat(case: Case, **more: Any) -> Body:
    return {"messages": [{"role": "user", "content": case.text}], "max_tokens": case.n_tokens, "temperature": 0, **more}


def text(case: Case, **more: Any) -> Body:
    return {"prompt": case.text, "max_tokens": case.n_tokens, "temperature": 0, **more}


def messages(reply: Reply) -> list[str]:
    return [choice["message"]["content"] for choice in reply.json["choices"]]


def texts(reply: Reply) -> list[str]:
    return [choice["text"] for choice in reply.json["choices"]]


def joined(reply: Reply) -> list[str]:
    """Of a stream, by choice."""
    found: dict[int, str] = {}
    for event in reply.events:
        for choice in event["choices"]:
            piece = choice["text"] if "text" in choice else choice["delta"].get("content", "")
            found[choice["index"]] = found.get(choice["index"], "") + piece
    return [found[index] for index in sorted(found)]


CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
KINDS = [
    Kind(CHAT, chat, messages, lambda case: [case.chat]),
    Kind(CHAT, lambda case: chat(case, n=2), messages, lambda case: [case.chat] * 2),
    Kind(CHAT, lambda case: chat(case, stream=True), joined, lambda case: [case.chat]),
    Kind("/v1/messages", chat, lambda reply: reply.json["content"][0]["text"], lambda case: case.chat),
    Kind("/v1/responses",
         lambda case: {"input": case.text, "max_output_tokens": case.n_tokens, "temperature": 0},
         lambda reply: reply.json["output"][-1]["content"][0]["text"], lambda case: case.chat),
    Kind(TEXT, text, texts, lambda case: [case.completion]),
    Kind(TEXT, lambda case: text(case, stream=True, n=2), joined, lambda case: [case.completion] * 2),
    Kind(TEXT, lambda case: text(case, prompt=case.ids), texts, lambda case: [case.completion]),
    Kind("/tokenize", lambda case: {"content": case.text, "add_special": True},
         lambda reply: reply.json["tokens"], lambda case: case.ids),
    Kind("/health", lambda _: None, lambda reply: reply.json, lambda _: {"status": "ok"}),
    Kind("/metrics", lambda _: None, lambda reply: b"bytefloor_" in reply.data, lambda _: True),
]  # fmt: skip
WRONG: list[Callable[[bytes], bytes]] = [
    lambda body: body[:-1],
    lambda body: b"[" + body + b"]",
    lambda body: body.replace(b"{", b'{"frob": 1, ', 1),
    lambda _: b"\xff\xfe",
    lambda _: b'{"messages": 1, "prompt": {}}',
    lambda body: b"[" * 100_000 + body,
]
"""What makes a body that is refused of one that is not."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chatty(tmp_path_factory.mktemp("soak"), "llama", TEMPLATE)


@pytest.fixture(scope="module")
def cases(directory: Path) -> list[Case]:
    """Each asked of an engine that has nobody else and remembers nothing."""
    alone = open_engine(directory, EngineOptions(context=CONTEXT, n_snapshots=0))
    asked = [(text, n) for text in TEXTS for n in LENGTHS] + [(text, LONG) for text in TEXTS[-4:] * 2]
    return [_case(alone, text, n) for text, n in asked]


def _case(alone: Opened, text: str, n_tokens: int) -> Case:
    def answer(ids: list[int]) -> str:
        request = Request(tuple(ids), n_tokens, SamplingParams(temperature=0.0), ignores_end=n_tokens == LONG)
        return "".join(delta.text for delta in alone.engine.generate(request))

    ids = alone.tokenizer.encode(text)
    spoken = alone.tokenizer.encode(f"u:{text}\n")
    return Case(text, n_tokens, answer(spoken), answer(ids), ids)


class Soak:
    """All requests, each drawn from a seed of its own, so that it is the same whenever its turn comes."""

    def __init__(self, running: Live, cases: list[Case]) -> None:
        self.running = running
        self.port = int(running.url.rsplit(":", 1)[1])
        self.cases = [case for case in cases if case.n_tokens != LONG]
        self.long = [case for case in cases if case.n_tokens == LONG]
        self.done: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.rss: list[int] = []

    async def run(self, numbers: range) -> None:
        """AT_ONCE at a time; memory is looked at where nothing runs."""
        for start in range(numbers.start, numbers.stop, EVERY):
            waiting = iter(range(start, min(start + EVERY, numbers.stop)))

            async def work(waiting: Any = waiting) -> None:
                for number in waiting:
                    await self._one(number)

            await asyncio.gather(*(work() for _ in range(AT_ONCE)))
            await asyncio.to_thread(eventually, lambda: self.running.service.worker.n_open == 0, "all ended", 30)
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)
            self.rss.append(psutil.Process().memory_info().rss)

    async def crowd(self) -> None:
        """Long answers, all at once: most lose their pages midway and are computed again."""

        async def ask(case: Case) -> None:
            body = json.dumps(text(case, ignore_eos=True)).encode()
            self._check(
                Kind(TEXT, text, texts, lambda case: [case.completion]), case, await send(self.port, TEXT, body)
            )

        await asyncio.gather(*(ask(case) for case in self.long))

    async def _one(self, number: int) -> None:
        source = random.Random(f"{SEED} {number}")
        kind, case = source.choice(KINDS), source.choice(self.cases)
        asked = kind.body(case)
        body = b"" if asked is None else json.dumps(asked).encode()
        chance = source.random()
        if chance < 0.15 and body:
            await self._refused(kind, source.choice(WRONG)(body))
        elif chance < 0.45:
            stage = source.choice(STAGES)
            await send(self.port, kind.path, body, stage, is_reset=source.random() < 0.5)
            self.done[f"gone: {stage}"] += 1
        elif chance < 0.55:
            await self._cancelled(kind.path, body, source.uniform(0, 0.1))
        else:
            self._check(kind, case, await send(self.port, kind.path, body))

    async def _cancelled(self, path: str, body: bytes, after_s: float) -> None:
        try:
            await asyncio.wait_for(send(self.port, path, body), after_s)
            self.done["in time"] += 1
        except TimeoutError:
            self.done["gone: whenever"] += 1

    async def _refused(self, kind: Kind, body: bytes) -> None:
        reply = await send(self.port, kind.path, body)
        if reply.status != 400 or not reply.json["error"]["message"]:
            self.wrong.append(f"{kind.path} {body[:80]!r}: {reply.status} {reply.data[:200]!r}")
        self.done["refused"] += 1

    def _check(self, kind: Kind, case: Case, reply: Reply) -> None:
        self.done["answered"] += 1
        if reply.status != 200:
            self.wrong.append(f"{kind.path}: {reply.status} {reply.data[:200]!r}")
        elif (found := kind.read(reply)) != kind.right(case):
            self.wrong.append(f"{kind.path} {case}: {found!r}")


def _left(running: Live) -> dict[str, int]:
    """What a server has that could grow."""
    gc.collect()

    async def n_tasks() -> int:
        return len(asyncio.all_tasks())

    def alive(kind: type) -> int:
        return sum(isinstance(each, kind) for each in gc.get_objects())

    kinds = {kind.__name__: alive(kind) for kind in (Handle, Generation, SequenceState, Answer)}
    return {
        "tasks": int(str(running.call(n_tasks()))),
        "threads": sum(not each.name.startswith("asyncio_") for each in threading.enumerate()),
        "descriptors": psutil.Process().num_fds(),
        "handles": len(running.service.worker._handles),
        "open": running.service.worker.n_open,
        **kinds,
    }


def _pages(running: Live) -> dict[str, int]:
    """Used ones, without those that only prefixes hold."""
    engine = running.service.served.engine

    async def evict() -> dict[str, int]:
        while engine._pages.prefixes.evict():
            pass
        return {kind: use.n_used for kind, use in engine.load.pages.items()}

    return running.call(evict())  # type: ignore[return-value]


def test_nothing_stays_behind_and_no_answer_is_wrong(directory: Path, cases: list[Case]) -> None:
    # Fewer positions than six need: some wait, some lose their pages and are computed again.
    options = EngineOptions(context=CONTEXT, n_sequences=6, chunk=32, positions=512)
    with live(open_engine(directory, options)) as running:
        soak = Soak(running, cases)
        asyncio.run(soak.run(range(N_REQUESTS, N_REQUESTS + EVERY)))  # threads of pools, compiled patterns
        before = _left(running)
        asyncio.run(soak.crowd())
        assert running.service.worker.load.n_preempted > 0
        soak.rss.clear()
        soak.done.clear()
        asyncio.run(soak.run(range(N_REQUESTS)))
        eventually(lambda: _left(running)["descriptors"] <= before["descriptors"], "connections closed")
        after = _left(running)
        assert soak.wrong == []
        assert {name: (before[name], n) for name, n in after.items() if n > before[name]} == {}
        # Objects of other tests of this process may be alive, so kinds are compared with before.
        assert after["handles"] == after["open"] == 0
        assert not running.service.served.engine.has_work
        assert set(_pages(running).values()) == {0}
        assert running.http.get("/health").status_code == 200
        metrics = running.http.get("/metrics").text
    cancelled = re.search(r'finished_total{reason="cancelled"} (\d+)', metrics)
    assert cancelled is not None
    assert int(cancelled[1]) > N_REQUESTS // 20
    assert sum(soak.done.values()) == N_REQUESTS
    assert min(soak.done[f"gone: {stage}"] for stage in STAGES) > N_REQUESTS // 50
    assert soak.done["answered"] > N_REQUESTS // 3
    assert soak.done["refused"] > N_REQUESTS // 20
    half = soak.rss[len(soak.rss) // 2 :]
    third, last = half[: len(half) // 2], half[len(half) // 2 :]
    assert median(last) - median(third) < LEVEL_BYTES, [n >> 10 for n in soak.rss]
