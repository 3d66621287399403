"""A directory's tokenizer as the ``tokenizer.*`` keys of a GGUF file, and the proof that both read text alike."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bytefloor.errors import BytefloorError, UnsupportedError
from bytefloor.files.gguf_writer import Typed
from bytefloor.text.backend import KNOWN_SPLITS, split_merge
from bytefloor.text.tokenizer import Tokenizer
from bytefloor.text.vocabulary import SPACE, Kind

_GGML = "tokenizer.ggml."
PROBES = (
    "The quick brown fox can't jump over 12345 lazy dogs; it's 3.14159 o'clock, isn't it?",
    "  Leading spaces,\ttabs\t\tand   runs  of   them.  \n\n\nLines\r\n  indented\n\t- item\n",
    "def f(x):\n    return {'a': [x ** 2 for _ in range(10)], \"b\": x != None}  # comment\n",
    "Grüße aus Köln – naïve café, señor; Žluťoučký kůň úpěl ďábelské ódy.",
    "Съешь же ещё этих мягких французских булок 1234567890",
    "我能吞下玻璃而不伤身体。日本語のテキスト、カタカナ。한국어 문장입니다.",
    "हिन्दी में लिखा हुआ वाक्य। العربية: مرحبا بالعالم",
    "👩‍👩‍👧‍👦 🇩🇪 ½ ² ™ … „quoted“ «так» a\u0301 e\u0308\u200b\u00a0x",
    "HTTPServer2XMLParser_v3.2-rc1+build.567 https://example.org/a?b=c&d=%20#frag",
    "'S 'LL I'VE I'd DON'T it’s \u2581 <0x0A> <s> </s> [INST] <|im_start|> <bos>",
    "aaaaaaaaaaaaaaaaaaaaaaaa========----------______    .....!!!!????\x00\x07\x7f",
)
"""Text on which pre-tokenizers are known to differ: contractions, digits, runs of spaces, marks, unusual bytes."""


def tokenizer_keys(directory: Path, config: Mapping[str, Any], family: str, n_rows: int) -> dict[str, Typed]:
    """The keys for a vocabulary of ``n_rows`` embedding rows; rows beyond the tokens are named as padding.

    UnsupportedError where no GGUF tokenizer gives the same tokens for the same text.
    """
    wanted = Tokenizer.from_directory(directory, config)
    spec = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
    shared = (
        _vocabulary(wanted, n_rows, spec["model"].get("unk_token"))
        | _ids(wanted)
        | _named_ids(directory, wanted)
        | _templates(wanted)
    )
    failures = []
    for name, own in _readings(wanted, spec, family, n_rows):
        keys = own | shared
        try:
            found = Tokenizer.from_gguf({key: typed.value for key, typed in keys.items()})
        except BytefloorError as error:
            failures.append(f"{name}: {error}")
            continue
        difference = differs(wanted, found)
        if not difference:
            return keys
        failures.append(f"{name}: {difference}")
    raise UnsupportedError(f"{directory / 'tokenizer.json'} cannot become a GGUF tokenizer: {'; '.join(failures)}")


def _readings(
    wanted: Tokenizer, spec: Mapping[str, Any], family: str, n_rows: int
) -> list[tuple[str, dict[str, Typed]]]:
    """The kinds of GGUF tokenizer that it could be, the likeliest first."""
    merges = [" ".join(split_merge(merge)) for merge in spec["model"].get("merges") or []]
    listed = {_GGML + "merges": Typed("string", merges)}
    if wanted.vocabulary.is_byte_level:
        return [(pre, {_GGML + "model": _text("gpt2"), _GGML + "pre": _text(pre), **listed}) for pre in KNOWN_SPLITS]
    by_score = {
        _GGML + "model": _text("llama"),
        _GGML + "scores": Typed("f32", _scores(wanted, spec, n_rows)),
        _GGML + "add_space_prefix": Typed("bool", wanted.add_space_prefix),
    }
    raw = {_GGML + "model": _text("gemma4"), **listed}
    found = [("llama", by_score), ("gemma4", raw)]
    return found[::-1] if family == "gemma4" else found


def _text(value: str) -> Typed:
    return Typed("string", value)


def _scores(wanted: Tokenizer, spec: Mapping[str, Any], n_rows: int) -> list[float]:
    """A token is worth the more the earlier a merge makes it; what no merge makes comes after all that one does."""
    ids = {text: id for id, text in enumerate(wanted.vocabulary.texts)}
    merges = spec["model"].get("merges") or []
    scores = [-float(len(merges) + 1)] * n_rows
    for rank in range(len(merges) - 1, -1, -1):
        left, right = split_merge(merges[rank])
        if left + right in ids:
            scores[ids[left + right]] = -float(rank)
    return scores


def _vocabulary(wanted: Tokenizer, n_rows: int, unknown: str | None) -> dict[str, Typed]:
    texts, kinds = list(wanted.vocabulary.texts), [int(kind) for kind in wanted.vocabulary.kinds]
    if unknown in texts:
        kinds[texts.index(unknown)] = int(Kind.UNKNOWN)  # special in a tokenizer.json, which has no kind for it
    if len(texts) > n_rows:
        raise UnsupportedError(f"the tokenizer has {len(texts)} tokens, the embedding only {n_rows} rows")
    if not wanted.vocabulary.is_byte_level:  # runs of spaces, which GGUF files spell as they are
        texts = [
            text.replace(SPACE, " ") if kind == Kind.USER_DEFINED else text
            for text, kind in zip(texts, kinds, strict=True)
        ]
    names = [text or f"[PAD{id}]" for id, text in enumerate(texts)]
    padding = [f"[PAD{id}]" for id in range(len(texts), n_rows)]
    kinds += [int(Kind.UNUSED)] * len(padding)
    return {_GGML + "tokens": Typed("string", names + padding), _GGML + "token_type": Typed("i32", kinds)}


def _ids(wanted: Tokenizer) -> dict[str, Typed]:
    keys = {_GGML + "add_bos_token": Typed("bool", wanted.add_bos)}
    for name, id in (("bos_token_id", wanted.bos_id), ("eos_token_id", wanted.eos_id)):
        if id is not None:
            keys[_GGML + name] = Typed("u32", id)
    others = sorted(wanted.end_ids - {wanted.eos_id})
    if others:
        keys[_GGML + "eot_token_id"] = Typed("u32", others[0])
        keys[_GGML + "eos_token_ids"] = Typed("u32", sorted(wanted.end_ids))
    suppressed = sorted(wanted.suppressed_ids - wanted.vocabulary.unused)
    if suppressed:
        keys[_GGML + "suppress_tokens"] = Typed("u32", suppressed)
    return keys


def _named_ids(directory: Path, wanted: Tokenizer) -> dict[str, Typed]:
    """Padding and the unknown token, which other readers of these files ask for."""
    path = directory / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    keys = {}
    for key, name in (("pad_token", "padding_token_id"), ("unk_token", "unknown_token_id")):
        token = settings.get(key)
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str) and text in wanted.vocabulary.texts:
            keys[_GGML + name] = Typed("u32", wanted.vocabulary.texts.index(text))
    return keys


def _templates(wanted: Tokenizer) -> dict[str, Typed]:
    key = "tokenizer.chat_template"
    return {key if name == "default" else f"{key}.{name}": _text(text) for name, text in wanted.templates.items()}


def differs(wanted: Tokenizer, found: Tokenizer, probes: Sequence[str] = PROBES) -> str:
    """How two tokenizers differ, empty where they do not: vocabulary, special tokens, template, and the probes."""
    n_tokens = min(wanted.n_tokens, found.n_tokens)
    if any(kind != Kind.UNUSED for kind in [*wanted.vocabulary.kinds[n_tokens:], *found.vocabulary.kinds[n_tokens:]]):
        return f"there would be {found.n_tokens} tokens, the source has {wanted.n_tokens}"
    for id in range(n_tokens):
        own, other = (tokenizer.vocabulary for tokenizer in (wanted, found))
        kinds = {own.kinds[id], other.kinds[id]}
        is_same = len(kinds) == 1 or kinds == {Kind.CONTROL, Kind.UNKNOWN}
        if not is_same or (own.texts[id] != other.texts[id] and kinds != {Kind.UNUSED}):
            return f"token {id} would be {other.texts[id]!r}, {other.kinds[id].name} for {own.kinds[id].name}"
    for name in ("bos_id", "eos_id", "add_bos", "end_ids", "add_space_prefix", "templates"):
        if getattr(wanted, name) != getattr(found, name):
            return f"{name} would be {getattr(found, name)!r:.80}, the source has {getattr(wanted, name)!r:.80}"
    for text in probes:
        if wanted.encode(text) != found.encode(text):
            return f"{text[:40]!r}... would become other tokens"
    return ""
