"""A vocabulary as llguidance wants it: the bytes of each token, and which tokens are no text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from llguidance import LLTokenizer

from bytefloor.text.vocabulary import Kind, Vocabulary

Bools = npt.NDArray[np.bool_]

#: llguidance's sign for a token that only a grammar that names it may take; no byte of UTF-8.
_SPECIAL = b"\xff"
_WHITE = b" \t\r\n"


@dataclass(frozen=True)
class Guide:
    """What grammars need to know of a tokenizer, V being its number of tokens.

    is_white [V]: the token is white space alone. is_end [V]: it ends a reply.
    without_space [V]: the token with the same bytes but for a leading space, -1 where there is none, itself where there
    is no leading space; None where decoding never takes a space away.
    """

    words: LLTokenizer
    is_white: Bools
    is_end: Bools
    without_space: npt.NDArray[np.int64] | None


@dataclass(frozen=True)
class _Words:
    """The shape llguidance reads a vocabulary in; calling it encodes text, which it needs where text is forced."""

    tokens: list[bytes]
    eos_token_id: int
    encode: Callable[[str], list[int]]
    bos_token_id: None = None
    special_token_ids: tuple[int, ...] = ()
    is_tokenizer_wrapper: bool = True

    def __call__(self, text: str | bytes) -> list[int]:
        return self.encode(text if isinstance(text, str) else text.decode("utf-8", errors="replace"))


def make_guide(
    vocabulary: Vocabulary,
    end_ids: frozenset[int],
    never_ids: frozenset[int],
    drops_space: bool,
    encode: Callable[[str], list[int]],
) -> Guide:
    """Takes two seconds for 262,144 tokens. never_ids: tokens that no grammar takes, whatever they spell."""
    words = [_word(vocabulary, id, end_ids, never_ids) for id in range(len(vocabulary))]
    ends = sorted(end_ids)
    # Without an end token a grammar can only end where nothing can follow. llguidance wants one all the same: a token
    # of no bytes behind all others, which no model has a row for.
    listed = _Words(words if ends else [*words, _SPECIAL + b"<end>"], ends[0] if ends else len(words), encode)
    is_end = np.zeros(len(words), np.bool_)
    is_end[ends] = True
    return Guide(
        words=LLTokenizer(listed, eos_token=ends or [len(words)]),  # type: ignore[arg-type]
        is_white=np.fromiter((bool(word) and not word.strip(_WHITE) for word in words), np.bool_, len(words)),
        is_end=is_end,
        without_space=_without_space(words) if drops_space else None,
    )


def _word(vocabulary: Vocabulary, id: int, end_ids: frozenset[int], never_ids: frozenset[int]) -> bytes:
    kind = vocabulary.kinds[id]
    # A token that ends the reply is no text, whatever its kind: as text it would end an answer that is not complete.
    if id in end_ids or kind == Kind.CONTROL:
        return _SPECIAL + vocabulary.bytes_of(id)
    if id in never_ids or kind in (Kind.UNKNOWN, Kind.UNUSED):
        return b""
    return vocabulary.bytes_of(id)


def _without_space(words: list[bytes]) -> npt.NDArray[np.int64]:
    places = {word: id for id, word in reversed(list(enumerate(words))) if word}
    return np.array([places.get(word[1:], -1) if word[:1] == b" " else id for id, word in enumerate(words)], np.int64)
