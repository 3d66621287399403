"""What a tokenizer is made of, wherever it was read from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tokenizers import Tokenizer as Backend

from bytefloor.errors import FileError
from bytefloor.text.vocabulary import Vocabulary


@dataclass(frozen=True)
class Ingredients:
    """Facts read from one source, before the rules that hold for all sources are applied."""

    vocabulary: Vocabulary
    backend: Backend
    bos_id: int | None
    eos_id: int | None
    add_bos: bool
    end_ids: frozenset[int]
    suppressed_ids: frozenset[int]
    add_space_prefix: bool
    templates: Mapping[str, str]  # by name; "default" is the one to use
    notices: list[str] = field(default_factory=list)


def ids_in(where: str, *values: object) -> frozenset[int]:
    """All token ids in values that may be absent, one id, or a list of ids. FileError, with where, for others."""
    found: set[int] = set()
    for value in values:
        if hasattr(value, "tolist"):  # numpy
            value = value.tolist()
        if isinstance(value, list | tuple):
            found |= ids_in(where, *value)
        elif isinstance(value, int) and not isinstance(value, bool):
            found.add(value)
        elif value is not None:
            raise FileError(f"{where} holds {value!r}, expected a token id or a list of them")
    return frozenset(found)


def kept_templates(templates: Mapping[str, str]) -> dict[str, str]:
    """Without those that are blank: they would leave every message out."""
    return {name: source for name, source in templates.items() if source.strip()}
