"""One request while it runs: its tokens so far, its cache, its sampler and its text."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from bytefloor.engine.cache import SequenceCache
from bytefloor.engine.loops import is_looping
from bytefloor.engine.ngram import NgramIndex
from bytefloor.engine.request import Delta, Finish, FinishReason, Reading, Request
from bytefloor.engine.sampler import Sampled, Sampler
from bytefloor.engine.speculation import DraftRecord
from bytefloor.text.stop import StopMatcher
from bytefloor.text.tokenizer import Tokenizer


class SequenceState:
    """ids: prompt and answer. The first cache.length of them are computed, the others pending.

    drafting: what became of the drafts that it had. is_handed_back: the device could not choose its next token, so the
    host will.
    """

    def __init__(self, request_id: int, request: Request, tokenizer: Tokenizer, banned_ids: frozenset[int]) -> None:
        self.request_id = request_id
        self.request = request
        self.ids = list(request.prompt_ids)
        self.cache: SequenceCache
        self.has_started = self.is_handed_back = False
        self.first_token_at: float | None = None
        self.sampler = Sampler(request.sampling, request.prompt_ids, banned_ids)
        self.drafting = DraftRecord()
        self.ngrams = NgramIndex(self.ids)
        self.constraint = request.grammar.start(request.prompt_ids) if request.grammar is not None else None
        self._end_ids = frozenset() if request.ignores_end else tokenizer.end_ids
        self._decoder = tokenizer.stream(request.prompt_ids, keep_special=request.shown_ids)
        self._stop = StopMatcher(request.stops)
        self._budget = request.thinking.start(self._decoder) if request.thinking is not None else None
        # Tokens that close a thought whose budget is spent: the next ones, whatever the model would say.
        self._forced = deque(self._budget.start() if self._budget is not None else ())
        self._started_at = time.perf_counter()
        self._n_cached = 0

    @property
    def n_pending(self) -> int:
        return len(self.ids) - self.cache.length

    @property
    def has_free_choice(self) -> bool:
        """Whether the next token follows from logits and sampling parameters alone."""
        return self.constraint is None and not self._forced

    @property
    def is_decoding(self) -> bool:
        """Whether it has begun to answer, and its last token alone is not computed."""
        return self.first_token_at is not None and self.n_pending == 1

    @property
    def chooses_freely(self) -> bool:
        """Whether it decodes, and its parameters alone say what a device makes of logits."""
        is_bound = self.is_handed_back or self.first_token_at is None or self.constraint is not None or self._forced
        return not is_bound and len(self.ids) - self.cache.length == 1

    @property
    def n_generated(self) -> int:
        return len(self.ids) - len(self.request.prompt_ids)

    def start(self, cache: SequenceCache) -> None:
        """Begin, or go on after pages ran out, from a cache that holds the first tokens, or nothing."""
        self.cache = cache
        if self.has_started:
            return
        self.has_started = True
        self._n_cached = cache.length
        self._started_at = time.perf_counter()

    @property
    def reading(self) -> Reading | None:
        """How far the prompt has been read; None before it has begun, and from the first token on.

        Pages that ran out take it back to the beginning, which may be before what was cached at first.
        """
        if not self.has_started or self.first_token_at is not None:
            return None
        return Reading(self.cache.length, len(self.request.prompt_ids), self._n_cached)

    def sample(self, logits: Any) -> Sampled:
        """The next token from a row of logits. NumericalError for logits that are NaN."""
        if self._forced:
            return self.sampler.force(logits, len(self.ids) - 1, self._forced[0])
        allowed = self.constraint.allowed() if self.constraint is not None else None
        return self.sampler.sample(logits, len(self.ids) - 1, allowed)

    def may_go_on(self, capacity: int) -> bool:
        """Whether a token may be wanted after the next one. What the next one is may still end the answer."""
        return len(self.ids) + 1 < capacity and self.n_generated + 1 != self.request.max_tokens

    def propose(self, n_most: int, capacity: int) -> list[int]:
        """Up to n_most tokens that may follow, and behind which one more may still be wanted; none while it rests."""
        if self.drafting.is_resting(len(self.ids)):
            return []
        n_most = min(n_most, capacity - len(self.ids) - 1)
        if self.request.max_tokens is not None:
            n_most = min(n_most, self.request.max_tokens - self.n_generated - 1)
        return self.ngrams.propose(n_most) if n_most > 0 else []

    def accept(self, sampled: Sampled, capacity: int) -> Delta:
        """Turn the next token into text."""
        if self.first_token_at is None:
            self.first_token_at = time.perf_counter()
        self.ids.append(sampled.id)
        if self.constraint is not None:
            self.constraint.accept(sampled.id)
        if sampled.id in self._end_ids:
            return self._cut("stop", "end of turn", "", sampled)
        text = self._decoder.push(sampled.id)
        if self._budget is not None or self._forced:
            self._count_thought(text)
        text, is_stopped = self._stop.push(text)
        if is_stopped:
            return self._last("stop", "stop string", text, sampled)
        if self.constraint is not None and self.constraint.is_complete:
            return self._cut("stop", "the grammar is complete", text, sampled)
        if self.n_generated == self.request.max_tokens:
            return self._cut("length", f"max_tokens {self.request.max_tokens}", text, sampled)
        if len(self.ids) >= capacity:
            return self._cut("length", f"context of {capacity} is full", text, sampled)
        if self.request.detects_loops and is_looping(self.ids, len(self.request.prompt_ids)):
            return self._cut("loop", "the answer repeats itself", text, sampled)
        return Delta(self.request_id, text, sampled)

    def _count_thought(self, text: str) -> None:
        """text: what the last token added."""
        if self._forced:
            self._forced.popleft()
        closing = self._budget.push(text) if self._budget is not None else []
        # Under a grammar thoughts are told by control tokens: text that only spells one is the grammar's.
        if self.constraint is None or self.constraint.is_thinking:
            self._forced.extend(closing)

    def _cut(self, reason: FinishReason, detail: str, text: str, sampled: Sampled) -> Delta:
        """End here. Text held back for a longer character or a stop string comes out, and may yet complete one."""
        held, is_stopped = self._stop.push(self._decoder.finish())
        if is_stopped:
            return self._last("stop", "stop string", text + held, sampled)
        return self._last(reason, detail, text + held + self._stop.finish(), sampled)

    def _last(self, reason: FinishReason, detail: str, text: str, sampled: Sampled) -> Delta:
        return Delta(self.request_id, text, sampled, self.finish(reason, detail))

    def finish(self, reason: FinishReason, detail: str) -> Finish:
        """What the request took until now."""
        end = time.perf_counter()
        first = self.first_token_at if self.first_token_at is not None else end
        return Finish(
            reason=reason,
            detail=detail,
            n_prompt=len(self.request.prompt_ids),
            n_cached=self._n_cached,
            n_generated=self.n_generated,
            prompt_s=first - self._started_at,
            decode_s=end - first,
            seed=self.sampler.seed,
            stop=self._stop.found,
            n_thought=self._budget.n_used if self._budget is not None else 0,
            n_draft=self.drafting.n_draft,
            n_draft_accepted=self.drafting.n_draft_accepted,
            n_dropped=self.cache.dropped if self.has_started else 0,
        )
