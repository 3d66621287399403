"""Tokenizers of a few hundred tokens, as GGUF metadata and as model directories, and slow references for both."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bytefloor.text.tokenizer import Tokenizer
from bytefloor.text.vocabulary import byte_letters

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
LETTERS = [byte_letters()[byte] for byte in range(256)]
SPACE_LETTER = byte_letters()[0x20]  # how byte-level BPE spells a space

#: Merges that give words, digits and punctuation something to do.
MERGES = [
    *("h e", "l l", "he ll", "hell o", "3 3", "33 3", "i n", "r e", "\u00c3 \u00a9"),
    *(f"{SPACE_LETTER} w", f"{SPACE_LETTER}w o", "r l", "rl d", f"{SPACE_LETTER} {SPACE_LETTER}", "a b", "ab c"),
]
LLAMA3 = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|eom_id|>",
)
QWEN3 = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
QWEN3_ADDED = ("<think>", "</think>", "<tool_call>", "</tool_call>")
GEMMA3 = ("<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>")
GEMMA4 = ("<eos>", "<bos>", "<|turn>", "<turn|>", "<|think|>")
GEMMA4_ADDED = ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>')


def byte_level(
    control: Sequence[str] = (),
    added: Sequence[str] = (),
    *,
    pre: str | None = "llama-bpe",
    architecture: str = "llama",
    **keys: Any,
) -> dict[str, Any]:
    """Metadata of a byte-level BPE: 256 letters, the merges' tokens, then control and added tokens."""
    merged = [merge.replace(" ", "") for merge in MERGES]
    tokens = [*LETTERS, *merged, *control, *added]
    kinds = [NORMAL] * (len(LETTERS) + len(merged)) + [CONTROL] * len(control) + [USER_DEFINED] * len(added)
    metadata: dict[str, Any] = {
        "general.architecture": architecture,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": MERGES,
    }
    if pre is not None:
        metadata["tokenizer.ggml.pre"] = pre
    return _with_keys(metadata, keys)


#: Words of the small sentencepiece vocabulary, best first; "abab" and "aa" overlap themselves.
WORDS = ["▁h", "el", "lo", "ello", "▁hello", "ab", "abab", "aa", "aaa", "▁▁", "▁a", "ba", "b▁", "<s"]


def sentencepiece(**keys: Any) -> dict[str, Any]:
    """Metadata of a sentencepiece vocabulary: unk, s, /s, bytes, words by falling score, single letters."""
    letters = ["▁", *"abcdefghijklmnopqrstuvwxyz<>/s"]
    letters = list(dict.fromkeys(letters))
    # Worst first in the file, so that only the scores tell the order.
    words = [*reversed(letters), *reversed(WORDS)]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words, "<table>"]
    n_words = len(words)
    kinds = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * n_words, USER_DEFINED]
    metadata: dict[str, Any] = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.scores": [0.0] * 259 + [float(rank - n_words) for rank in range(n_words)] + [0.0],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    return _with_keys(metadata, keys)


def _with_keys(metadata: dict[str, Any], keys: dict[str, Any]) -> dict[str, Any]:
    """Adds `tokenizer.ggml.*` keys; a token given by its text becomes its id."""
    tokens = metadata["tokenizer.ggml.tokens"]
    for key, value in keys.items():
        if key == "chat_template":
            metadata["tokenizer.chat_template"] = value
        elif value is None:
            metadata.pop(f"tokenizer.ggml.{key}", None)
        else:
            metadata[f"tokenizer.ggml.{key}"] = (
                tokens.index(value) if isinstance(value, str) and value in tokens else value
            )
    return metadata


def id_of(tokenizer: Tokenizer, text: str) -> int:
    """The id of a token as the file spells it."""
    return list(tokenizer.vocabulary.texts).index(text)


def merge_slowly(metadata: dict[str, Any], text: str) -> list[int]:
    """Sentencepiece's rule to the letter: join the adjacent pair whose token scores highest, leftmost first."""
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    kinds = metadata["tokenizer.ggml.token_type"]
    score = {t: s for t, s, kind in zip(tokens, scores, kinds, strict=True) if kind == NORMAL}
    ids = {t: i for i, t in reversed(list(enumerate(tokens)))}
    symbols = list(text.replace(" ", "▁"))
    while True:
        pairs = [symbols[i] + symbols[i + 1] for i in range(len(symbols) - 1)]
        ranked = [(-score[pair], i) for i, pair in enumerate(pairs) if pair in score]
        if not ranked:
            break
        at = min(ranked)[1]
        symbols[at : at + 2] = [pairs[at]]
    found: list[int] = []
    for symbol in symbols:
        found += [ids[symbol]] if symbol in score else [ids[f"<0x{byte:02X}>"] for byte in symbol.encode()]
    return found


def write_directory(path: Path, *, special: Sequence[str] = GEMMA3, **files: Any) -> Path:
    """A model directory with a byte-level tokenizer.json; other files by name with `.` written `__`."""
    merged = [merge.replace(" ", "") for merge in MERGES]
    vocab = {token: id for id, token in enumerate([*LETTERS, *merged])}
    added = [
        {"id": len(vocab) + i, "content": token, "special": True, "normalized": False}
        | {"single_word": False, "lstrip": False, "rstrip": False}
        for i, token in enumerate(special)
    ]
    spec = {
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": vocab, "merges": MERGES, "byte_fallback": False, "ignore_merges": False},
    }
    spec |= files.pop("tokenizer", {})
    path.mkdir(parents=True, exist_ok=True)
    (path / "tokenizer.json").write_text(json.dumps(spec), encoding="utf-8")
    for name, value in files.items():
        text = value if isinstance(value, str) else json.dumps(value)
        (path / name.replace("__", ".")).write_text(text, encoding="utf-8")
    return path
