"""Answers under a grammar without a model: random logits, the engine's own sampler, and a growing wish to end."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bytefloor.engine.sampler import Sampler
from bytefloor.engine.sampling_params import SamplingParams
from bytefloor.text.grammar import Grammar
from bytefloor.text.tokenizer import Tokenizer


def closers(tokenizer: Tokenizer) -> list[int]:
    """Tokens that bring JSON nearer to its end, and those that end it."""
    spelled = {text.encode() for text in ('"', "}", "]", "0", "1", ":", "e", "-", "t", "null", "true")}
    plain = [id for id in range(tokenizer.n_tokens) if tokenizer.token_bytes(id) in spelled]
    return [*plain, *tokenizer.end_ids]


def answer(
    grammar: Grammar,
    seed: int = 0,
    *,
    n_rows: int | None = None,
    n_most: int = 600,
    temperature: float = 1.0,
    prompt_ids: Sequence[int] = (0,),
) -> tuple[list[int], str, bool]:
    """(tokens, text as a user sees it, whether it ended by itself)."""
    tokenizer = grammar.tokenizer
    noise = np.random.default_rng(seed)
    sampler = Sampler(SamplingParams(temperature=temperature, top_k=0, top_p=1, min_p=0, seed=seed), prompt_ids)
    constraint = grammar.start(prompt_ids)
    wanted, rows = np.array(closers(tokenizer)), n_rows or tokenizer.n_tokens
    stream, ids, text = tokenizer.stream(prompt_ids), [], ""
    for n_done in range(n_most):
        logits = noise.standard_normal(rows).astype(np.float32) * 2
        logits[wanted] += min(0.2 * n_done, 12)
        id = sampler.sample(logits, len(prompt_ids) - 1 + n_done, constraint.allowed()).id
        constraint.accept(id)
        ids.append(id)
        if id in tokenizer.end_ids:
            return ids, text + stream.finish(), True
        text += stream.push(id)
        if constraint.is_complete:
            return ids, text + stream.finish(), True
    return ids, text + stream.finish(), False
