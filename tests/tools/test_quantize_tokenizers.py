"""Tokenizers between containers: what is written gives the same tokens for the same text, or is refused."""

from __future__ import annotations

import json

import pytest
from transformers import AutoTokenizer

from bytefloor.errors import UnsupportedError
from bytefloor.files.checkpoint import open_checkpoint
from bytefloor.quantize.tokenizer_files import write_tokenizer
from bytefloor.quantize.tokenizer_keys import PROBES, tokenizer_keys
from bytefloor.text.tokenizer import Tokenizer

LLAMA = {"model_type": "llama"}
WORDS = ("th", "the", "\u2581the", "in", "ing", "er", "\u2581a", "an", "\u2581an", "re", "on", "qu", "\u2581qu")


def sentencepiece(add_space_prefix):
    """Scores that are no ranks, control tokens in front, an unused one, and a tag that plain text may write."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "<unused5>", "<b>"]
    kinds = [2, 3, 3, *[6] * 256, 5, 4]
    letters = sorted({letter for word in WORDS for letter in word} | set("bcdfgklmpsvwxyz.,!?0123456789"))
    ranked = [*WORDS, *letters]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": pieces + ranked,
        "tokenizer.ggml.token_type": kinds + [1] * len(ranked),
        "tokenizer.ggml.scores": [0.0] * len(pieces) + [-1.5 * i - 3 for i in range(len(ranked))],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_space_prefix": add_space_prefix,
        "tokenizer.chat_template": "{{ messages }}",
    }


def there_and_back(metadata, folder):
    write_tokenizer(folder, metadata, LLAMA)
    own = Tokenizer.from_gguf(metadata)
    keys = tokenizer_keys(folder, LLAMA, "llama", own.n_tokens)
    return own, {key: typed.value for key, typed in keys.items()}


def test_byte_level_tokenizer_of_a_trained_model(smollm2_path, tmp_path):
    """transformers reads the files; the way back finds the pre-tokenizer by what it does to hard text."""
    metadata = open_checkpoint(smollm2_path).metadata
    own, keys = there_and_back(metadata, tmp_path)
    other = AutoTokenizer.from_pretrained(tmp_path)
    for text in PROBES:
        assert other(text)["input_ids"] == own.encode(text, parse_special=True)
        assert other.decode(own.encode(text)) == own.decode(own.encode(text), keep_special=True)
    for key in ("model", "pre", "tokens", "token_type", "merges", "bos_token_id", "eos_token_id", "padding_token_id"):
        assert keys[f"tokenizer.ggml.{key}"] == metadata[f"tokenizer.ggml.{key}"], key
    assert keys["tokenizer.chat_template"] == metadata["tokenizer.chat_template"]
    assert other.chat_template == metadata["tokenizer.chat_template"]


@pytest.mark.parametrize("add_space_prefix", [False, True])
def test_scores_become_merges_and_scores_again(add_space_prefix, tmp_path):
    metadata = sentencepiece(add_space_prefix)
    own, keys = there_and_back(metadata, tmp_path)
    assert keys["tokenizer.ggml.model"] == "llama"
    for key in ("tokens", "token_type", "add_space_prefix", "bos_token_id", "unknown_token_id"):
        assert keys[f"tokenizer.ggml.{key}"] == metadata[f"tokenizer.ggml.{key}"], key
    again = Tokenizer.from_gguf(keys)
    other = AutoTokenizer.from_pretrained(tmp_path)
    for text in ("the thing in an error", "quering the an on", "x<b>y é", "ththethe  inging"):
        assert again.encode(text) == own.encode(text)
        assert other(text)["input_ids"] == own.encode(text)


def test_named_templates_and_suppressed_tokens_are_kept(tmp_path):
    metadata = sentencepiece(False) | {"tokenizer.chat_template.tool_use": "{{ tools }}"}
    metadata |= {"tokenizer.ggml.suppress_tokens": [40], "tokenizer.ggml.eos_token_ids": [2, 41]}
    own, keys = there_and_back(metadata, tmp_path)
    assert Tokenizer.from_gguf(keys).templates == own.templates
    assert keys["tokenizer.ggml.suppress_tokens"] == [40]
    assert Tokenizer.from_gguf(keys).end_ids == {2, 41}


def test_difference_is_told(tmp_path):
    """A pipeline that no GGUF tokenizer has: it lowers letters."""
    write_tokenizer(tmp_path, sentencepiece(False), LLAMA)
    path = tmp_path / "tokenizer.json"
    spec = json.loads(path.read_text())
    spec["normalizer"] = {"type": "Sequence", "normalizers": [{"type": "Lowercase"}, spec["normalizer"]]}
    path.write_text(json.dumps(spec))
    with pytest.raises(UnsupportedError, match=r"llama: .* would become other tokens; gemma4: "):
        tokenizer_keys(tmp_path, LLAMA, "llama", 400)


def test_more_tokens_than_rows_is_refused(tmp_path):
    write_tokenizer(tmp_path, sentencepiece(False), LLAMA)
    with pytest.raises(UnsupportedError, match="the embedding only 100 rows"):
        tokenizer_keys(tmp_path, LLAMA, "llama", 100)
