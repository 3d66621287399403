"""The loop: schedule, run, postprocess."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from bytefloor.engine.batch import Batch, PageCopy
from bytefloor.engine.cache import CachePlan
from bytefloor.engine.decode_loop import N_AHEAD, DecodeLoop
from bytefloor.engine.embedding import EmbeddingState
from bytefloor.engine.pages import Pages, PageUse
from bytefloor.engine.request import Delta, EmbeddingRequest, Finish, Reading, Request
from bytefloor.engine.sampler import Sampled
from bytefloor.engine.scheduler import Scheduler
from bytefloor.engine.sequence import SequenceState
from bytefloor.errors import BytefloorError, CapacityError, NumericalError, RequestError
from bytefloor.model.step import Step
from bytefloor.text.tokenizer import Tokenizer


class Executor(Protocol):
    """What the engine needs of whoever computes."""

    step: Step
    plan: CachePlan
    device: torch.device

    def run(self, batch: Batch) -> Tensor: ...

    def sum_hidden(self, batch: Batch) -> Tensor:
        """Float64 [B, D]: of each sequence the sum over its rows of what the model's head gets."""
        ...

    def make_loop(self) -> DecodeLoop | None:
        """What decodes one sequence without the host in between; None where nothing can."""
        ...


def never_sampled(tokenizer: Tokenizer, vocabulary_size: int) -> frozenset[int]:
    """Suppressed tokens, and rows of the table beyond the last token, which nobody could read."""
    return tokenizer.suppressed_ids | frozenset(range(tokenizer.n_tokens, vocabulary_size))


@dataclass(frozen=True)
class Load:
    """How busy an engine is. n_preempted: how often, since it began, a sequence had to give its pages to an older one.

    pages: of each cache kind.
    """

    n_running: int
    n_waiting: int
    n_preempted: int
    pages: dict[str, PageUse]


class Engine:
    """Runs requests on an executor, several at once, each as if it were alone.

    Every request's tokens depend on its own prompt, parameters and seed only. Finished sequences leave their cache in
    a store of prefixes, which a later prompt that begins alike continues from. Where pages are short requests wait, or
    wait once more and are computed again; none is lost.
    """

    def __init__(self, executor: Executor, tokenizer: Tokenizer, vocabulary_size: int) -> None:
        self.executor = executor
        self.tokenizer = tokenizer
        self.vocabulary_size = vocabulary_size
        self.banned_ids = never_sampled(tokenizer, vocabulary_size)
        self._pages = Pages(executor.plan, executor.step.kinds)
        self._scheduler: Scheduler[SequenceState | EmbeddingState] = Scheduler(
            executor.plan.n_sequences, executor.plan.chunk
        )
        self._n_requests = 0
        self._loop = executor.make_loop()
        # Whose tokens go from the device to the device now, and whether the device has seen its page tables since.
        self._looping: SequenceState | None = None
        self._is_shown = False

    @property
    def capacity(self) -> int:
        """Positions a sequence may have, prompt and answer together."""
        return self.executor.plan.capacity

    def add(self, request: Request | EmbeddingRequest) -> int:
        """Queue a request; returns its id. RequestError when it cannot be served as asked."""
        self.check(request)
        self._n_requests += 1
        if isinstance(request, EmbeddingRequest):
            self._scheduler.add(EmbeddingState(self._n_requests, request))
        else:
            self._scheduler.add(SequenceState(self._n_requests, request, self.tokenizer, self.banned_ids))
        return self._n_requests

    def check(self, request: Request | EmbeddingRequest) -> None:
        """RequestError when it cannot be served as asked. Reads only what never changes: any thread may ask."""
        n_prompt = len(request.prompt_ids)
        if n_prompt == 0:
            raise RequestError("the prompt is empty: at least one token is needed")
        for token in request.prompt_ids:
            if not 0 <= token < self.vocabulary_size:
                raise RequestError(f"prompt token {token} is outside the vocabulary of {self.vocabulary_size}")
        if isinstance(request, EmbeddingRequest):
            if n_prompt > self.capacity:
                raise RequestError(f"the text has {n_prompt} tokens, the context holds {self.capacity}: raise -c")
            return
        if n_prompt >= self.capacity:
            raise RequestError(
                f"the prompt has {n_prompt} tokens, the context holds {self.capacity}, of which one must be left "
                "for the answer; shorten the prompt or raise -c"
            )
        if request.max_tokens is not None and request.max_tokens < 1:
            raise RequestError(f"max_tokens is {request.max_tokens}, expected at least 1")
        if request.grammar is not None and request.ignores_end:
            raise RequestError("a grammar and ignores_end exclude each other: a grammar says where the answer ends")
        if request.grammar is not None and request.grammar.tokenizer is not self.tokenizer:
            raise RequestError("the grammar was compiled for another tokenizer")

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

    @property
    def load(self) -> Load:
        """How many run and wait, and what the pages hold."""
        scheduler, pages = self._scheduler, self._pages
        return Load(len(scheduler.running), len(scheduler.waiting), pages.n_preempted, pages.use())

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
        self._scheduler.admit(self._begin)
        planned = self._scheduler.plan()
        if not planned:
            return []
        first = planned[0][0]
        if len(planned) == 1 and isinstance(first, SequenceState) and self._can_loop(first):
            sampled = self._decode_ahead(first)
            if sampled is not None:
                return [self._take(first, sampled)]
        self._leave_loop()
        settled = self._pages.settle(planned, self._scheduler)
        deltas = [self._fail(sequence, error) for sequence, error in settled.lacking]
        answers = [(sequence, n) for sequence, n in settled.rows if isinstance(sequence, SequenceState)]
        texts = [(sequence, n) for sequence, n in settled.rows if isinstance(sequence, EmbeddingState)]
        # Copies come first, and with answers: what is embedded shares no page.
        deltas += self._run(answers, settled.copies) if answers else []
        return deltas + (self._embed(texts) if texts else [])

    def _begin(self, sequence: SequenceState | EmbeddingState) -> bool:
        """Whether there are pages for a sequence beside those that run; then it has begun."""
        is_new = isinstance(sequence, EmbeddingState)
        cache = self._pages.begin(sequence.ids, self._scheduler.running, is_new=is_new)
        if cache is not None:
            sequence.start(cache)
        return cache is not None

    def _run(self, rows: list[tuple[SequenceState, int]], copies: list[PageCopy]) -> list[Delta]:
        """Compute rows whose pages are there, and take what the last one of each sequence gives."""
        batch, samplers = self._make_batch(rows, copies)
        try:
            logits = self.executor.run(batch)
        except BaseException:
            # Rows may be half written: no cache of this batch can be trusted, so none is kept.
            for sequence, _ in rows:
                self._drop(sequence)
            raise
        for sequence, n_rows in rows:
            sequence.cache.commit(n_rows)
        for sequence in samplers:
            # A device is still at its work.
            if sequence.constraint is not None:
                sequence.constraint.prepare()
        found = logits.float().cpu().numpy()
        return [self._postprocess(sequence, found[i]) for i, sequence in enumerate(samplers)]

    def _embed(self, rows: list[tuple[EmbeddingState, int]]) -> list[Delta]:
        """Add up rows whose pages are there; pages of a text that is whole come back at once."""
        batch = Batch()
        for text, n_rows in rows:
            start = text.cache.length
            text.cache.append_rows(batch, text.ids[start : start + n_rows], [])
        try:
            sums = self.executor.sum_hidden(batch).cpu()
        except BaseException:
            for text, _ in rows:
                self._drop(text)
            raise
        deltas = []
        for (text, n_rows), sum_hidden in zip(rows, sums, strict=True):
            text.take(sum_hidden)
            text.cache.commit(n_rows)
            if not text.n_pending:
                deltas.append(text.last())
                self._drop(text)
        return deltas

    def reading(self, request_id: int) -> Reading | None:
        """How far a request's prompt has been read, tokens of an earlier prefix included; None where there is none to
        read: before it has begun, while it waits for pages, once it has answered, when it is not there any more.

        It counts what the executor was given: a device may be some chunks behind.
        """
        found = (sequence for sequence in self._scheduler.running if sequence.request_id == request_id)
        return next((sequence.reading for sequence in found), None)

    def _can_loop(self, sequence: SequenceState) -> bool:
        """The first token is the host's: it belongs to the prompt's last step, and its sampler checks the request.

        One that lost its pages has many tokens to compute first, though it has answered. Under a grammar all are the
        host's: the next mask needs the token before it. So are those that close a thought.
        """
        is_decoding = sequence.first_token_at is not None and sequence.n_pending == 1 and sequence.has_free_choice
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
            sampled = loop.next() if loop.n_under_way else None
        except BaseException:
            self._drop(sequence)
            raise
        if sampled is not None:
            sequence.cache.commit(1)
        return sampled

    def _launch(self, loop: DecodeLoop, sequence: SequenceState, n_rows: int) -> bool:
        """Start the last of the next n_rows steps. False where pages are short: one ahead can wait, and where not even
        the next has a page, the plain road says who gives way."""
        if self._is_shown and sequence.cache.is_writable(n_rows):
            loop.launch(None)
            return True
        shown = Batch()
        try:
            shown.copies.extend(self._pages.reserve(sequence.cache, n_rows))
        except CapacityError:
            return False
        sequence.cache.show(shown, n_rows)
        loop.launch(shown)
        self._is_shown = True
        return True

    def _leave_loop(self) -> None:
        """Throw away what was computed ahead, and return the pages it took."""
        if self._looping is not None and self._loop is not None:
            self._loop.stop()
            self._looping.cache.rewind(self._looping.cache.length)
        self._looping = None

    def _make_batch(
        self, planned: list[tuple[SequenceState, int]], copies: list[PageCopy]
    ) -> tuple[Batch, list[SequenceState]]:
        """The rows, and the sequences that will get a token from them, in the order of the wanted rows."""
        batch, samplers = Batch(copies=copies), []
        for sequence, n_rows in planned:
            is_last = n_rows == sequence.n_pending
            start = sequence.cache.length
            sequence.cache.append_rows(batch, sequence.ids[start : start + n_rows], [n_rows - 1] if is_last else [])
            if is_last:
                samplers.append(sequence)
        return batch, samplers

    def _postprocess(self, sequence: SequenceState, logits: object) -> Delta:
        try:
            sampled = sequence.sample(logits)
        except (NumericalError, RequestError) as error:
            # One request's trouble is its own: the rest of the batch goes on. Keys and values behind broken logits
            # are worthless, so the cache goes.
            return self._fail(sequence, error)
        return self._take(sequence, sampled)

    def _fail(self, sequence: SequenceState | EmbeddingState, error: BytefloorError) -> Delta:
        self._drop(sequence)
        return Delta(sequence.request_id, "", None, sequence.finish("error", str(error)))

    def _take(self, sequence: SequenceState, sampled: Sampled) -> Delta:
        is_prompt_done = sequence.first_token_at is None
        delta = sequence.accept(sampled, self.capacity)
        computed = sequence.ids[: sequence.cache.length]
        if is_prompt_done:
            self._pages.prefixes.put(computed, sequence.cache.fork())
        if delta.finish is not None:
            self._remove(sequence)
            self._pages.prefixes.put(computed, sequence.cache)
        return delta

    def _remove(self, sequence: SequenceState | EmbeddingState) -> None:
        if sequence is self._looping:
            self._leave_loop()
        self._scheduler.remove(sequence)

    def _drop(self, sequence: SequenceState | EmbeddingState) -> None:
        self._remove(sequence)
        if sequence.has_started:
            sequence.cache.free()

    def cancel(self, request_id: int) -> Finish | None:
        """End a request now; None when it is not there any more. What it computed stays usable as a prefix."""
        for sequence in (*self._scheduler.running, *self._scheduler.waiting):
            if sequence.request_id == request_id:
                finish = sequence.finish("cancelled", "cancelled")
                if isinstance(sequence, EmbeddingState):
                    self._drop(sequence)
                    return finish
                self._remove(sequence)
                if sequence.has_started:
                    self._pages.prefixes.put(sequence.ids[: sequence.cache.length], sequence.cache)
                return finish
        return None
