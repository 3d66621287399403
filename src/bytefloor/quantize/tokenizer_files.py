"""A GGUF file's tokenizer as the files of a directory: tokenizer.json and those that go with it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bytefloor.errors import UnsupportedError
from bytefloor.quantize.tokenizer_keys import differs
from bytefloor.text.tokenizer import Tokenizer
from bytefloor.text.vocabulary import Kind, settled_kind


def write_tokenizer(directory: Path, metadata: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """tokenizer.json, tokenizer_config.json, generation_config.json, chat_template.jinja.

    UnsupportedError where what was written would not give the same tokens for the same text.
    """
    wanted = Tokenizer.from_gguf(metadata)
    _dump(directory / "tokenizer.json", _specification(wanted))
    texts = wanted.vocabulary.texts
    named = {
        "bos_token": wanted.bos_id,
        "eos_token": wanted.eos_id,
        "pad_token": metadata.get("tokenizer.ggml.padding_token_id"),
        "unk_token": metadata.get("tokenizer.ggml.unknown_token_id"),
    }
    special = {key: texts[id] for key, id in named.items() if id is not None and 0 <= id < len(texts)}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": wanted.add_bos, **special}
    others = {name: text for name, text in wanted.templates.items() if name != "default"}
    if others:
        listed = [{"name": name, "template": text} for name, text in wanted.templates.items()]
        settings["chat_template"] = listed
    elif wanted.chat_template is not None:
        (directory / "chat_template.jinja").write_text(wanted.chat_template, encoding="utf-8")
    _dump(directory / "tokenizer_config.json", settings)
    generation: dict[str, Any] = {"eos_token_id": sorted(wanted.end_ids)}
    if wanted.bos_id is not None:
        generation["bos_token_id"] = wanted.bos_id
    suppressed = sorted(wanted.suppressed_ids - wanted.vocabulary.unused)
    if suppressed:
        generation["suppress_tokens"] = suppressed
    _dump(directory / "generation_config.json", generation)
    difference = differs(wanted, Tokenizer.from_directory(directory, config))
    if difference:
        raise UnsupportedError(f"its tokenizer cannot become a tokenizer.json: {difference}")


def _specification(wanted: Tokenizer) -> dict[str, Any]:
    """The pipeline that this engine runs, with the tokens that it keeps away from plain text put back as added ones."""
    spec: dict[str, Any] = json.loads(wanted.backend.to_str())
    vocabulary = wanted.vocabulary
    model = spec["model"]
    own = {id: text for text, id in model["vocab"].items()}
    for id, text in enumerate(vocabulary.texts):
        if text and text not in model["vocab"] and _is_named(text, vocabulary.kinds[id]):
            own[id] = text
    # The name that stands for what cannot be spelled is this engine's own.
    unknown = model.get("unk_token")
    if unknown is not None and unknown in model["vocab"]:
        place = model["vocab"][unknown]
        own[place] = model["unk_token"] = vocabulary.texts[place]
    model["vocab"] = {text: id for id, text in sorted(own.items())}
    spec["added_tokens"] = [
        {
            "id": id,
            "content": own[id],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind not in (Kind.USER_DEFINED, Kind.UNUSED),
        }
        for id, kind in enumerate(vocabulary.kinds)
        if kind not in (Kind.NORMAL, Kind.BYTE) and id in own
    ]
    if wanted.add_bos and wanted.bos_id is not None:
        spec["post_processor"] = _bos_first(vocabulary.texts[wanted.bos_id], wanted.bos_id)
    spec["decoder"] = _decoder(wanted)
    return spec


def _is_named(text: str, kind: Kind) -> bool:
    """Whether a token is written at all: one that nothing can become is a hole, unless its text says what it is."""
    return kind != Kind.UNUSED or settled_kind(text, Kind.USER_DEFINED) == Kind.UNUSED


def _bos_first(text: str, id: int) -> dict[str, Any]:
    def token(kind: int) -> dict[str, Any]:
        return {"SpecialToken": {"id": text, "type_id": kind}}

    def sequence(name: str, kind: int) -> dict[str, Any]:
        return {"Sequence": {"id": name, "type_id": kind}}

    return {
        "type": "TemplateProcessing",
        "single": [token(0), sequence("A", 0)],
        "pair": [token(0), sequence("A", 0), token(1), sequence("B", 1)],
        "special_tokens": {text: {"id": text, "ids": [id], "tokens": [text]}},
    }


def _decoder(wanted: Tokenizer) -> dict[str, Any]:
    """For other engines: this one decodes bytes itself."""
    if wanted.vocabulary.is_byte_level:
        return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    steps: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if wanted.add_space_prefix:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {"type": "Sequence", "decoders": steps}


def _dump(path: Path, value: Mapping[str, Any]) -> None:
    # A vocabulary may hold bytes that are no UTF-8; JSON's escapes keep them.
    path.write_text(json.dumps(value, indent=1, ensure_ascii=True) + "\n", encoding="utf-8")
