"""What a tokenizer is made of, wherever it was read from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tokenizers import Tokenizer as Backend

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


def ids_in(*values: object) -> frozenset[int]:
    """All token ids in values that may be absent, one id, or a list of ids."""
    found: set[int] = set()
    for value in values:
        if isinstance(value, bool) or value is None:
            continue
        if isinstance(value, int):
            found.add(value)
        elif isinstance(value, (list, tuple)):
            found |= ids_in(*value)
        elif hasattr(value, "tolist"):  # numpy
            found |= ids_in(value.tolist())
    return frozenset(found)
