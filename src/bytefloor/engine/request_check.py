"""Which requests an engine takes."""

from __future__ import annotations

from bytefloor.engine.request import EmbeddingRequest, Request
from bytefloor.errors import RequestError
from bytefloor.text.stop import StopMatcher
from bytefloor.text.tokenizer import Tokenizer


def check_request(
    request: Request | EmbeddingRequest, capacity: int, vocabulary_size: int, tokenizer: Tokenizer
) -> None:
    """RequestError when it cannot be served as asked."""
    n_prompt = len(request.prompt_ids)
    if n_prompt == 0:
        raise RequestError("the prompt is empty: at least one token is needed")
    for token in request.prompt_ids:
        if not 0 <= token < vocabulary_size:
            raise RequestError(f"prompt token {token} is outside the vocabulary of {vocabulary_size}")
    if isinstance(request, EmbeddingRequest):
        if n_prompt > capacity:
            raise RequestError(f"the text has {n_prompt} tokens, the context holds {capacity}: raise -c")
        return
    if n_prompt >= capacity:
        raise RequestError(
            f"the prompt has {n_prompt} tokens, the context holds {capacity}, of which one must be left "
            "for the answer; shorten the prompt or raise -c"
        )
    StopMatcher(request.stops)
    if request.max_tokens is not None and request.max_tokens < 1:
        raise RequestError(f"max_tokens is {request.max_tokens}, expected at least 1")
    if request.grammar is not None and request.ignores_end:
        raise RequestError("a grammar and ignores_end exclude each other: a grammar says where the answer ends")
    if request.grammar is not None and request.grammar.tokenizer is not tokenizer:
        raise RequestError("the grammar was compiled for another tokenizer")
