"""JSON as it goes out."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

_SURROGATES = re.compile("[\ud800-\udfff]")


def to_json(value: Any) -> bytes:
    """The value's bytes. Names of files and texts in them may hold bytes that are no text: those are replaced."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        return msgspec.json.encode(_replaced(value))


def _replaced(value: Any) -> Any:
    if isinstance(value, str):
        return _SURROGATES.sub("\N{REPLACEMENT CHARACTER}", value)
    if isinstance(value, Mapping):
        return {_replaced(key): _replaced(item) for key, item in value.items()}
    return [_replaced(item) for item in value] if isinstance(value, list | tuple) else value
