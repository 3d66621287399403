"""What is asked of the engine, and what it says back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from bytefloor.engine.sampler import Sampled
from bytefloor.engine.sampling_params import SamplingParams
from bytefloor.text.grammar import Grammar
from bytefloor.text.reasoning_budget import Thinking

FinishReason = Literal["stop", "length", "loop", "cancelled", "error"]


@dataclass(frozen=True)
class Request:
    """One prompt and how to continue it.

    max_tokens: None goes on until the model ends its turn or the context is full.
    stops: strings that end the answer and are not part of it.
    ignores_end: end-of-turn tokens are printed as any other, for measuring.
    detects_loops: end an answer that only repeats itself; the finish reason says so.
    shown_ids: control tokens whose text is part of the answer, such as the tags around reasoning.
    grammar: what the answer must look like; one that was cut, by a stop string too, need not.
    thinking: thoughts are counted, and closed when they have used their tokens; shown_ids must have their tags.
    """

    prompt_ids: tuple[int, ...]
    max_tokens: int | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stops: tuple[str, ...] = ()
    ignores_end: bool = False
    detects_loops: bool = False
    shown_ids: frozenset[int] = frozenset()
    grammar: Grammar | None = None
    thinking: Thinking | None = None


@dataclass(frozen=True)
class EmbeddingRequest:
    """One text that is wanted as a vector: the mean over its positions of what the model's head gets, made one long."""

    prompt_ids: tuple[int, ...]


@dataclass(frozen=True)
class Finish:
    """How an answer ended and what it took.

    reason: ``stop`` the model's end token, a stop string or the end of a grammar, ``length`` max_tokens or a full
    context, ``loop`` it repeated itself, ``cancelled``, ``error``. detail: the same in words.
    stop: the stop string that ended it; None for any other end.
    n_cached: prompt tokens whose keys and values were already there, in every layer, when the request first began.
    n_dropped: prompt positions that layers without a window had no more once it was read, see ``CachePlan.budget``.
    n_thought: tokens within thoughts, those of tags and those that closed them for the model not counted.
    n_draft: tokens that were proposed and computed; n_draft_accepted: how many of them are in the answer.
    Seconds are wall time.
    """

    reason: FinishReason
    detail: str
    n_prompt: int
    n_cached: int
    n_generated: int
    prompt_s: float
    decode_s: float
    seed: int
    stop: str | None = None
    n_thought: int = 0
    n_draft: int = 0
    n_draft_accepted: int = 0
    n_dropped: int = 0

    @property
    def prompt_tok_s(self) -> float | None:
        """Prompt tokens computed a second; cached ones do not count. None where none was."""
        return (self.n_prompt - self.n_cached) / self.prompt_s if self.prompt_s > 0 else None

    @property
    def decode_tok_s(self) -> float | None:
        """Tokens a second after the first, which the prompt's last step gives. None where there is no other."""
        return (self.n_generated - 1) / self.decode_s if self.decode_s > 0 and self.n_generated > 1 else None


@dataclass(frozen=True)
class Reading:
    """How far a prompt has been read. n_done: of n_prompt tokens, n_cached of which were there before it began."""

    n_done: int
    n_prompt: int
    n_cached: int


# Not frozen: there is one for every token, and frozen ones take three times as long to make.
@dataclass(slots=True)
class Delta:
    """A token of one request's answer and the text it adds; a step may give several. All texts join to the answer.

    embedding: with the finish of an EmbeddingRequest, D numbers.
    """

    request_id: int
    text: str
    sampled: Sampled | None
    finish: Finish | None = None
    embedding: tuple[float, ...] | None = None
