"""A tokenizer's ingredients out of a model directory: tokenizer.json and the small JSON files beside it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from bytefloor.errors import FileError, UnsupportedError
from bytefloor.text.backend import UNKNOWN_NAME, split_merge
from bytefloor.text.ingredients import Ingredients, ids_in, kept_templates
from bytefloor.text.vocabulary import Kind, Vocabulary, settled_kind

_BYTE = "<0x{:02X}>"
MOST_GAPS = 16
"""An id may be so many times as large as there are tokens: a table is as long as the largest."""


def read(directory: Path, config: Mapping[str, Any]) -> Ingredients:
    """Builds everything; `config` is the parsed config.json."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise FileError(f"{path} is missing: the tokenizer is read from tokenizer.json only")
    try:
        return _read(directory, _json(path), config)
    except (AttributeError, IndexError, KeyError, TypeError) as problem:
        raise FileError(f"{path} is not built as a tokenizer.json: {problem!r}") from problem


def _read(directory: Path, spec: dict[str, Any], config: Mapping[str, Any]) -> Ingredients:
    settings = _json_if_there(directory / "tokenizer_config.json")
    generation = _json_if_there(directory / "generation_config.json")
    vocabulary = _vocabulary(spec)
    text_config = config.get("text_config") or {}
    bos_id = _named_id(vocabulary, settings.get("bos_token"), _first(config, text_config, "bos_token_id"))
    eos_id = _named_id(vocabulary, settings.get("eos_token"), _first(config, text_config, "eos_token_id"))
    ends = [eos_id, *(source.get("eos_token_id") for source in (generation, config, text_config))]
    return Ingredients(
        vocabulary=vocabulary,
        backend=_backend(spec, vocabulary),
        bos_id=bos_id,
        eos_id=eos_id,
        add_bos=_adds_bos(spec, settings, config, vocabulary, bos_id),
        end_ids=ids_in(f"{directory}: eos_token_id", *ends),
        suppressed_ids=ids_in(f"{directory}: suppress_tokens", generation.get("suppress_tokens")),
        add_space_prefix=_adds_space(spec),
        templates=_templates(directory, settings),
    )


def _vocabulary(spec: Mapping[str, Any]) -> Vocabulary:
    model = spec["model"]
    if model.get("type", "BPE") != "BPE":
        raise UnsupportedError(
            f"tokenizer.json has a {model.get('type')!r} model, which is not implemented; known: 'BPE'"
        )
    vocab: dict[str, int] = model["vocab"]
    added = spec.get("added_tokens") or []
    ids = [*vocab.values(), *(token["id"] for token in added)]
    n_tokens = max(ids, default=-1) + 1
    if min(ids, default=0) < 0 or n_tokens > MOST_GAPS * (len(ids) + 1):
        raise FileError(f"tokenizer.json has {len(ids)} tokens with ids up to {n_tokens - 1}: expected them from 0 on")
    texts = [""] * n_tokens
    kinds = [Kind.UNUSED] * n_tokens
    spelled_bytes = {_BYTE.format(byte) for byte in range(256)} if model.get("byte_fallback") else set()
    for text, id in vocab.items():
        texts[id] = text
        kinds[id] = settled_kind(text, Kind.BYTE if text in spelled_bytes else Kind.NORMAL)
    for token in added:
        texts[token["id"]] = token["content"]
        kind = Kind.CONTROL if token.get("special") else Kind.USER_DEFINED
        kinds[token["id"]] = settled_kind(token["content"], kind)
    return Vocabulary(texts, kinds, is_byte_level=any(part["type"] == "ByteLevel" for part in _parts(spec)))


def _backend(spec: dict[str, Any], vocabulary: Vocabulary) -> Backend:
    """The file's own pipeline, without control tokens: no plain text can become one."""
    model = spec["model"]
    plain = (Kind.NORMAL, Kind.BYTE, Kind.USER_DEFINED)
    kept = {text: id for text, id in model["vocab"].items() if vocabulary.kinds[id] in plain}
    # Ordinary added tokens enter the model's vocabulary, so that they keep their ids although others are gone.
    added = [t for t in spec.get("added_tokens") or [] if vocabulary.kinds[t["id"]] == Kind.USER_DEFINED]
    kept |= {token["content"]: token["id"] for token in added}
    merges = [pair for pair in map(split_merge, model.get("merges") or []) if {*pair, "".join(pair)} <= kept.keys()]
    unknown = model.get("unk_token")
    trimmed = {**model, "vocab": kept, "merges": merges, "unk_token": unknown if unknown in kept else None}
    if unknown in model["vocab"] and unknown not in kept:
        trimmed["vocab"] = {**kept, UNKNOWN_NAME: model["vocab"][unknown]}
        trimmed["unk_token"] = UNKNOWN_NAME
    pipeline = {
        **spec,
        "model": trimmed,
        "added_tokens": added,
        "post_processor": None,
        "truncation": None,
        "padding": None,
    }
    try:
        return Backend.from_str(json.dumps(pipeline))
    except Exception as problem:  # the library raises plain Exception
        raise FileError(f"tokenizer.json cannot be read as a tokenizer: {problem}") from problem


def _adds_bos(
    spec: Mapping[str, Any],
    settings: Mapping[str, Any],
    config: Mapping[str, Any],
    vocabulary: Vocabulary,
    bos_id: int | None,
) -> bool:
    """What the settings say, else what the post-processor does, else the family's rule."""
    asked = settings.get("add_bos_token")
    if isinstance(asked, bool):
        return asked
    if bos_id is not None and vocabulary.texts[bos_id] in _post_processor_tokens(spec.get("post_processor")):
        return True
    kinds = (str(config.get("model_type", "")), str((config.get("text_config") or {}).get("model_type", "")))
    return any(kind.startswith("gemma") for kind in kinds)


def _post_processor_tokens(processor: Any) -> set[str]:
    """Tokens that a post-processor puts around a single text."""
    found: set[str] = set()
    if not isinstance(processor, dict):
        return found
    for inner in processor.get("processors", []):
        found |= _post_processor_tokens(inner)
    for item in processor.get("single", []):
        if isinstance(item, dict) and "SpecialToken" in item:
            found.add(item["SpecialToken"]["id"])
    return found


def _adds_space(spec: Mapping[str, Any]) -> bool:
    """Whether the pipeline puts a space before the text."""
    for part in _parts(spec):
        if part["type"] == "Prepend" or (
            part["type"] == "Metaspace" and part.get("prepend_scheme", "always") != "never"
        ):
            return True
    return False


def _parts(spec: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Every stage before the model, sequences opened."""
    waiting = [spec.get("normalizer"), spec.get("pre_tokenizer")]
    while waiting:
        part = waiting.pop(0)
        if isinstance(part, dict):
            yield part
            waiting += [*part.get("normalizers", []), *part.get("pretokenizers", [])]


def _templates(directory: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """The file of its own wins, then tokenizer_config.json, then chat_template.json."""
    found: dict[str, str] = {}
    for source in (
        _json_if_there(directory / "chat_template.json").get("chat_template"),
        settings.get("chat_template"),
    ):
        if isinstance(source, str):
            found = {"default": source}
        elif isinstance(source, list):
            found = {str(entry["name"]): str(entry["template"]) for entry in source}
    own = directory / "chat_template.jinja"
    if own.is_file():
        try:
            # A mark of the byte order, which some editors write, is no part of the prompt.
            found = {"default": own.read_text(encoding="utf-8-sig")}
        except (OSError, UnicodeDecodeError) as problem:
            raise FileError(f"{own}: cannot be read as text: {problem}") from problem
    return kept_templates(found)


def _named_id(vocabulary: Vocabulary, token: Any, fallback: Any) -> int | None:
    """The id of a token given by text (or as {"content": text}); else the first id of the fall-back."""
    text = token.get("content") if isinstance(token, dict) else token
    if isinstance(text, str) and text in vocabulary.control:
        return vocabulary.control[text]
    ids = fallback if isinstance(fallback, list) else [fallback]
    return next((id for id in ids if isinstance(id, int) and 0 <= id < len(vocabulary)), None)


def _first(config: Mapping[str, Any], text_config: Mapping[str, Any], key: str) -> Any:
    return config[key] if config.get(key) is not None else text_config.get(key)


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as problem:
        raise FileError(f"{path} is not JSON: {problem}") from problem
    except RecursionError:
        raise FileError(f"{path} is not JSON of a model: nested too deeply") from None
    if not isinstance(value, dict):
        raise FileError(f"{path} holds a {type(value).__name__}, expected an object")
    return value


def _json_if_there(path: Path) -> dict[str, Any]:
    return _json(path) if path.is_file() else {}
