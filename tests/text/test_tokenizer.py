"""Text to ids: pre-tokenizers, the BOS, end tokens, control tokens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_vocabularies import (
    BYTE,
    CONTROL,
    GEMMA3,
    GEMMA4,
    GEMMA4_ADDED,
    LLAMA3,
    NORMAL,
    QWEN3,
    QWEN3_ADDED,
    UNUSED,
    USER_DEFINED,
    byte_level,
    id_of,
    merge_slowly,
    sentencepiece,
)
from tokenizers import decoders, pre_tokenizers

from bytefloor.errors import FileError, RequestError, UnsupportedError
from bytefloor.text.tokenizer import Tokenizer
from bytefloor.text.vocabulary import byte_letters


def spelled(tokenizer: Tokenizer, text: str, **options: bool) -> list[str]:
    """The text's tokens as text."""
    return [tokenizer.token_text(id) for id in tokenizer.encode(text, **options)]


def test_byte_letters_are_the_alphabet_of_byte_level_bpe() -> None:
    assert set(byte_letters().values()) == set(pre_tokenizers.ByteLevel.alphabet())
    assert len(byte_letters()) == 256


@pytest.mark.parametrize(
    ("pre", "wanted"),
    [
        ("llama-bpe", ["333", "33", " ", "3"]),
        ("llama3", ["333", "33", " ", "3"]),
        ("qwen2", ["3", "3", "3", "3", "3", " ", "3"]),
        ("qwen35", ["3", "3", "3", "3", "3", " ", "3"]),
        ("smollm", ["3", "3", "3", "3", "3", " ", "3"]),
        ("gpt-2", ["33", "333", " ", "3"]),
        ("default", ["333", "33", " ", "3"]),
    ],
)
def test_each_pre_tokenizer_groups_digits_its_own_way(pre: str, wanted: list[str]) -> None:
    """T02."""
    tokenizer = Tokenizer.from_gguf(byte_level(pre=pre))
    assert spelled(tokenizer, "33333 3", add_bos=False) == wanted


def test_digits_are_cut_in_threes_from_the_left_of_a_long_number() -> None:
    """T02: GPT-2 leaves long numbers whole, Llama 3 does not."""
    crossing = byte_level(pre="gpt-2")
    crossing["tokenizer.ggml.tokens"] = [*crossing["tokenizer.ggml.tokens"], "33333"]
    crossing["tokenizer.ggml.token_type"] = [*crossing["tokenizer.ggml.token_type"], NORMAL]
    crossing["tokenizer.ggml.merges"] = [*crossing["tokenizer.ggml.merges"], "33 333"]
    assert spelled(Tokenizer.from_gguf(crossing), "33333") == ["33333"]
    crossing["tokenizer.ggml.pre"] = "llama-bpe"
    assert spelled(Tokenizer.from_gguf(crossing), "33333") == ["333", "33"]


def test_qwen_composes_characters_before_it_looks_them_up() -> None:
    tokenizer = Tokenizer.from_gguf(byte_level(pre="qwen2"))
    assert spelled(tokenizer, "e\u0301") == ["é"]
    assert Tokenizer.from_gguf(byte_level(pre="gpt-2")).decode(tokenizer.encode("é")) == "é"


def test_marks_belong_to_words_only_for_qwen35() -> None:
    metadata = byte_level(pre="qwen35")
    mark = "\u0942"  # Devanagari vowel sign: a mark that no character composes with
    letters = "".join(byte_letters()[byte] for byte in mark.encode())
    extra = [letters[:2], letters, "n" + letters]
    merges = [f"{letters[0]} {letters[1]}", f"{letters[:2]} {letters[2]}", f"n {letters}"]
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], *extra]
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], *[NORMAL] * 3]
    metadata["tokenizer.ggml.merges"] = [*metadata["tokenizer.ggml.merges"], *merges]
    assert spelled(Tokenizer.from_gguf(metadata), "n" + mark) == ["n" + mark]
    metadata["tokenizer.ggml.pre"] = "qwen2"
    assert spelled(Tokenizer.from_gguf(metadata), "n" + mark) == ["n", mark]


def test_llama3_takes_a_whole_word_that_no_merge_makes() -> None:
    metadata = byte_level(pre="llama-bpe")
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], "zq"]
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], NORMAL]
    assert spelled(Tokenizer.from_gguf(metadata), "zq") == ["zq"]
    metadata["tokenizer.ggml.pre"] = "gpt-2"
    assert spelled(Tokenizer.from_gguf(metadata), "zq") == ["z", "q"]


def test_byte_level_bpe_without_a_pre_tokenizer_name_warns_hard() -> None:
    """G15."""
    tokenizer = Tokenizer.from_gguf(byte_level(pre=None))
    assert any("tokenizer.ggml.pre is missing" in notice and "quality" in notice for notice in tokenizer.notices)
    assert Tokenizer.from_gguf(byte_level(pre="default")).notices == ()


def test_a_vocabulary_that_cannot_spell_every_byte_says_so() -> None:
    """Text would lose those bytes without a word."""
    metadata = byte_level()
    metadata["tokenizer.ggml.tokens"] = [
        "gone" if token in (byte_letters()[0x41], byte_letters()[0xFF]) else token
        for token in metadata["tokenizer.ggml.tokens"]
    ]
    assert Tokenizer.from_gguf(metadata).notices == ("the vocabulary cannot spell 1 bytes (0x41...): text loses them",)


def test_sentencepiece_without_a_pre_tokenizer_name_loads_without_a_word() -> None:
    """G15."""
    plain = Tokenizer.from_gguf(sentencepiece())
    named = Tokenizer.from_gguf(sentencepiece(pre="default"))
    assert plain.notices == ()
    assert plain.encode("hello abab") == named.encode("hello abab")


def test_an_unknown_pre_tokenizer_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match=r"'chameleon'.*llama-bpe.*qwen2"):
        Tokenizer.from_gguf(byte_level(pre="chameleon"))


def test_an_unknown_tokenizer_model_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match=r"'rwkv'"):
        Tokenizer.from_gguf(byte_level(model="rwkv"))


@pytest.mark.parametrize("key", ["tokens", "merges", "model"])
def test_a_file_without_its_tokenizer_says_which_key_is_missing(key: str) -> None:
    with pytest.raises(FileError, match=f"tokenizer.ggml.{key}"):
        Tokenizer.from_gguf(byte_level(**{key: None}))


@pytest.mark.parametrize("key", ["scores", "token_type"])
def test_lists_of_unequal_length_are_refused_with_both_numbers(key: str) -> None:
    metadata = sentencepiece()
    n_tokens = len(metadata["tokenizer.ggml.tokens"])
    metadata[f"tokenizer.ggml.{key}"] = metadata[f"tokenizer.ggml.{key}"][:-1]
    with pytest.raises(FileError, match=rf"{key} has {n_tokens - 1} entries, expected {n_tokens}"):
        Tokenizer.from_gguf(metadata)


@pytest.mark.parametrize(
    ("key", "value"),
    [("tokens", 5), ("token_type", 5), ("merges", 5), ("eos_token_id", "x"), ("bos_token_id", []), ("pre", 5)],
)
def test_keys_of_a_wrong_type_are_refused(key: str, value: object) -> None:
    metadata = byte_level(LLAMA3, bos_token_id="<|begin_of_text|>", eos_token_id="<|eot_id|>")
    with pytest.raises((FileError, UnsupportedError), match=r"tokenizer"):
        Tokenizer.from_gguf({**metadata, f"tokenizer.ggml.{key}": value})


def test_lists_may_be_numpy_arrays() -> None:
    metadata = sentencepiece()
    arrays = {**metadata, "tokenizer.ggml.scores": np.array(metadata["tokenizer.ggml.scores"], np.float32)}
    arrays["tokenizer.ggml.token_type"] = np.array(metadata["tokenizer.ggml.token_type"], np.int32)
    assert Tokenizer.from_gguf(arrays).encode("hello") == Tokenizer.from_gguf(metadata).encode("hello")


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="ab helo<s>é\n🦙", max_size=24))
def test_sentencepiece_merges_by_score_as_the_slow_rule_does(text: str) -> None:
    metadata = sentencepiece(add_space_prefix=False)
    tokenizer = Tokenizer.from_gguf(metadata)
    assert tokenizer.encode(text, add_bos=False) == merge_slowly(metadata, text)


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="a", max_size=40), st.text(alphabet="ab", max_size=12))
def test_sentencepiece_breaks_ties_from_the_left_in_runs(run: str, tail: str) -> None:
    metadata = sentencepiece(add_space_prefix=False)
    assert Tokenizer.from_gguf(metadata).encode(run + tail, add_bos=False) == merge_slowly(metadata, run + tail)


def test_sentencepiece_puts_a_space_before_the_text_and_takes_it_back() -> None:
    tokenizer = Tokenizer.from_gguf(sentencepiece())
    ids = tokenizer.encode("hello")
    assert [tokenizer.vocabulary.text(id) for id in ids] == ["<s>", "▁hello"]
    assert tokenizer.decode(ids) == "hello"
    assert tokenizer.decode(tokenizer.encode("  hello")) == "  hello"
    without = Tokenizer.from_gguf(sentencepiece(add_space_prefix=False))
    assert without.decode(without.encode(" hello")) == " hello"


def test_what_the_vocabulary_cannot_spell_falls_back_to_bytes() -> None:
    tokenizer = Tokenizer.from_gguf(sentencepiece(add_space_prefix=False))
    ids = tokenizer.encode("é", add_bos=False)
    assert [tokenizer.vocabulary.text(id) for id in ids] == ["<0xC3>", "<0xA9>"]
    assert tokenizer.decode(ids) == "é"


def test_without_byte_tokens_what_cannot_be_spelled_is_the_unknown_token() -> None:
    metadata = sentencepiece(add_space_prefix=False)
    metadata["tokenizer.ggml.token_type"] = [UNUSED if k == BYTE else k for k in metadata["tokenizer.ggml.token_type"]]
    tokenizer = Tokenizer.from_gguf(metadata)
    assert tokenizer.encode("aéa", add_bos=False)[1] == 0


@pytest.mark.parametrize("text", ["<s>", "</s>", "a<s>b", "<0x41>"])
def test_plain_text_never_becomes_a_control_or_byte_token(text: str) -> None:
    """T05: the vocabulary even has "<s" to tempt the merges."""
    tokenizer = Tokenizer.from_gguf(sentencepiece())
    ids = tokenizer.encode(text, add_bos=False)
    assert not set(ids) & tokenizer.control_ids
    assert tokenizer.decode(ids) == text
    assert all(tokenizer.vocabulary.kinds[id] != BYTE for id in tokenizer.encode("<s>", add_bos=False))


@pytest.mark.parametrize("text", [*LLAMA3, "x<|eot_id|>y"])
def test_control_tokens_are_parsed_only_on_request(text: str) -> None:
    """T05."""
    tokenizer = Tokenizer.from_gguf(byte_level(LLAMA3))
    plain, parsed = tokenizer.encode(text, add_bos=False), tokenizer.encode(text, parse_special=True, add_bos=False)
    assert not set(plain) & tokenizer.control_ids
    assert len(set(parsed) & tokenizer.control_ids) == 1
    assert tokenizer.decode(plain) == tokenizer.decode(parsed, keep_special=True) == text


def test_the_longest_control_token_wins_and_neighbours_are_all_found() -> None:
    tokenizer = Tokenizer.from_gguf(byte_level(("<|a|>", "<|a|>b", "<|b|>", "<x<|b|>")))
    assert spelled(tokenizer, "<x<|b|>", parse_special=True) == ["<x<|b|>"]
    assert spelled(tokenizer, "<|a|>b<|a|><|b|>c", parse_special=True) == ["<|a|>b", "<|a|>", "<|b|>", "c"]


@pytest.mark.parametrize("text", [*QWEN3_ADDED, *GEMMA4_ADDED])
def test_added_tokens_that_are_structure_are_control_tokens(text: str) -> None:
    """T05: files mark thinking and tool tags as ordinary."""
    tokenizer = Tokenizer.from_gguf(byte_level((), (*QWEN3_ADDED, *GEMMA4_ADDED)))
    assert len(tokenizer.encode(text)) > 1
    assert tokenizer.encode(text, parse_special=True) == [id_of(tokenizer, text)]


def test_added_tokens_that_are_text_are_always_tokens() -> None:
    tokenizer = Tokenizer.from_gguf(sentencepiece(add_space_prefix=False))
    table = id_of(tokenizer, "<table>")
    assert tokenizer.encode("a<table>b", add_bos=False)[1] == table
    assert tokenizer.decode([table]) == "<table>"
    assert table not in tokenizer.control_ids


@pytest.mark.parametrize(
    ("metadata", "wanted"),
    [
        (byte_level(LLAMA3, bos_token_id="<|begin_of_text|>"), True),
        (byte_level(LLAMA3, bos_token_id="<|begin_of_text|>", add_bos_token=False), False),
        (byte_level(QWEN3, pre="qwen2", bos_token_id="<|endoftext|>"), False),
        (byte_level(QWEN3, pre="qwen2", bos_token_id="<|endoftext|>", add_bos_token=True), True),
        (byte_level(QWEN3, pre="smollm", bos_token_id="<|im_start|>"), False),
        (byte_level(GEMMA3, pre="gpt-2", architecture="gemma3", bos_token_id="<bos>"), True),
        (byte_level(GEMMA4, model="gemma4", pre=None, architecture="gemma4", bos_token_id="<bos>"), True),
        (sentencepiece(), True),
        (sentencepiece(add_bos_token=False), False),
        (byte_level(LLAMA3), False),
    ],
    ids=["llama3", "llama3-off", "qwen", "qwen-on", "smollm", "gemma3", "gemma4", "spm", "spm-off", "no-id"],
)
def test_bos_follows_the_file_and_then_the_family(metadata: dict, wanted: bool) -> None:
    """T04."""
    tokenizer = Tokenizer.from_gguf(metadata)
    assert tokenizer.add_bos is wanted
    assert (tokenizer.encode("hello")[0] == tokenizer.bos_id) is wanted
    assert tokenizer.encode("hello", add_bos=False)[0] != tokenizer.bos_id


def test_text_that_begins_with_the_bos_does_not_get_a_second() -> None:
    """T03."""
    tokenizer = Tokenizer.from_gguf(byte_level(LLAMA3, bos_token_id="<|begin_of_text|>"))
    once = tokenizer.encode("hello")
    assert once.count(tokenizer.bos_id) == 1
    assert tokenizer.encode("<|begin_of_text|>hello", parse_special=True) == once
    assert tokenizer.encode("", add_bos=True) == [tokenizer.bos_id]


def test_asking_for_a_bos_that_does_not_exist_is_refused() -> None:
    with pytest.raises(RequestError, match="beginning-of-text"):
        Tokenizer.from_gguf(byte_level()).encode("hello", add_bos=True)


def test_end_ids_are_the_union_of_keys_and_known_turn_enders() -> None:
    """T06, T07."""
    control = (*LLAMA3, "<|custom_end|>", "<|other|>")
    metadata = byte_level(control, eos_token_id="<|end_of_text|>", eot_token_id="<|custom_end|>")
    tokenizer = Tokenizer.from_gguf(metadata)
    wanted = {"<|end_of_text|>", "<|custom_end|>", "<|eot_id|>", "<|eom_id|>"}
    assert {tokenizer.token_text(id) for id in tokenizer.end_ids} == wanted


@pytest.mark.parametrize(
    ("metadata", "ender"),
    [
        (byte_level(QWEN3, pre="qwen2"), "<|im_end|>"),
        (byte_level(QWEN3, pre="qwen2"), "<|endoftext|>"),
        (byte_level(GEMMA3, pre="gpt-2"), "<end_of_turn>"),
        (byte_level(GEMMA4, GEMMA4_ADDED, pre="gpt-2"), "<turn|>"),
        (sentencepiece(eos_token_id=None), "</s>"),
    ],
)
def test_turn_enders_end_a_reply_though_no_key_names_them(metadata: dict, ender: str) -> None:
    """T07."""
    tokenizer = Tokenizer.from_gguf(metadata)
    assert id_of(tokenizer, ender) in tokenizer.end_ids


def test_an_html_tag_spelled_like_a_turn_ender_is_text() -> None:
    """Gemma's vocabulary has the strike-through tag as an added token."""
    tokenizer = Tokenizer.from_gguf(byte_level(GEMMA3, ("<s>", "</s>"), pre="gpt-2"))
    assert id_of(tokenizer, "</s>") not in tokenizer.end_ids
    assert tokenizer.encode("</s>", add_bos=False) == [id_of(tokenizer, "</s>")]


def test_a_turn_ender_that_an_old_file_calls_normal_is_a_control_token() -> None:
    """T06."""
    metadata = byte_level(QWEN3, pre="qwen2")
    metadata["tokenizer.ggml.token_type"] = [NORMAL] * len(metadata["tokenizer.ggml.tokens"])
    tokenizer = Tokenizer.from_gguf(metadata)
    assert id_of(tokenizer, "<|im_end|>") in tokenizer.end_ids & tokenizer.control_ids


def test_suppressed_ids_are_the_files_list_and_its_padding() -> None:
    """R12."""
    tokenizer = Tokenizer.from_gguf(byte_level((), ("[PAD300]", "[PAD301]"), suppress_tokens=[7, 8]))
    assert tokenizer.suppressed_ids == {7, 8, id_of(tokenizer, "[PAD300]"), id_of(tokenizer, "[PAD301]")}
    assert id_of(tokenizer, "[PAD300]") not in tokenizer.encode("[PAD300]")


def test_ids_past_the_last_token_are_refused_with_the_range() -> None:
    """R12: the embedding may have more rows than there are tokens."""
    tokenizer = Tokenizer.from_gguf(byte_level())
    with pytest.raises(RequestError, match=rf"{tokenizer.n_tokens} is not .* 0 to {tokenizer.n_tokens - 1}"):
        tokenizer.token_bytes(tokenizer.n_tokens)
    with pytest.raises(RequestError, match="-1 is not"):
        tokenizer.decode([-1])


@pytest.mark.parametrize(
    "metadata",
    [
        byte_level(LLAMA3, (*QWEN3_ADDED, "raw ▁ text", "[PAD1]")),
        sentencepiece(),
        sentencepiece(add_space_prefix=False),
    ],
    ids=["bytes", "spm", "spm-bare"],
)
def test_every_single_token_decodes(metadata: dict) -> None:
    """T11."""
    tokenizer = Tokenizer.from_gguf(metadata)
    for id in range(tokenizer.n_tokens):
        assert isinstance(tokenizer.token_text(id), str)
        stream = tokenizer.stream()
        assert stream.push(id) + stream.finish() == tokenizer.decode([id])


def test_tokens_that_are_no_text_keep_their_bytes_and_are_never_encoded() -> None:
    """T11: of every kind, in both vocabularies; a merge that speaks of one is left out."""
    odd = "a\udcffb"
    for metadata in (byte_level(LLAMA3, QWEN3_ADDED), sentencepiece()):
        for kind in (NORMAL, USER_DEFINED, CONTROL, UNUSED):
            changed = {**metadata}
            changed["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], odd]
            changed["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], kind]
            if "tokenizer.ggml.scores" in metadata:
                changed["tokenizer.ggml.scores"] = [*metadata["tokenizer.ggml.scores"], 0.0]
            else:
                changed["tokenizer.ggml.merges"] = [*metadata["tokenizer.ggml.merges"], "a \udcffb"]
            tokenizer, plain = Tokenizer.from_gguf(changed), Tokenizer.from_gguf(metadata)
            id = tokenizer.n_tokens - 1
            assert tokenizer.token_bytes(id) == b"a\xffb"
            assert tokenizer.token_text(id) == "a\ufffdb"
            assert tokenizer.encode("hello a ab") == plain.encode("hello a ab")
            assert id not in tokenizer.encode(odd, parse_special=kind != CONTROL)


def test_lone_surrogates_become_replacement_characters() -> None:
    tokenizer = Tokenizer.from_gguf(byte_level())
    assert "\ufffd" in tokenizer.decode(tokenizer.encode("a\ud800b"))


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=40))
def test_decoding_what_was_encoded_gives_the_text_back(text: str) -> None:
    for metadata in (byte_level(LLAMA3), sentencepiece(), sentencepiece(add_space_prefix=False)):
        tokenizer = Tokenizer.from_gguf(metadata)
        # U+2581 is how sentencepiece spells a space; the two cannot be told apart afterwards.
        clean = text.replace("▁", "_")
        assert tokenizer.decode(tokenizer.encode(clean)) == clean


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet="hello wörld 🦙3\n", max_size=40))
def test_decoding_valid_text_agrees_with_the_library(text: str) -> None:
    letters = Tokenizer.from_gguf(byte_level())
    letters.backend.decoder = decoders.ByteLevel()
    ids = letters.encode(text)
    assert letters.decode(ids) == letters.backend.decode(ids, skip_special_tokens=False)
    pieces = Tokenizer.from_gguf(sentencepiece())
    stages = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    pieces.backend.decoder = decoders.Sequence(stages)
    ids = pieces.encode(text, add_bos=False)
    assert pieces.decode(ids) == pieces.backend.decode(ids, skip_special_tokens=False)
