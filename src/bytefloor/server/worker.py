"""One thread owns the engine; everybody else hands requests to it and gets deltas back on the event loop."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable

import torch

from bytefloor.engine.engine import Engine
from bytefloor.engine.kernels import current
from bytefloor.engine.pages import Load
from bytefloor.engine.request import Delta, EmbeddingRequest, Finish, FinishReason, Reading, Request
from bytefloor.errors import KernelError
from bytefloor.server.mailbox import Mailbox

LOG = logging.getLogger("bytefloor.server")
STREAM_S = 2.5e-4
"""To wake a stream and write to its socket takes the loop a quarter of this, of python's time which the thread wants
that keeps the device at work. So texts of n streams go out together, at most every n times this."""
MOST_TURNS = 4
"""Steps that a request lets pass at most before it is read."""
MAX_FAILURES = 3
"""So many steps that fail one after another are the engine's fault, not a request's."""

Mail = Mailbox["tuple[Handle, Delta]"]


class Unavailable(Exception):
    """The worker takes no requests any more; the message says why."""


class Handle:
    """A request in the worker's hands. Its deltas come in order into the mailbox, the last one with a finish.

    Several handles may share a mailbox. Times are those of ``time.perf_counter``.
    """

    def __init__(self, request: Request | EmbeddingRequest, mailbox: Mail) -> None:
        self.request = request
        self.mailbox = mailbox
        self.submitted_at = time.perf_counter()
        self.first_token_at: float | None = None
        self.finish: Finish | None = None
        # Of the worker's thread alone.
        self.request_id: int | None = None
        self.n_generated = 0

    def end(self, reason: FinishReason, detail: str) -> Delta:
        """The last delta of a request that ends outside of the engine."""
        finish = Finish(reason, detail, len(self.request.prompt_ids), 0, self.n_generated, 0.0, 0.0, 0)
        return Delta(self.request_id or 0, "", None, finish)


class Worker:
    """Runs an engine in a thread. Its methods are called on one event loop, where deltas arrive too.

    watch: sees a step's deltas on the loop, before their handles note them; also those that nobody reads any more.
    on_broken: called on the loop when the engine cannot go on.
    """

    def __init__(self, engine: Engine) -> None:
        self.load: Load = engine.load
        self.broken: str | None = None
        self.watch: Callable[[list[tuple[Handle, Delta]]], None] | None = None
        self.on_broken: Callable[[], None] | None = None
        self._engine = engine
        self._loop: asyncio.AbstractEventLoop | None = None
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._open: set[Handle] = set()
        self._at_gate: list[asyncio.Future[None]] = []
        # Set by the thread: whether it leaves python to others.
        self._is_waiting = True
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._is_stopping = False
        # Of the worker's thread alone.
        self._handles: dict[int, Handle] = {}
        self._outbox: list[tuple[Handle, Delta]] = []
        self._is_urgent, self._sent_at = False, 0.0
        engine.on_wait = self._on_wait
        self._n_failures = 0
        self._is_over = False

    # On the event loop ------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to work for the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    @property
    def n_open(self) -> int:
        """Requests that have not ended."""
        return len(self._open)

    async def submit(self, request: Request | EmbeddingRequest, mailbox: Mail | None = None) -> Handle:
        """Queue a request; returns when the engine has taken it, which may be a step later.

        RequestError when it cannot be served as asked, Unavailable when nothing can.
        """
        assert self._loop is not None, "start comes first"
        if self._is_stopping:
            raise Unavailable("the server is stopping")
        handle = Handle(request, mailbox if mailbox is not None else Mailbox())
        self._open.add(handle)
        self._is_idle.clear()
        taken: asyncio.Future[None] = self._loop.create_future()
        self._commands.put(lambda: self._add(handle, taken))
        try:
            await taken
        except asyncio.CancelledError:
            self.cancel(handle)
            raise
        except BaseException:
            self._close(handle)
            raise
        return handle

    async def turn(self) -> None:
        """Wait until the engine's thread waits for the device, or has nothing to do. It keeps the gate open until its
        next step: what it makes of a step's tokens is less than a request.

        Two threads that both want python take it from each other at every operation of torch, and a step that takes the
        thread a millisecond takes thirty while requests are read.
        """
        assert self._loop is not None
        for _ in range(MOST_TURNS):
            if self._is_waiting:
                return
            gate: asyncio.Future[None] = self._loop.create_future()
            self._at_gate.append(gate)
            if self._is_waiting:  # since a moment ago, and it may have seen nobody here
                self._open_gate()
            await gate

    def _open_gate(self) -> None:
        waiting, self._at_gate = self._at_gate, []
        for gate in waiting:
            _settle(gate, None)

    def cancel(self, handle: Handle) -> None:
        """End a request before the next step; nothing happens to one that has ended."""
        if handle in self._open:
            self._commands.put(lambda: self._cancel(handle))

    def reading(self, handle: Handle) -> Reading | None:
        """How far a prompt has been read, see `Engine.reading`. It only looks, which needs no turn of the thread's."""
        return None if handle.request_id is None else self._engine.reading(handle.request_id)

    async def drain(self, limit_s: float) -> int:
        """Wait until all have ended, cancel what has not after the limit; returns how many those were."""
        try:
            async with asyncio.timeout(limit_s):
                await self._is_idle.wait()
        except TimeoutError:
            late = list(self._open)
            for handle in late:
                self.cancel(handle)
            await self._is_idle.wait()
            return len(late)
        return 0

    async def stop(self) -> None:
        """Cancel everything and end the thread."""
        self._is_stopping = True
        self._commands.put(self._stop)
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join)
        # What the thread has posted at last is on the loop by now, before what this sleep puts there.
        await asyncio.sleep(0)

    def _deliver(self, deltas: list[tuple[Handle, Delta]]) -> None:
        if self.watch is not None:
            self.watch(deltas)
        now = time.perf_counter()
        for handle, delta in deltas:
            if delta.sampled is not None and handle.first_token_at is None:
                handle.first_token_at = now
            if delta.finish is not None:
                handle.finish = delta.finish
                self._close(handle)
            handle.mailbox.put((handle, delta))

    def _close(self, handle: Handle) -> None:
        self._open.discard(handle)
        if not self._open:
            self._is_idle.set()

    # In the thread ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        device = self._engine.executor.device
        with current(device):
            if device.type == "cuda":
                # Kernels are launched past torch, which would otherwise make the context this thread's own.
                torch.cuda.synchronize()
            self._serve()

    def _serve(self) -> None:
        while not self._is_over:
            self._take_commands()
            if self._can_step:
                self._is_waiting = False
                self._step()
            if not self._can_step:
                self._leave_python()
            self.load = self._engine.load
        for handle in list(self._handles.values()):
            self._cancel(handle)

    @property
    def _can_step(self) -> bool:
        return self.broken is None and self._engine.has_work

    def _take_commands(self) -> None:
        """All that are there; waits for one when there is nothing else to do."""
        if not self._can_step:
            self._commands.get()()
        while True:
            try:
                self._commands.get_nowait()()
            except queue.Empty:
                return

    def _add(self, handle: Handle, taken: asyncio.Future[None]) -> None:
        try:
            if self.broken is not None:
                raise Unavailable(self.broken)
            handle.request_id = self._engine.add(handle.request)
            self._handles[handle.request_id] = handle
        except Exception as error:
            self._post(_settle, taken, error)
        else:
            self._post(_settle, taken, None)

    def _cancel(self, handle: Handle) -> None:
        if handle.request_id is None:  # the engine had refused it
            self._post(self._close, handle)
            return
        if self._handles.pop(handle.request_id, None) is None:
            return
        try:
            finish = None if self.broken is not None else self._engine.cancel(handle.request_id)
        except Exception as error:
            self._break(error)
            return
        delta = handle.end("cancelled", "cancelled")
        self._send([(handle, delta if finish is None else Delta(handle.request_id, "", None, finish))])

    def _stop(self) -> None:
        self._is_over = True

    def _step(self) -> None:
        try:
            deltas = self._engine.step()
        except BaseException as error:  # in this thread nothing else could report it
            self._fail(error)
            return
        self._n_failures = 0
        found = [(self._handles[delta.request_id], delta) for delta in deltas if delta.request_id in self._handles]
        self._put_out(found)
        if not self._can_step:
            self._flush()

    def _fail(self, error: BaseException) -> None:
        """A step raised: those that took part end with an error, those that wait go on."""
        LOG.error("a step failed", exc_info=error)
        self._n_failures += 1
        if _is_fatal(error) or self._n_failures >= MAX_FAILURES:
            self._break(error)
            return
        try:
            waiting = self._engine.drop_running()
        except Exception as second:
            self._break(second)
            return
        self._end([handle for request_id, handle in self._handles.items() if request_id not in waiting], error)

    def _break(self, error: BaseException) -> None:
        """The engine cannot be trusted any more: everybody is told, and nothing is begun."""
        LOG.critical("the engine is broken", exc_info=error)
        self.broken = f"the engine is broken: {_named(error)}"
        self._end(list(self._handles.values()), error)
        if self.on_broken is not None:
            self._post(self.on_broken)

    def _end(self, handles: list[Handle], error: BaseException) -> None:
        for handle in handles:
            assert handle.request_id is not None
            del self._handles[handle.request_id]
        detail = f"a step of the engine failed: {_named(error)}"
        self._send([(handle, handle.end("error", detail)) for handle in handles])

    def _send(self, deltas: list[tuple[Handle, Delta]]) -> None:
        self._put_out(deltas)
        self._flush()

    def _put_out(self, deltas: list[tuple[Handle, Delta]]) -> None:
        for handle, delta in deltas:
            handle.n_generated += delta.sampled is not None
            self._is_urgent |= handle.n_generated <= 1 or delta.finish is not None
            if delta.finish is not None and handle.request_id is not None:
                self._handles.pop(handle.request_id, None)
        self._outbox += deltas

    def _on_wait(self, is_short: bool) -> None:
        """The loop's thread, which shares python with this one, has its work while this one waits for the device."""
        self._leave_python()
        is_due = time.perf_counter() - self._sent_at >= STREAM_S * len(self._handles)
        if is_due or self._is_urgent or not is_short:
            self._flush()

    def _leave_python(self) -> None:
        self._is_waiting = True
        if self._at_gate:
            self._post(self._open_gate)

    def _flush(self) -> None:
        """One call into the loop a step, however many requests took part."""
        if self._outbox:
            # Whoever hears of an end finds it in the figures too.
            self.load = self._engine.load
            deltas, self._outbox = self._outbox, []
            self._is_urgent, self._sent_at = False, time.perf_counter()
            self._post(self._deliver, deltas)

    def _post(self, call: Callable[..., None], *arguments: object) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(call, *arguments)
        except RuntimeError:  # the loop is closed: there is nobody to answer to
            self._is_over = True


def _settle(taken: asyncio.Future[None], error: Exception | None) -> None:
    if taken.done():  # whoever asked has gone
        return
    if error is None:
        taken.set_result(None)
    else:
        taken.set_exception(error)


def _named(error: BaseException) -> str:
    words = str(error).strip().splitlines()
    return f"{type(error).__name__}: {words[0]}" if words else type(error).__name__


def _is_fatal(error: BaseException) -> bool:
    """A device whose context is lost, a kernel that cannot run, an interpreter that is going down."""
    if not isinstance(error, Exception) or isinstance(error, (KernelError, torch.AcceleratorError)):
        return True
    return isinstance(error, RuntimeError) and "CUDA error" in str(error)
