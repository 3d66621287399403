"""A vocabulary as llguidance wants it: the bytes of each token, and which tokens are no text."""

from __future__ import annotations

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
    """The shape llguidance reads a vocabulary in. Calling it encodes text, which is wanted where text is forced to the
    model's usual tokens; `grammar` has that switched off. So bytes will do, and a byte without a token is an error."""

    tokens: list[bytes]
    eos_token_id: int
    bos_token_id: None = None
    special_token_ids: tuple[int, ...] = ()
    is_tokenizer_wrapper: bool = True

    def __call__(self, text: str | bytes) -> list[int]:
        return [self.tokens.index(bytes([byte])) for byte in (text.encode() if isinstance(text, str) else text)]


def make_guide(
    vocabulary: Vocabulary,
    end_ids: frozenset[int],
    never_ids: frozenset[int],
    drops_space: bool,
) -> Guide:
    """Takes two seconds for 262,144 tokens. never_ids: tokens that no grammar takes, whatever they spell."""
    words = [_word(vocabulary, id, end_ids, never_ids) for id in range(len(vocabulary))]
    ends = sorted(end_ids)
    # Without an end token a grammar can only end where nothing can follow. llguidance wants one all the same: a token
    # of no bytes behind all others, which no model has a row for.
    listed = _Words(words if ends else [*words, _SPECIAL + b"<end>"], ends[0] if ends else len(words))
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
    word = vocabulary.bytes_of(id)
    # The byte 0xFF as text, which every vocabulary has a token for, would read as a special token without a name.
    return b"" if word.startswith(_SPECIAL) else word


def _without_space(words: list[bytes]) -> npt.NDArray[np.int64]:
    places = {word: id for id, word in reversed(list(enumerate(words))) if word}
    return np.array([places.get(word[1:], -1) if word[:1] == b" " else id for id, word in enumerate(words)], np.int64)
