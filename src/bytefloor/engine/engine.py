"""The loop: schedule, run, postprocess."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from bytefloor.engine.ahead import Ahead
from bytefloor.engine.batch import Batch, PageCopy
from bytefloor.engine.decode_loop import N_AHEAD, DecodeLoop
from bytefloor.engine.drafting import Drafting, Drafts
from bytefloor.engine.embedding import EmbeddingState, Rows, add_up, parted
from bytefloor.engine.executor import Executor
from bytefloor.engine.pages import Load, Pages
from bytefloor.engine.request import Delta, EmbeddingRequest, Finish, Reading, Request
from bytefloor.engine.request_check import check_request
from bytefloor.engine.row_sampler import Draw
from bytefloor.engine.sampler import Sampled, never_sampled
from bytefloor.engine.scheduler import Scheduler
from bytefloor.engine.sequence import SequenceState
from bytefloor.engine.speculation import LINGER, Speculation
from bytefloor.errors import BytefloorError, CapacityError, NumericalError, RequestError
from bytefloor.text.tokenizer import Tokenizer


class Engine:
    """Runs requests on an executor, several at once, each as if it were alone.

    Every request's tokens depend on its own prompt, parameters and seed only. Finished sequences leave their cache in
    a store of prefixes, which a later prompt that begins alike continues from. Where pages are short requests wait, or
    wait once more and are computed again; none is lost.

    speculation: says which drafts are worth computing; without one, and where the executor takes none, there are none.
    on_wait: called in a step, when there is nothing to do but wait for the device: with True where that takes no longer
    than a token does.
    """

    def __init__(
        self, executor: Executor, tokenizer: Tokenizer, vocabulary_size: int, speculation: Speculation | None = None
    ) -> None:
        self.executor = executor
        self.tokenizer = tokenizer
        self.vocabulary_size = vocabulary_size
        self.banned_ids = never_sampled(tokenizer, vocabulary_size)
        self._pages = Pages(executor.plan, executor.step.kinds)
        plan = executor.plan
        self._scheduler: Scheduler[SequenceState | EmbeddingState] = Scheduler(
            plan.n_sequences, plan.chunk, plan.n_together
        )
        self._speculation = speculation or Speculation(1)
        self._drafting = Drafting(self._speculation, self._scheduler, self._pages, self.capacity)
        self._n_requests = 0
        self.on_wait: Callable[[bool], None] = lambda is_short: None
        self._loop = executor.make_loop()
        batch_loop = executor.make_batch_loop()
        if batch_loop is not None:
            batch_loop.on_wait = lambda: self.on_wait(False)
        self._ahead = Ahead(batch_loop, self._pages, self.capacity)
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
        check_request(request, self.capacity, self.vocabulary_size, self.tokenizer)

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
        whole = [(each, n) for each, n_most in self._scheduler.plan() if (n := each.cache.together(n_most))]
        planned, texts = parted(whole)
        if self._ahead.is_under_way:
            return self._step_together([] if texts else planned)
        if not whole:
            return []
        if texts:
            return self._step_with_texts(whole)
        if self._ahead.can_serve(planned):
            self._leave_loop()
            if self._launch_together(planned):
                return self._step_together(planned)
        # Where tokens go from device to device, each sequence's drafts would be a pass over the weights of their own.
        may_draft = self._loop is None or len(planned) == 1
        drafts = self._drafting.propose(planned, self._looping is not None) if may_draft else {}
        if not drafts and len(planned) == 1 and self._can_loop(planned[0][0]):
            delta = self._step_ahead(planned[0][0])
            if delta is not None:
                return [delta]
        was_looping = self._looping is not None
        self._leave_loop()
        settled, copies, deltas = self._settle(planned)
        rows, _ = parted(settled)
        if not rows:
            return deltas
        drafts = self._drafting.settle(drafts, rows, copies)
        # Where the loop is the plain way, its steps are what plain steps cost; none counts that waits for another.
        is_typical = all(sequence.is_decoding for sequence, _ in rows) and not was_looping
        is_typical &= bool(drafts) or len(rows) > 1 or not self._has_loop(rows[0][0])
        started = self._speculation.now()
        deltas += self._run(rows, copies, drafts)
        if is_typical:
            self._note(len(rows), sum(map(len, drafts.values())), started)
        return deltas

    def _step_together(self, planned: list[tuple[SequenceState, int]]) -> list[Delta]:
        """Start the next step of several sequences where it is one, and read the one before it."""
        if self._ahead.can_serve(planned):
            self._launch_together(planned)
        self.on_wait(True)
        try:
            found = self._ahead.read()
        except BaseException:
            self._drop_together()
            raise
        deltas: list[Delta] = []
        for sequence, sampled in found:
            if sampled is None:
                sequence.is_handed_back = True
            else:
                sequence.cache.commit(1)
                sequence.sampler.accept(sampled.id)
                deltas.append(self._take(sequence, sampled))
            if not sequence.chooses_freely:
                self._ahead.forget(sequence)
        return deltas

    def _launch_together(self, planned: list[tuple[SequenceState, int]]) -> bool:
        try:
            return self._ahead.launch(sequence for sequence, _ in planned)
        except BaseException:
            for sequence, _ in planned:
                self._drop(sequence)
            self._drop_together()
            raise

    def _drop_together(self) -> None:
        for sequence in self._ahead.clear():
            self._drop(sequence)

    def _settle(self, planned: Rows) -> tuple[Rows, list[PageCopy], list[Delta]]:
        """Rows whose pages are there, what is to be copied first, and who had to be ended."""
        settled = self._pages.settle(planned, self._scheduler)
        return settled.rows, settled.copies, [self._fail(sequence, error) for sequence, error in settled.lacking]

    def _step_with_texts(self, planned: Rows) -> list[Delta]:
        """A plain step of answers, without drafts, and of texts to be embedded, which have a pass of their own."""
        self._leave_loop()
        rows, copies, deltas = self._settle(planned)
        answers, texts = parted(rows)
        # Copies come first, and with answers: what is embedded shares no page.
        deltas += self._run(answers, copies, {}) if answers else []
        return deltas + (self._embed(texts) if texts else [])

    def _begin(self, sequence: SequenceState | EmbeddingState) -> bool:
        """Whether there are pages for a sequence beside those that run; then it has begun."""
        n_prompt = None if isinstance(sequence, EmbeddingState) else len(sequence.request.prompt_ids)
        cache = self._pages.begin(sequence.ids, self._scheduler.running, n_prompt)
        if cache is not None:
            sequence.start(cache)
        return cache is not None

    def _note(self, n_sequences: int, n_drafts: int, started: float) -> None:
        self._speculation.note(n_sequences, n_drafts, self._speculation.now() - started)

    def _run(self, rows: list[tuple[SequenceState, int]], copies: list[PageCopy], drafts: Drafts) -> list[Delta]:
        """Compute rows whose pages are there, and take what the last one of each sequence and its drafts give."""
        batch, samplers = self._make_batch(rows, copies, drafts)
        draws = {sequence: self._ahead.draw(sequence) for sequence in samplers}
        if self.executor.device.type == "cpu":  # whose work is done when it has been started
            self.on_wait(False)
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
        if self._speculation.is_on:
            for sequence, _ in rows:
                sequence.ngrams.take_in(sequence.cache.length)
        asked: dict[int, Draw] = {}
        places: dict[int, int] = {}
        firsts: dict[SequenceState, int] = {}
        end = 0
        for sequence in samplers:
            firsts[sequence], end = end, end + 1 + len(drafts.get(sequence, ()))
            if (draw := draws[sequence]) is not None:
                asked |= dict.fromkeys(range(firsts[sequence], end), draw)
                places |= {row: len(sequence.ids) - 1 + row - firsts[sequence] for row in range(firsts[sequence], end)}
        drawn = self._ahead.sample(logits, asked, places)
        self.on_wait(False)
        deltas: list[Delta] = []
        for sequence, first in firsts.items():
            draft = drafts.get(sequence, [])
            found = [drawn.get(row) for row in range(first, first + 1 + len(draft))]
            deltas += self._postprocess(sequence, found, logits[first : first + 1 + len(draft)], draft)
        return deltas

    def _embed(self, rows: list[tuple[EmbeddingState, int]]) -> list[Delta]:
        """Add up rows whose pages are there; pages of a text that is whole come back at once."""
        self.on_wait(False)
        try:
            add_up(rows, self.executor.sum_hidden)
        except BaseException:
            for text, _ in rows:
                self._drop(text)
            raise
        whole = [text for text, _ in rows if not text.n_pending]
        deltas = [text.last() for text in whole]
        for text in whole:
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
        """Not at once after a draft: the next one may follow, and leaving throws a step away."""
        return self._has_loop(sequence) and sequence.drafting.n_since >= LINGER

    def _has_loop(self, sequence: SequenceState) -> bool:
        """The first token is the host's: it belongs to the prompt's last step, and its sampler checks the request.

        One that lost its pages has many tokens to compute first, though it has answered. Under a grammar all are the
        host's: the next mask needs the token before it. So are those that close a thought.
        """
        is_decoding = sequence.is_decoding and sequence.has_free_choice
        return self._loop is not None and is_decoding and self._loop.can_serve(sequence.request.sampling)

    def _step_ahead(self, sequence: SequenceState) -> Delta | None:
        """The next token by the loop. None where the host must do this one over."""
        is_under_way = self._looping is sequence
        started = self._speculation.now()
        sampled = self._decode_ahead(sequence)
        if sampled is None:
            return None
        delta = self._take(sequence, sampled)
        if is_under_way:
            self._note(1, 0, started)
        return delta

    def _decode_ahead(self, sequence: SequenceState) -> Sampled | None:
        """The next token, while the device begins the one after it. None where the host must do this one over."""
        loop = self._loop
        assert loop is not None
        try:
            if self._looping is not sequence:
                self._leave_loop()
                self._looping, self._is_shown = sequence, False
                n_prompt, dropped = len(sequence.request.prompt_ids), sequence.cache.dropped
                loop.start(sequence.sampler, sequence.ids, n_prompt, dropped)
            n_wanted = N_AHEAD if sequence.may_go_on(self.capacity) else 1
            while loop.n_under_way < n_wanted and self._launch(loop, sequence, loop.n_under_way + 1):
                pass
            self.on_wait(True)
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
        self, planned: list[tuple[SequenceState, int]], copies: list[PageCopy], drafts: Drafts
    ) -> tuple[Batch, list[SequenceState]]:
        """The rows, and the sequences that will get tokens from them, in the order of the wanted rows."""
        batch, samplers = Batch(copies=copies), []
        for sequence, n_rows in planned:
            is_last = n_rows == sequence.n_pending
            start = sequence.cache.length
            ids = [*sequence.ids[start : start + n_rows], *drafts.get(sequence, ())]
            sequence.cache.append_rows(batch, ids, range(n_rows - 1, len(ids)) if is_last else ())
            if is_last:
                samplers.append(sequence)
        return batch, samplers

    def _postprocess(
        self, sequence: SequenceState, found: Sequence[Sampled | None], logits: Tensor, draft: list[int]
    ) -> list[Delta]:
        """found: of 1 + drafts rows what the device has drawn; None where that is the host's, from logits, a row each.

        A row counts for as long as the drafts before it are what was drawn.
        """
        deltas: list[Delta] = []
        sequence.drafting.n_draft += len(draft)
        n_accepted = 0
        for row, drawn in enumerate(found):
            if deltas:
                sequence.cache.commit(1)
            try:
                if drawn is not None and sequence.has_free_choice:
                    sampled = drawn
                    sequence.sampler.accept(sampled.id)
                else:
                    sampled = sequence.sample(logits[row].float().cpu().numpy())
            except (NumericalError, RequestError) as error:
                # One request's trouble is its own: the rest of the batch goes on. Keys and values behind broken logits
                # are worthless, so the cache goes.
                return [*deltas, self._fail(sequence, error)]
            sequence.is_handed_back = False
            is_right = draft[n_accepted : n_accepted + 1] == [sampled.id]
            n_accepted += is_right
            sequence.drafting.n_draft_accepted += is_right
            deltas.append(self._take(sequence, sampled))
            if deltas[-1].finish is not None:
                return deltas
            if not is_right:
                break
        if draft:
            sequence.drafting.judge(len(draft), n_accepted)
            sequence.cache.rewind(sequence.cache.length)
        return deltas

    def _fail(self, sequence: SequenceState | EmbeddingState, error: BytefloorError) -> Delta:
        self._drop(sequence)
        return Delta(sequence.request_id, "", None, sequence.finish("error", str(error)))

    def _take(self, sequence: SequenceState, sampled: Sampled) -> Delta:
        is_prompt_done = sequence.first_token_at is None
        delta = sequence.accept(sampled, self.capacity)
        if is_prompt_done:
            self._pages.prefixes.put(sequence.ids[: sequence.cache.length], sequence.cache.fork())
        if delta.finish is not None:
            self._remove(sequence)
            # Pages of drafts that nobody needs any more.
            sequence.cache.rewind(sequence.cache.length)
            self._pages.prefixes.put(sequence.ids[: sequence.cache.length], sequence.cache)
        return delta

    def _remove(self, sequence: SequenceState | EmbeddingState) -> None:
        if sequence is self._looping:
            self._leave_loop()
        if isinstance(sequence, SequenceState):
            self._ahead.forget(sequence)
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
