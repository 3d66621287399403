"""The loop: schedule, run, postprocess."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor

from bytefloor.engine.batch import Batch
from bytefloor.engine.cache import CachePlan, SequenceCache, make_pools
from bytefloor.engine.decode_loop import N_AHEAD, DecodeLoop
from bytefloor.engine.prefix import PrefixStore
from bytefloor.engine.request import Delta, Finish, Load, Reading, Request
from bytefloor.engine.sampler import Sampled
from bytefloor.engine.scheduler import Scheduler
from bytefloor.engine.sequence import SequenceState
from bytefloor.errors import CapacityError, NumericalError, RequestError
from bytefloor.model.step import Step
from bytefloor.text.tokenizer import Tokenizer


class Executor(Protocol):
    """What the engine needs of whoever computes."""

    step: Step
    plan: CachePlan
    device: torch.device

    def run(self, batch: Batch) -> Tensor: ...

    def make_loop(self) -> DecodeLoop | None:
        """What decodes one sequence without the host in between; None where nothing can."""
        ...


def never_sampled(tokenizer: Tokenizer, vocabulary_size: int) -> frozenset[int]:
    """Suppressed tokens, and rows of the table beyond the last token, which nobody could read."""
    return tokenizer.suppressed_ids | frozenset(range(tokenizer.n_tokens, vocabulary_size))


class Engine:
    """Runs requests on an executor, several at once, each as if it were alone.

    Every request's tokens depend on its own prompt, parameters and seed only. Finished sequences leave their cache in
    a store of prefixes, which a later prompt that begins alike continues from.
    """

    def __init__(self, executor: Executor, tokenizer: Tokenizer, vocabulary_size: int) -> None:
        self.executor = executor
        self.tokenizer = tokenizer
        self.vocabulary_size = vocabulary_size
        self.banned_ids = never_sampled(tokenizer, vocabulary_size)
        self._kinds = executor.step.kinds
        self._pools = make_pools(executor.plan, self._kinds)
        self._prefixes = PrefixStore(executor.plan.n_snapshots)
        self._scheduler: Scheduler[SequenceState] = Scheduler(executor.plan.n_sequences, executor.plan.chunk)
        self._n_requests = 0
        self._loop = executor.make_loop()
        # Whose tokens go from the device to the device now, and whether the device has seen its page tables since.
        self._looping: SequenceState | None = None
        self._is_shown = False

    @property
    def capacity(self) -> int:
        """Positions a sequence may have, prompt and answer together."""
        return self.executor.plan.capacity

    def add(self, request: Request) -> int:
        """Queue a request; returns its id. RequestError when it cannot be served as asked."""
        self.check(request)
        self._n_requests += 1
        self._scheduler.add(SequenceState(self._n_requests, request, self.tokenizer, self.banned_ids))
        return self._n_requests

    def check(self, request: Request) -> None:
        """RequestError when it cannot be served as asked. Reads only what never changes: any thread may ask."""
        n_prompt = len(request.prompt_ids)
        if n_prompt == 0:
            raise RequestError("the prompt is empty: at least one token is needed")
        if n_prompt >= self.capacity:
            raise RequestError(
                f"the prompt has {n_prompt} tokens, the context holds {self.capacity}, of which one must be left "
                "for the answer; shorten the prompt or raise -c"
            )
        if request.max_tokens is not None and request.max_tokens < 1:
            raise RequestError(f"max_tokens is {request.max_tokens}, expected at least 1")
        for token in request.prompt_ids:
            if not 0 <= token < self.vocabulary_size:
                raise RequestError(f"prompt token {token} is outside the vocabulary of {self.vocabulary_size}")

    @property
    def load(self) -> Load:
        """Who waits, who runs, and the pages of each kind of layer, those of kept prefixes among the used ones."""
        pages = {name: (pool.n_pages - 1 - pool.n_free, pool.n_pages - 1) for name, pool in self._pools.items()}
        return Load(len(self._scheduler.waiting), len(self._scheduler.running), pages)

    def drop_running(self) -> set[int]:
        """After a step that raised: forget all that took part, since nobody knows how far it came.

        Their caches go with them. Returns the ids of those that wait, to which nothing has happened.
        """
        for sequence in list(self._scheduler.running):
            self._drop(sequence)
        return {sequence.request_id for sequence in self._scheduler.waiting}

    @property
    def has_work(self) -> bool:
        return bool(self._scheduler.waiting or self._scheduler.running)

    def generate(self, request: Request) -> Iterator[Delta]:
        """Serve one request, alone, to its end; several go through add and step. Closing the iterator cancels it."""
        if self.has_work:
            raise RequestError("generate serves one request alone, and others are under way; use add and step")
        request_id = self.add(request)
        try:
            while self.has_work:
                for delta in self.step():
                    if delta.request_id == request_id:
                        yield delta
                        if delta.finish is not None:
                            return
        finally:
            self.cancel(request_id)

    def step(self) -> list[Delta]:
        """One step of the model, and what it gave each request that took part."""
        for sequence in self._scheduler.admit():
            sequence.start(self._prefixes.find(sequence.ids) or self._empty_cache())
        planned = self._scheduler.plan()
        if not planned:
            return []
        if len(planned) == 1 and self._can_loop(planned[0][0]):
            sampled = self._decode_ahead(planned[0][0])
            if sampled is not None:
                return [self._take(planned[0][0], sampled)]
        self._leave_loop()
        batch, samplers = self._make_batch(planned)
        try:
            logits = self.executor.run(batch)
        except BaseException:
            # Rows may be half written: no cache of this batch can be trusted, so none is kept.
            for sequence, _ in planned:
                self._drop(sequence)
            raise
        for sequence, n_rows in planned:
            sequence.cache.commit(n_rows)
        rows = logits.float().cpu().numpy()
        return [self._postprocess(sequence, rows[i]) for i, sequence in enumerate(samplers)]

    def reading(self, request_id: int) -> Reading | None:
        """How far a request's prompt has been read, tokens of an earlier prefix included; None where there is none to
        read: before it has begun, once it has answered, when it is not there any more.

        It counts what the executor was given: a device may be some chunks behind.
        """
        found = (sequence for sequence in self._scheduler.running if sequence.request_id == request_id)
        return next((sequence.reading for sequence in found), None)

    def _can_loop(self, sequence: SequenceState) -> bool:
        """The first token is the host's: it belongs to the prompt's last step, and its sampler checks the request."""
        is_decoding = sequence.first_token_at is not None
        return self._loop is not None and is_decoding and self._loop.can_serve(sequence.request.sampling)

    def _decode_ahead(self, sequence: SequenceState) -> Sampled | None:
        """The next token, while the device begins the one after it. None where the host must do this one over."""
        loop = self._loop
        assert loop is not None
        try:
            if self._looping is not sequence:
                self._leave_loop()
                self._looping, self._is_shown = sequence, False
                loop.start(sequence.sampler, sequence.ids, len(sequence.request.prompt_ids))
            n_wanted = N_AHEAD if sequence.may_go_on(self.capacity) else 1
            while loop.n_under_way < n_wanted and self._launch(loop, sequence, loop.n_under_way + 1):
                pass
            sampled = loop.next()
        except BaseException:
            self._drop(sequence)
            raise
        if sampled is not None:
            sequence.cache.commit(1)
        return sampled

    def _launch(self, loop: DecodeLoop, sequence: SequenceState, n_rows: int) -> bool:
        """Start the last of the next n_rows steps. False, for one that is not needed yet, where pages are short."""
        if self._is_shown and sequence.cache.is_writable(n_rows):
            loop.launch(None)
            return True
        shown = Batch()
        try:
            self._with_pages(lambda: sequence.cache.show(shown, n_rows))
        except CapacityError:
            if n_rows == 1:
                raise
            return False
        loop.launch(shown)
        self._is_shown = True
        return True

    def _leave_loop(self) -> None:
        """Throw away what was computed ahead, and return the pages it took."""
        if self._looping is not None and self._loop is not None:
            self._loop.stop()
            self._looping.cache.rewind(self._looping.cache.length)
        self._looping = None

    def _empty_cache(self) -> SequenceCache:
        return SequenceCache(self.executor.plan, self._kinds, self._pools)

    def _make_batch(self, planned: list[tuple[SequenceState, int]]) -> tuple[Batch, list[SequenceState]]:
        """The rows, and the sequences that will get a token from them, in the order of the wanted rows."""
        batch, samplers = Batch(), []
        for sequence, n_rows in planned:
            is_last = n_rows == sequence.n_pending
            self._append(sequence, batch, n_rows, [n_rows - 1] if is_last else [])
            if is_last:
                samplers.append(sequence)
        return batch, samplers

    def _append(self, sequence: SequenceState, batch: Batch, n_rows: int, wanted: list[int]) -> None:
        start = sequence.cache.length
        rows = sequence.ids[start : start + n_rows]
        self._with_pages(lambda: sequence.cache.append_rows(batch, rows, wanted))

    def _with_pages(self, take: Callable[[], None]) -> None:
        """Old prefixes give up their pages before a running sequence goes without."""
        while True:
            try:
                return take()
            except CapacityError:
                if not self._prefixes.evict():
                    raise

    def _postprocess(self, sequence: SequenceState, logits: object) -> Delta:
        try:
            sampled = sequence.sample(logits)
        except (NumericalError, RequestError) as error:
            # One request's trouble is its own: the rest of the batch goes on. Keys and values behind broken logits
            # are worthless, so the cache goes.
            self._drop(sequence)
            return Delta(sequence.request_id, "", None, sequence.finish("error", str(error)))
        return self._take(sequence, sampled)

    def _take(self, sequence: SequenceState, sampled: Sampled) -> Delta:
        is_prompt_done = sequence.first_token_at is None
        delta = sequence.accept(sampled, self.capacity)
        computed = sequence.ids[: sequence.cache.length]
        if is_prompt_done:
            self._prefixes.put(computed, sequence.cache.fork())
        if delta.finish is not None:
            self._remove(sequence)
            self._prefixes.put(computed, sequence.cache)
        return delta

    def _remove(self, sequence: SequenceState) -> None:
        if sequence is self._looping:
            self._leave_loop()
        self._scheduler.remove(sequence)

    def _drop(self, sequence: SequenceState) -> None:
        self._remove(sequence)
        if sequence.has_started:
            sequence.cache.free()

    def cancel(self, request_id: int) -> Finish | None:
        """End a request now; None when it is not there any more. What it computed stays usable as a prefix."""
        for sequence in (*self._scheduler.running, *self._scheduler.waiting):
            if sequence.request_id == request_id:
                finish = sequence.finish("cancelled", "cancelled")
                self._remove(sequence)
                if sequence.has_started:
                    self._prefixes.put(sequence.ids[: sequence.cache.length], sequence.cache)
                return finish
        return None
