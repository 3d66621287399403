"""Clients that go, steps that fail, servers that stop: nothing is lost, nothing stays behind."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from bytefloor.engine.loading import Opened
from bytefloor.errors import KernelError
from bytefloor.server import process
from bytefloor.server.event_stream import EventStream, Write
from bytefloor.server.service import Service
from server.live import SHORT, Live, Scripted, eventually, live, scripted

Stage = tuple[Live, Scripted]
CHAT = "/v1/chat/completions"


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@contextmanager
def asking(running: Live, *texts: str, **body: Any) -> Iterator[list[Future[httpx.Response]]]:
    with ThreadPoolExecutor(len(texts)) as pool:
        yield [pool.submit(running.chat, text, **body) for text in texts]


def n_running(running: Live) -> tuple[int, int]:
    load = running.service.worker.load
    return load.n_waiting, load.n_running


def all_free(running: Live, executor: Scripted) -> None:
    """No request, and no page but those of kept prefixes."""
    eventually(lambda: running.service.worker.n_open == 0, "closed")
    eventually(lambda: n_running(running) == (0, 0), "removed")
    assert running.service.worker._handles == {}
    engine = running.service.served.engine

    async def evict() -> None:
        while engine._pages.prefixes.evict():
            pass
        running.service.worker.load = engine.load

    running.call(evict())
    assert {use.n_used for use in running.service.worker.load.pages.values()} == {0}


def send(running: Live, text: str, *, is_streamed: bool) -> socket.socket:
    """A request on a connection of its own, which nobody reads."""
    data = json.dumps({"messages": user(text), "stream": is_streamed, "max_tokens": 300}).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    head += f"content-length: {len(data)}"
    connection = socket.create_connection(("127.0.0.1", int(running.url.rsplit(":", 1)[1])))
    connection.sendall(head.encode() + b"\r\n\r\n" + data)
    return connection


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_client_that_goes_while_it_waits_never_starts(opened: Opened, is_streamed: bool) -> None:
    """V02"""
    engine, executor = scripted(opened, n_sequences=1)
    with live(engine) as running, ThreadPoolExecutor(1) as pool:
        executor.gate.clear()
        other = pool.submit(running.chat, "first", max_tokens=3)
        assert executor.is_inside.wait(10)
        connection = send(running, "x" * 100, is_streamed=is_streamed)
        eventually(lambda: running.service.worker.n_open == 2, "sent")
        connection.close()
        executor.gate.set()
        assert other.result(10).status_code == 200
        all_free(running, executor)
        assert all(len(batch.tokens) < 100 for batch in executor.batches)


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("when", ["reading", "decoding"])
def test_a_client_that_goes_frees_everything(opened: Opened, when: str, is_streamed: bool) -> None:
    """V02"""
    engine, executor = scripted(opened, n_sequences=1, chunk=16)
    with live(engine) as running:
        n_prompt = running.n_prompt("x" * 200)
        executor.say("b" * 300, n_prompt, ends=False)
        executor.pause_s = 0.02
        connection = send(running, "x" * 200, is_streamed=is_streamed)
        n_wanted = 2 if when == "reading" else n_prompt // 16 + 10
        eventually(lambda: len(executor.batches) >= n_wanted, when)
        connection.close()
        all_free(running, executor)
        n_rows = sum(len(batch.tokens) for batch in executor.batches)
        assert n_rows < (n_prompt if when == "reading" else n_prompt + 100)
        assert running.chat("next", max_tokens=2).status_code == 200


def test_a_step_that_raises_ends_those_that_took_part(stage: Stage) -> None:
    """V05, but for an engine that is not broken: the queued request is served."""
    running, executor = stage
    executor.say("".join(chr(97 + i % 26) for i in range(60)), running.n_prompt(), ends=False)
    executor.pause_s = 0.02
    with asking(running, "one", "two", "three", "four", max_tokens=40) as replies:
        eventually(lambda: n_running(running) == (2, 2), "two run and two wait")
        executor.failure = RuntimeError("a step went wrong")
    assert sorted(reply.result().status_code for reply in replies) == [200, 200, 500, 500]
    failed = [reply.result() for reply in replies if reply.result().status_code == 500]
    for each in failed:
        assert each.json()["error"]["message"] == "a step of the engine failed: RuntimeError: a step went wrong"
        assert each.json()["error"]["type"] == "server_error"
        assert each.headers["x-should-retry"] == "false"
    assert running.http.get("/health").status_code == 200
    all_free(running, executor)


def test_a_stream_that_fails_says_so_and_is_not_done(stage: Stage) -> None:
    running, executor = stage
    executor.failure = RuntimeError("oops")
    with pytest.raises(openai.APIError, match="oops"):
        list(running.openai.chat.completions.create(model="tiny", messages=user("hi"), stream=True))  # type: ignore[call-overload]
    executor.failure = RuntimeError("oops")
    assert "[DONE]" not in running.chat(stream=True).text
    assert 'errors_total{status="500"} 2' in running.http.get("/metrics").text


def test_logits_that_are_nan_end_one_request(stage: Stage) -> None:
    """N06"""
    running, executor = stage
    executor.nan = running.post("/tokenize", content="!").json()["tokens"][0]
    with asking(running, "fine", "bad!", max_tokens=3) as replies:
        pass
    assert [reply.result().status_code for reply in replies] == [200, 500]
    assert "NaN" in replies[1].result().json()["error"]["message"]
    all_free(running, executor)


@pytest.mark.parametrize("error", [KernelError("gone"), RuntimeError("CUDA error: an illegal access"), SystemExit()])
def test_a_broken_engine_is_told_and_ends_readiness(stage: Stage, error: BaseException) -> None:
    """V05"""
    running, executor = stage
    executor.gate.clear()
    executor.failure = error
    with asking(running, "one", "two", "three", max_tokens=3) as replies:
        eventually(lambda: running.service.worker.n_open == 3, "three are there")
        executor.gate.set()
    assert [reply.result().status_code for reply in replies] == [500, 500, 500] or {
        reply.result().status_code for reply in replies
    } == {500, 503}
    health = running.http.get("/health")
    assert health.status_code == 503
    assert type(error).__name__ in health.json()["error"]["message"]
    assert running.chat().status_code == 503
    assert running.http.get("/v1/models").status_code == 503
    assert running.service.worker.n_open == 0


def test_steps_that_always_fail_are_an_engine_that_is_broken(stage: Stage) -> None:
    running, executor = stage
    for status in (200, 200, 503):
        assert running.http.get("/health").status_code == 200
        executor.failure = ValueError("again")
        assert running.chat().status_code == 500
        assert running.http.get("/health").status_code == status


def test_a_quiet_stream_has_comments(stage: Stage) -> None:
    """V12"""
    running, executor = stage
    executor.say("hi", running.n_prompt())
    executor.gate.clear()
    threading.Timer(1.0, executor.gate.set).start()
    text = running.chat(stream=True).text
    assert 2 <= text.count(": still here\n\n") <= 6
    assert text.index("still here") < text.index('"content":"h"')
    # Clients skip them.
    executor.gate.clear()
    threading.Timer(0.5, executor.gate.set).start()
    stream = running.openai.chat.completions.create(model="tiny", messages=user("hello"), stream=True)  # type: ignore[call-overload]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "hi"


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_request_that_takes_too_long(opened: Opened, is_streamed: bool) -> None:
    engine, executor = scripted(opened)
    executor.pause_s = 0.05
    with live(engine, replace(SHORT, timeout_s=0.6)) as running:
        executor.say("b" * 300, running.n_prompt(), ends=False)
        reply = running.chat(stream=is_streamed)
        assert reply.status_code == (200 if is_streamed else 504)
        error = json.loads(reply.text.split("data: ")[-1] if is_streamed else reply.text)["error"]
        assert error["code"] == "timeout"
        assert "0.6 s" in error["message"]
        all_free(running, executor)


def test_a_server_that_drains_finishes_what_runs_and_takes_nothing_new(stage: Stage) -> None:
    running, executor = stage
    executor.say("finished", running.n_prompt())
    executor.gate.clear()
    with asking(running, "hello", "hello") as replies:
        eventually(lambda: running.service.worker.n_open == 2, "both are there")
        with ThreadPoolExecutor(1) as pool:
            drained = pool.submit(running.call, running.service.drain())
            eventually(lambda: running.service.closed is not None, "draining")
            refused = running.chat()
            assert refused.status_code == 503
            assert refused.headers["retry-after"] == "1"
            assert running.http.get("/health").status_code == 503
            assert running.http.get("/metrics").status_code == 200
            assert not drained.done()
            executor.gate.set()
            assert drained.result(10) == 0
    assert [reply.result().json()["choices"][0]["message"]["content"] for reply in replies] == ["finished"] * 2


def test_a_server_that_drains_waits_for_choices_that_were_not_begun(opened: Opened) -> None:
    """They are submitted when the first has read their prompt, and it may have ended by then: nothing runs, and there
    is more to come."""
    engine, executor = scripted(opened, n_sequences=1)
    with live(engine) as running:
        executor.say("finished", running.n_prompt())
        executor.gate.clear()
        executor.pause_s = 0.1
        with asking(running, "hello", n=4, max_tokens=1) as replies:
            eventually(lambda: running.service.worker.n_open == 1, "is there")
            with ThreadPoolExecutor(1) as pool:
                drained = pool.submit(running.call, running.service.drain())
                eventually(lambda: running.service.closed is not None, "draining")
                executor.gate.set()
                assert drained.result(10) == 0
            assert len(executor.batches) >= 4
            assert running.service.worker.n_open == 0
            assert len(replies[0].result(5).json()["choices"]) == 4


def test_a_stream_whose_client_does_not_read_ends_when_its_time_is_over() -> None:
    """Its socket is full and writing waits: nobody would look at the clock."""
    sent, closed, late = [], [], []

    async def send(message: Any) -> None:
        sent.append(message)
        if len(sent) > 3:
            await asyncio.sleep(60)

    async def receive() -> Any:
        await asyncio.sleep(60)

    async def tell(write: Write) -> bytes:
        while True:
            await write(b"more")

    asyncio.run(
        asyncio.wait_for(
            EventStream(tell, lambda: closed.append(1), 0.2, lambda: late.append(1))({}, receive, send), 10
        )
    )
    assert len(sent) == 4
    assert all(message.get("more_body", True) for message in sent)
    assert (closed, late) == ([1], [1])


@pytest.mark.parametrize("is_streamed", [False, True])
def test_what_does_not_finish_in_time_is_cut_and_told(opened: Opened, is_streamed: bool) -> None:
    engine, executor = scripted(opened)
    executor.pause_s = 0.02
    with live(engine, replace(SHORT, drain_s=0.3)) as running:
        executor.say("b" * 400, running.n_prompt(), ends=False)
        with asking(running, "hello", stream=is_streamed) as replies:
            eventually(lambda: len(executor.batches) > 3, "runs")
            assert running.call(running.service.drain()) == 1
        reply = replies[0].result()
        assert reply.status_code == (200 if is_streamed else 503)
        assert "the server is stopping" in reply.text
        assert "[DONE]" not in reply.text


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_a_stream_finish_and_ends_the_process(directory: Path, number: int) -> None:
    command = [sys.executable, "-m", "bytefloor.cli", "serve", "-m", str(directory), "--port", "0"]
    child = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "COLUMNS": "200"})
    try:
        assert child.stderr is not None
        address = next(line for line in child.stderr if line.startswith("http")).split(",")[0].strip()
        asked = {"messages": user("go on"), "stream": True, "temperature": 0.9, "seed": 1, "max_tokens": 80}
        asked |= {"logit_bias": {"1": -100}}
        with httpx.stream("POST", f"{address}/chat/completions", json=asked, timeout=60) as reply:
            lines = reply.iter_lines()
            seen = [next(lines) for _ in range(6)]
            child.send_signal(number)
            seen += list(lines)
        assert seen[-2] == "data: [DONE]"
        assert '"finish_reason":"length"' in "".join(seen)
        assert child.wait(20) == 0
        events = [json.loads(line)["event"] for line in child.stderr if line.startswith("{")]
        assert [event for event in events if event.startswith("stop")] == ["stopping", "stopped"]
    finally:
        child.kill()
        child.wait()


def test_a_broken_engine_ends_the_process_with_status_1(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """V05: whoever supervises it starts another. While it serves, nobody looks for garbage in what was there before."""
    monkeypatch.setattr(process, "GRACE_S", 0.5)
    engine, executor = scripted(opened)
    executor.failure = KernelError("gone")
    service, bound = Service(engine, SHORT), process.bind("127.0.0.1", 0)
    n_frozen: list[int] = []
    client = httpx.Client(base_url=f"http://127.0.0.1:{bound.getsockname()[1]}", timeout=30)

    def is_up() -> bool:
        try:
            return client.get("/health").status_code == 200
        except httpx.TransportError:
            return False

    def ask() -> list[int]:
        eventually(is_up, "started")
        n_frozen.append(gc.get_freeze_count())
        return [client.post(CHAT, json={"messages": user("hi")}).status_code, client.get("/health").status_code]

    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask)
        assert asyncio.run(asyncio.wait_for(process.serve(service, bound), 60)) == 1
        assert asked.result() == [500, 503]
    assert n_frozen[0] > 10_000 > gc.get_freeze_count() == 0
    client.close()
