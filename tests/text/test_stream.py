"""Streamed decoding equals decoding at once."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_vocabularies import LLAMA3, QWEN3_ADDED, byte_level, id_of, sentencepiece

from bytefloor.text.stream import StreamDecoder
from bytefloor.text.tokenizer import Tokenizer

TOKENIZERS = {
    "bytes": Tokenizer.from_gguf(byte_level(LLAMA3, QWEN3_ADDED)),
    "spm": Tokenizer.from_gguf(sentencepiece()),
    "spm-bare": Tokenizer.from_gguf(sentencepiece(add_space_prefix=False)),
}


def streamed(tokenizer: Tokenizer, ids: Sequence[int], **options) -> list[str]:
    """The pieces of a stream, the last one from `finish`."""
    stream = tokenizer.stream(**options)
    return [*(stream.push(id) for id in ids), stream.finish()]


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=300, deadline=None)
@given(data=st.data(), keep_special=st.booleans())
def test_pieces_joined_equal_decoding_at_once(name: str, data: st.DataObject, keep_special: bool) -> None:
    """T08: for any ids at all, broken UTF-8 included."""
    tokenizer = TOKENIZERS[name]
    ids = data.draw(st.lists(st.integers(0, tokenizer.n_tokens - 1), max_size=30))
    pieces = streamed(tokenizer, ids, keep_special=keep_special)
    assert "".join(pieces) == tokenizer.decode(ids, keep_special=keep_special)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_character_waits_until_it_is_whole(name: str) -> None:
    """T08: a llama of four byte tokens."""
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode("a🦙b", add_bos=False)
    assert len(ids) >= 6
    pieces = streamed(tokenizer, ids)
    assert "".join(pieces) == "a🦙b"
    assert [piece for piece in pieces if piece] == ["a", "🦙", "b"]


def test_a_character_cut_by_the_limit_is_one_replacement_at_the_end() -> None:
    """T08."""
    tokenizer = TOKENIZERS["bytes"]
    ids = tokenizer.encode("a🦙")[:3]
    assert streamed(tokenizer, ids) == ["a", "", "", "\ufffd"]


def test_a_reply_keeps_its_leading_space_behind_text_but_not_behind_a_control_token() -> None:
    """T08: sentencepiece spells the first word of a text with a space that is not in it."""
    tokenizer = TOKENIZERS["spm"]
    hello = [id_of(tokenizer, "▁hello")]
    prompt = tokenizer.encode("a")
    assert "".join(streamed(tokenizer, hello, prompt_ids=prompt)) == " hello"
    assert "".join(streamed(tokenizer, hello, prompt_ids=[1])) == "hello"
    assert "".join(streamed(tokenizer, hello)) == "hello"
    whole = tokenizer.decode(prompt + hello)
    assert whole == tokenizer.decode(prompt) + " hello"


def test_each_text_between_control_tokens_gives_its_extra_space_back() -> None:
    tokenizer = TOKENIZERS["spm"]
    ids = tokenizer.encode("hello</s>hello a", parse_special=True)
    assert [tokenizer.vocabulary.text(id) for id in ids] == ["<s>", "▁hello", "</s>", "▁hello", "▁a"]
    assert tokenizer.decode(ids, keep_special=True) == "<s>hello</s>hello a"


def test_only_the_named_control_tokens_are_shown() -> None:
    tokenizer = TOKENIZERS["bytes"]
    think, ender = id_of(tokenizer, "<think>"), id_of(tokenizer, "<|eot_id|>")
    ids = [think, *tokenizer.encode("hello"), ender]
    assert tokenizer.decode(ids) == "hello"
    assert tokenizer.decode(ids, keep_special={think}) == "<think>hello"
    assert tokenizer.decode(ids, keep_special=True) == "<think>hello<|eot_id|>"
    assert "".join(streamed(tokenizer, ids, keep_special={think})) == "<think>hello"


class _Counting:
    """A tokenizer of 256 byte tokens that counts how often it is asked."""

    control_ids: frozenset[int] = frozenset()
    add_space_prefix = False

    def __init__(self) -> None:
        self.n_asked = 0

    def token_bytes(self, id: int) -> bytes:
        self.n_asked += 1
        return bytes([id])


def test_a_token_costs_the_same_however_long_the_reply() -> None:
    """T08: each token is looked up once, and at most three bytes wait."""
    counting = _Counting()
    stream = StreamDecoder(counting, prompt_ids=[65] * 1000)
    n_before = counting.n_asked
    text = "é🦙x" * 500
    for byte in text.encode():
        stream.push(byte)
        assert len(stream._decoder.getstate()[0]) <= 3
    assert counting.n_asked - n_before == len(text.encode())
    assert n_before <= 1
