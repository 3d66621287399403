"""A tokenizer's ingredients out of the `tokenizer.*` keys of a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer as Backend

from bytefloor.errors import FileError, UnsupportedError
from bytefloor.text import backend as build
from bytefloor.text.ingredients import Ingredients, ids_in, kept_templates
from bytefloor.text.vocabulary import Kind, Vocabulary, settled_kind

_GGML = "tokenizer.ggml."
_TEMPLATE = "tokenizer.chat_template"
#: Token id keys whose tokens end a reply.
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
#: Byte-level pre-tokenizers whose models were trained behind a BOS.
_PRE_WITH_BOS = frozenset({"llama-bpe"})


def read(metadata: Mapping[str, Any]) -> Ingredients:
    """Builds everything; metadata values are plain Python or numpy values."""
    try:
        return _read(metadata)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as problem:
        raise FileError(f"the keys {_GGML}* are not those of a tokenizer: {problem!r}") from problem


def _read(metadata: Mapping[str, Any]) -> Ingredients:
    model = _required(metadata, "model")
    if model not in ("gpt2", "llama", "gemma4"):
        raise UnsupportedError(
            f"tokenizer.ggml.model is {model!r}, which is not implemented; known: gpt2, llama, gemma4"
        )
    notices: list[str] = []
    pre = _pre(metadata, notices) if model == "gpt2" else None
    vocabulary = _vocabulary(metadata, is_byte_level=model == "gpt2")
    add_space_prefix = model == "llama" and bool(metadata.get(_GGML + "add_space_prefix", True))
    bos_id = _id(metadata, "bos_token_id", len(vocabulary))
    eos_id = _id(metadata, "eos_token_id", len(vocabulary))
    asked = metadata.get(_GGML + "add_bos_token")
    return Ingredients(
        vocabulary=vocabulary,
        backend=_backend(metadata, vocabulary, pre, add_space_prefix),
        bos_id=bos_id,
        eos_id=eos_id,
        add_bos=bool(asked) if asked is not None else _family_adds_bos(metadata, pre),
        end_ids=ids_in("the keys of end tokens", *(metadata.get(_GGML + key) for key in (*_END_KEYS, "eos_token_ids"))),
        suppressed_ids=ids_in(f"{_GGML}suppress_tokens", metadata.get(_GGML + "suppress_tokens")),
        add_space_prefix=add_space_prefix,
        templates=_templates(metadata),
        notices=notices,
    )


def _pre(metadata: Mapping[str, Any], notices: list[str]) -> str:
    name = metadata.get(_GGML + "pre")
    if name is None:
        notices.append(
            "tokenizer.ggml.pre is missing: the file does not say how words are split, so its text is split by the "
            "default rule, which is wrong for most models and lowers quality. Convert the model again to fix it."
        )
        return "default"
    return build.settled_pre(str(name))


def _vocabulary(metadata: Mapping[str, Any], is_byte_level: bool) -> Vocabulary:
    texts = _as_list(_required(metadata, "tokens"))
    kinds = _listed(metadata, "token_type") or [Kind.NORMAL] * len(texts)
    if len(kinds) != len(texts):
        raise FileError(f"tokenizer.ggml.token_type has {len(kinds)} entries, expected {len(texts)} (one a token)")
    named = (settled_kind(text, int(kind)) for text, kind in zip(texts, kinds, strict=True))
    return Vocabulary(texts, list(named), is_byte_level)


def _backend(metadata: Mapping[str, Any], vocabulary: Vocabulary, pre: str | None, add_space_prefix: bool) -> Backend:
    if metadata[_GGML + "model"] == "llama":
        scores = _as_list(_required(metadata, "scores"))
        return build.sentencepiece(vocabulary, scores, add_space_prefix)
    merges = _as_list(_required(metadata, "merges"))
    if pre is None:
        return build.raw_text(vocabulary, merges)
    return build.byte_level(vocabulary, merges, pre)


def _family_adds_bos(metadata: Mapping[str, Any], pre: str | None) -> bool:
    if pre is None or str(metadata.get("general.architecture", "")).startswith("gemma"):
        return True
    return pre in _PRE_WITH_BOS


def _templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    found = {
        key.removeprefix(_TEMPLATE + "."): str(value)
        for key, value in metadata.items()
        if key.startswith(_TEMPLATE + ".")
    }
    if _TEMPLATE in metadata:
        found["default"] = str(metadata[_TEMPLATE])
    return kept_templates(found)


def _id(metadata: Mapping[str, Any], key: str, n_tokens: int) -> int | None:
    value = metadata.get(_GGML + key)
    return int(value) if value is not None and 0 <= int(value) < n_tokens else None


def _required(metadata: Mapping[str, Any], key: str) -> Any:
    value = metadata.get(_GGML + key)
    if value is None:
        raise FileError(f"the file has no {_GGML}{key}: there is no tokenizer in it")
    return value


def _listed(metadata: Mapping[str, Any], key: str) -> list[Any]:
    value = metadata.get(_GGML + key)
    return [] if value is None else _as_list(value)


def _as_list(value: Any) -> list[Any]:
    return value.tolist() if hasattr(value, "tolist") else list(value)
