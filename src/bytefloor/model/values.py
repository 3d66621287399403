"""Typed look-ups in a configuration. Errors name the key, what was found and what was expected.

They do not name the file: load_model, which knows it, puts its path before every error of a reader.
"""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from bytefloor.errors import FileError


class Values:
    """A configuration's values by key; null counts as absent.

    prefix: what stands before each key where an error names it.
    """

    def __init__(self, values: Mapping[str, Any], prefix: str = "") -> None:
        self.values, self.prefix = values, prefix

    def get(self, key: str, default: Any = None) -> Any:
        """The value as it is, or the default."""
        value = self.values.get(key)
        return default if value is None else value

    def integer(self, key: str, default: int | None = None, least: int = 1, most: int | None = None) -> int:
        """An integer, positive unless least says otherwise."""
        value = self.get(key, default)
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        if not is_whole or not least <= value <= (sys.maxsize if most is None else most):
            wanted = {0: "an integer", 1: "a positive integer"}.get(least, f"an integer of at least {least}")
            raise self.wrong(key, value, wanted if most is None else f"an integer from {least} to {most}")
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        """A number above 0 and below infinity."""
        value = self.get(key, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 < value <= sys.float_info.max:
            raise self.wrong(key, value, "a positive number")
        return float(value)

    def positive_or_none(self, key: str) -> float | None:
        """As positive; None where the key is absent or 0."""
        value = self.get(key)
        return None if value is None or value == 0 else self.positive(key)

    def flag(self, key: str, default: bool = False) -> bool:
        """true or false."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, value, "true or false")
        return value

    def mapping(self, key: str) -> Mapping[str, Any]:
        """A mapping; an empty one where the key is absent."""
        value = self.get(key, {})
        if not isinstance(value, Mapping):
            raise self.wrong(key, value, "a mapping")
        return value

    def items(self, key: str, count: int, default: Sequence[Any] | None = None) -> list[Any]:
        """A list of that many values."""
        value = self.get(key, default)
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise self.wrong(key, value, f"a list of {count} values")
        if len(value) != count:
            raise FileError(f"{self.prefix}{key} has {len(value)} values, expected {count}")
        return list(value)

    def layers(self, key: str, n_tensors: int, default: int | None = None) -> int:
        """The number of layers, at most that of tensors: nothing is built for a size that no file could fill."""
        count = self.integer(key, default)
        if count > n_tensors:
            raise FileError(
                f"{self.prefix}{key} is {count}, expected at most {n_tensors}, as many as there are tensors"
            )
        return count

    def wrong(self, key: str, found: object, expected: str) -> FileError:
        """The error to raise; a long value is told by its start and its end."""
        what = "absent" if found is None else reprlib.repr(found)
        return FileError(f"{self.prefix}{key} is {what}, expected {expected}")
