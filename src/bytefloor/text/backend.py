"""Builds the `tokenizers` object that turns plain text into ids.

Control tokens are left out of it altogether: whatever plain text says, it cannot become one. The caller cuts text at
control tokens itself where they are wanted.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from bytefloor.errors import FileError, UnsupportedError
from bytefloor.text.vocabulary import SPACE, Kind, Vocabulary

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _modern(digits: str, letters: str = r"\p{L}") -> str:
    """The split that Llama 3 and Qwen share but for how digits are grouped and which marks belong to words."""
    word = r"[^\r\n\p{L}\p{N}]?" + f"[{letters}]+"
    symbols = rf" ?[^\s{letters}\p{{N}}]+[\r\n]*"
    return "|".join((_CONTRACTIONS, word, digits, symbols, _SPACES))


#: For each known pre-tokenizer, the splits applied one after the other.
_SPLITS: dict[str, tuple[str, ...]] = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "llama-bpe": (_modern(r"\p{N}{1,3}"),),
    "qwen2": (_modern(r"\p{N}"),),
    "qwen35": (_modern(r"\p{N}", r"\p{L}\p{M}"),),
}
KNOWN_SPLITS = tuple(_SPLITS)
_ALIASES = {
    "llama3": "llama-bpe",
    "llama-v3": "llama-bpe",
    "smaug-bpe": "llama-bpe",
    "gpt2": "gpt-2",
    "deepseek-r1-qwen": "qwen2",
    "starcoder": "smollm",
    "refact": "smollm",
    "command-r": "smollm",
}
#: Pre-tokenizers whose words are looked up whole before any merge is tried.
_WHOLE_WORDS = frozenset({"llama-bpe"})
#: Pre-tokenizers whose models were trained on composed characters.
_COMPOSED = frozenset({"qwen2", "qwen35"})


def settled_pre(name: str) -> str:
    """The name under which a pre-tokenizer is known here; refuses others, since a wrong split degrades silently."""
    settled = _ALIASES.get(name, name)
    if settled not in _SPLITS:
        known = ", ".join(sorted({*_SPLITS, *_ALIASES}))
        raise UnsupportedError(f"tokenizer.ggml.pre is {name!r}, which is not implemented; known: {known}")
    return settled


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Half a million small tuples make the collector walk the heap again and again for nothing."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def byte_level(vocabulary: Vocabulary, merges: Iterable[str | Sequence[str]], pre: str) -> Backend:
    """Byte-level BPE (GPT-2, Llama 3, Qwen, SmolLM2)."""
    backend = _bpe(
        vocabulary, _known_merges(vocabulary, merges), byte_fallback=False, ignore_merges=pre in _WHOLE_WORDS
    )
    if pre in _COMPOSED:
        backend.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _SPLITS[pre]]
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, letters])
    return backend


def raw_text(vocabulary: Vocabulary, merges: Iterable[str | Sequence[str]]) -> Backend:
    """BPE over characters with spaces spelled U+2581 (Gemma 4). Runs of newlines are words of their own."""
    with _no_garbage_collection():
        backend = _bpe(vocabulary, _known_merges(vocabulary, merges), byte_fallback=True, ignore_merges=False)
    backend.normalizer = normalizers.Replace(" ", SPACE)
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[^\n]+|\n+"), "isolated")
    return backend


def sentencepiece(vocabulary: Vocabulary, scores: Sequence[float], add_space_prefix: bool) -> Backend:
    """Merges by score with byte fall-back (Llama 2, Gemma 3).

    Merging the adjacent pair whose joint token scores highest is BPE in which each pair ranks as its joint token does.
    """
    with _no_garbage_collection():
        backend = _bpe(vocabulary, _merges_by_score(vocabulary, scores), byte_fallback=True, ignore_merges=False)
    spaces: normalizers.Normalizer = normalizers.Replace(" ", SPACE)
    if add_space_prefix:
        spaces = normalizers.Sequence([normalizers.Prepend(SPACE), spaces])
    backend.normalizer = spaces
    return backend


def _merges_by_score(vocabulary: Vocabulary, scores: Sequence[float]) -> list[tuple[str, str]]:
    """Every way to put a normal token together from two, best token first.

    The order among one token's own pairs is free: equal pairs merge from the left, so two of them hardly ever compete
    for the same letters. Tests compare with the slow rule on runs of letters, where they would.
    """
    if len(scores) != len(vocabulary):
        raise FileError(f"tokenizer.ggml.scores has {len(scores)} entries, expected {len(vocabulary)} (one a token)")
    ranked = [(-scores[id], text) for id, text, kind in vocabulary.spellable() if kind == Kind.NORMAL]
    ranked.sort(key=lambda pair: pair[0])
    known = {text for _, text in ranked}
    return [
        (left, right)
        for _, text in ranked
        for cut in range(len(text) - 1, 0, -1)
        if (left := text[:cut]) in known and (right := text[cut:]) in known
    ]


def _bpe(vocabulary: Vocabulary, merges: list[tuple[str, str]], *, byte_fallback: bool, ignore_merges: bool) -> Backend:
    ids = _plain_ids(vocabulary)
    model = BPE(
        vocab=ids,
        merges=merges,
        byte_fallback=byte_fallback,
        ignore_merges=ignore_merges,
        fuse_unk=False,
        unk_token=_unknown(vocabulary, ids),
    )
    backend = Backend(model)
    backend.add_tokens(
        [AddedToken(text, normalized=False) for _, text, kind in vocabulary.spellable() if kind == Kind.USER_DEFINED]
    )
    return backend


def _plain_ids(vocabulary: Vocabulary) -> dict[str, int]:
    """Tokens that plain text can become. Where a text occurs twice, the first is meant."""
    plain = (Kind.NORMAL, Kind.BYTE, Kind.USER_DEFINED)
    ids: dict[str, int] = {}
    for id, text, kind in vocabulary.spellable():
        if kind in plain and text not in ids:
            ids[text] = id
    return ids


def _known_merges(vocabulary: Vocabulary, merges: Iterable[str | Sequence[str]]) -> list[tuple[str, str]]:
    """The file's merges, less those that speak of tokens left out here."""
    ids = _plain_ids(vocabulary)
    pairs = map(split_merge, merges)
    return [pair for pair in pairs if pair[0] in ids and pair[1] in ids and pair[0] + pair[1] in ids]


def split_merge(merge: str | Sequence[str]) -> tuple[str, str]:
    """A merge as GGUF writes it ("left right"; left may itself begin with a space) or as a pair."""
    if not isinstance(merge, str):
        return merge[0], merge[1]
    cut = merge.find(" ", 1)
    return (merge[:cut], merge[cut + 1 :]) if cut > 0 else (merge, "")


def _unknown(vocabulary: Vocabulary, ids: dict[str, int]) -> str | None:
    """The token for what the vocabulary cannot spell. It enters under a name that no text can contain."""
    for id, kind in enumerate(vocabulary.kinds):
        if kind == Kind.UNKNOWN or vocabulary.texts[id] == "<unk>":
            ids[UNKNOWN_NAME] = id
            return UNKNOWN_NAME
    return None


#: Longer than one character and in no merge, so that only the model itself can produce it.
UNKNOWN_NAME = "\ufdd0unknown\ufdd0"
