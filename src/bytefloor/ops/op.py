"""The record of an operation: operands with symbolic shapes, a reference, its bytes and its cases.

Shapes are written in the one alphabet of the project: B sequences, T token rows, R rows that want logits, D model
width, H query heads, J key/value heads, E head width, K reduced, N produced, F feed-forward width, L layers, P width
of a per-layer embedding, V vocabulary. A letter binds to whatever the first operand that uses it has there; a later
operand that disagrees is a ShapeError. ``...`` stands for any leading axes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from bytefloor.errors import ShapeError

Axis = int | str
"""A number, or a symbol (T, R, B) whose number is known only when the step runs."""

Sizes = Mapping[str, int]
ELLIPSIS = "..."


@dataclass(frozen=True)
class Operand:
    """One tensor an op takes or gives. A weight is stored as the file has it; its reference sees float32."""

    name: str
    shape: tuple[str, ...]
    dtype: str = "float32"
    is_optional: bool = False


@dataclass(frozen=True)
class Case:
    """Sizes, attributes and a seed from which one test of the op is made."""

    sizes: dict[str, int]
    attributes: dict[str, Any] = field(default_factory=dict)
    seed: int = 0


@dataclass(frozen=True)
class Op:
    """Everything known of an operation. Its name is its file, its test id, its bench row and its profiler row.

    reference: called as reference(**operands, **attributes); the cache of an op that ``reads_cache`` or
        ``writes_cache`` comes as ``cache``. It computes in the dtype of its floating operands and nowhere rounds by
        itself. An op that writes the cache returns None.
    weight_bytes: what a call reads of its weights, given bound sizes and their stored bytes; None: all of them once.
    cache_bytes: what a call reads or writes of the cache, given bound sizes (S live positions a sequence, C bytes that
        one head keeps of a position) and attributes.
    flops: multiply and add each counted as one.
    is_exact: its kernel must agree with the correctly rounded reference but for a stated share of outputs;
        otherwise error_budget bounds the normalised mean square error.
    is_rounding: drops information on purpose (int8 activations); an executor that runs without rounding skips it.
    """

    name: str
    operands: tuple[Operand, ...]
    outputs: tuple[Operand, ...]
    reference: Callable[..., Any]
    attributes: tuple[str, ...] = ()
    weight_bytes: Callable[[Sizes, int], int] | None = None
    cache_bytes: Callable[[Sizes, Mapping[str, Any]], int] | None = None
    flops: Callable[[Sizes], int] = lambda sizes: 0
    is_exact: bool = True
    error_budget: float = 0.0
    is_rounding: bool = False
    reads_cache: bool = False
    writes_cache: bool = False
    cases: tuple[Case, ...] = ()

    def bind(self, shapes: Mapping[str, tuple[Axis, ...]]) -> dict[str, Axis]:
        """Match actual shapes with the symbolic ones; returns letter -> axis, raises ShapeError naming the axis."""
        letters: dict[str, Axis] = {}
        for operand in self.operands:
            if operand.name in shapes:
                self._bind_one(operand, shapes[operand.name], letters)
            elif not operand.is_optional:
                raise ShapeError(f"{self.name}: operand {operand.name} is missing")
        unknown = set(shapes) - {operand.name for operand in self.operands}
        if unknown:
            raise ShapeError(f"{self.name}: takes no operand {sorted(unknown)[0]}")
        return letters

    def _bind_one(self, operand: Operand, shape: tuple[Axis, ...], letters: dict[str, Axis]) -> None:
        spec = operand.shape
        if spec and spec[0] == ELLIPSIS:
            spec = tuple(f"{ELLIPSIS}{i}" for i in range(len(shape) - len(spec) + 1)) + spec[1:]
        if len(spec) != len(shape):
            raise ShapeError(
                f"{self.name}: {operand.name} has {len(shape)} axes {list(shape)}, expected {list(operand.shape)}"
            )
        for position, (letter, found) in enumerate(zip(spec, shape, strict=True)):
            expected = int(letter) if letter.isdigit() else letters.setdefault(letter, found)
            if expected != found:
                raise ShapeError(
                    f"{self.name}: {operand.name} axis {position} ({letter}) is {found}, expected {expected}"
                )

    def infer(self, letters: Mapping[str, Axis]) -> dict[str, tuple[Axis, ...]]:
        """Shapes of the outputs once the letters are bound."""
        leading = tuple(axis for letter, axis in letters.items() if letter.startswith(ELLIPSIS))
        shapes: dict[str, tuple[Axis, ...]] = {}
        for output in self.outputs:
            axes: list[Axis] = []
            for letter in output.shape:
                axes.extend(leading if letter == ELLIPSIS else (letters[letter],))
            shapes[output.name] = tuple(axes)
        return shapes


def resolve(shape: tuple[Axis, ...], sizes: Sizes) -> tuple[int, ...]:
    """A symbolic shape in numbers."""
    return tuple(axis if isinstance(axis, int) else sizes[axis] for axis in shape)


def n_elements(shape: tuple[Axis, ...], sizes: Sizes) -> int:
    """How many numbers a symbolic shape holds."""
    return math.prod(resolve(shape, sizes))
