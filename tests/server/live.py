"""A server on loopback in a thread, and an executor whose answers, failures and pauses a test decides."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx
import openai
import torch

from bytefloor.engine.batch import Batch
from bytefloor.engine.cache import CachePlan
from bytefloor.engine.engine import Engine
from bytefloor.engine.loading import Opened
from bytefloor.engine.stream_limit import StreamLimit
from bytefloor.server.process import Server, bind, make_server
from bytefloor.server.service import ServerOptions, Service

SHORT = ServerOptions(name="tiny", keep_alive_s=0.2, drain_s=20)


class Scripted:
    """Answers with a text, whatever the prompt: at position p the token for p + 1. Without one, with the letter a.

    start: position of the answer's first token. gate: a step waits for it. failure: what the next step raises.
    nan: prompts that hold this token get logits that are NaN.
    """

    most_draft_rows = 16

    def __init__(self, opened: Opened, plan: CachePlan) -> None:
        self.step = opened.engine.executor.step
        self.plan = plan
        self.device = torch.device("cpu")
        self.gate = threading.Event()
        self.gate.set()
        self.is_inside = threading.Event()
        self.failure: BaseException | None = None
        self.nan: int | None = None
        self.batches: list[Batch] = []
        self.pause_s = 0.0
        self._n_tokens = opened.engine.vocabulary_size
        self._tokenizer = opened.tokenizer
        self._script: list[int] = []
        self._start = 0

    def say(self, text: str, start: int, *, ends: bool = True) -> None:
        """From now on. ends: with the end of the turn. Control tokens are said where the text spells them."""
        self._script = self._tokenizer.encode(text, add_bos=False, parse_special=True)
        self._script += [1] if ends else []
        self._start = start

    def make_loop(self) -> None:
        return None

    def make_batch_loop(self) -> None:
        return None

    def run(self, batch: Batch) -> torch.Tensor:
        self.batches.append(batch)
        self.is_inside.set()
        assert self.gate.wait(30)
        time.sleep(self.pause_s)
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure
        logits = torch.zeros(len(batch.wanted), self._n_tokens)
        for place, row in enumerate(batch.wanted):
            at = batch.positions[row] + 1 - self._start
            token = self._script[at] if 0 <= at < len(self._script) else self._tokenizer.encode("a", add_bos=False)[0]
            logits[place, token] = 50.0
            rows = [i for i, sequence in enumerate(batch.sequence) if sequence == batch.sequence[row]]
            if self.nan is not None and self.nan in [batch.tokens[i] for i in rows]:
                logits[place, 0] = torch.nan
        return logits


def scripted(opened: Opened, **plan: int) -> tuple[Opened, Scripted]:
    """The model's files and text with an executor that follows a script."""
    settings = {"capacity": 512, "chunk": 64, "n_sequences": 2, "page_size": 16} | plan
    executor = Scripted(opened, CachePlan(**settings))
    return replace(opened, engine=Engine(executor, opened.tokenizer, opened.engine.vocabulary_size)), executor


@dataclass
class Live:
    """A running server. headers: sent with each request."""

    url: str
    service: Service
    loop: asyncio.AbstractEventLoop
    server: Server
    headers: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.http = httpx.Client(base_url=self.url, headers=self.headers, timeout=60)
        self.openai = openai.OpenAI(base_url=f"{self.url}/v1", api_key="unused", max_retries=0, timeout=60)

    def post(self, path: str, **body: object) -> httpx.Response:
        return self.http.post(path, json=body)

    def chat(self, text: str = "hello", **body: object) -> httpx.Response:
        return self.post("/v1/chat/completions", messages=[{"role": "user", "content": text}], **body)

    def n_prompt(self, text: str = "hello") -> int:
        return self.post("/apply-template", messages=[{"role": "user", "content": text}]).json()["n_tokens"]

    def call(self, coroutine: object) -> object:
        """Run on the server's loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(60)  # type: ignore[arg-type]


def eventually(is_so: Callable[[], bool], what: str, limit_s: float = 20) -> None:
    end = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < end, f"never: {what}"
        time.sleep(0.01)


@contextmanager
def live(opened: Opened, options: ServerOptions = SHORT, limit: StreamLimit | None = None) -> Iterator[Live]:
    service, bound = Service(opened, options, limit), bind("127.0.0.1", 0)
    server = make_server(service)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_until_complete, args=(server.serve(sockets=[bound]),))
    thread.start()
    try:
        eventually(lambda: server.started or not thread.is_alive(), "started")
        running = Live(f"http://127.0.0.1:{bound.getsockname()[1]}", service, loop, server)
        yield running
        running.http.close()
        running.openai.close()
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive(), "the server did not stop"
        assert not service.worker._thread.is_alive()
        loop.close()


def chatty(root: Path, name: str, template: str) -> Path:
    """A tiny model's directory with a chat template."""
    import shutil

    from tiny import build_tiny

    directory = root / "chatty"
    shutil.copytree(build_tiny(name, root).directory, directory)
    (directory / "chat_template.jinja").write_text(template)
    return directory
