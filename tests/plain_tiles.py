"""Codes of a tile written out once more, in plain steps and float64, for tests to compare with and for costs.

The tile is divided until it is even, one axis after the other, with deviations as numpy has them; what the product does
with sums over squares is done here with the values themselves. Each ingredient can be left out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Recipe:
    """bits: of a code; 16 leaves values as they are. over: the axis that a scale and a zero serve, 0 for positions
    (they are a lane's), 1 for lanes (a position's). rounds: how often the tile is made even, 0 for not at all."""

    bits: int
    over: int
    rounds: int = 8


KEYS, VALUES = Recipe(4, 0), Recipe(2, 1)


@dataclass(frozen=True)
class Tile:
    """codes [PAGE, E]; factor, scale, zero: with an axis of one where they do not vary."""

    codes: Array
    factor: Array
    scale: Array
    zero: Array

    @property
    def values(self) -> Array:
        """[PAGE, E]"""
        return (self.codes * self.scale + self.zero) * self.factor


def to_bf16(x: Array) -> Array:
    """The nearest number that bf16 has."""
    return torch.from_numpy(x).bfloat16().double().numpy()


def code_tile(x: Array, recipe: Recipe) -> Tile:
    """x [PAGE, E], finite."""
    along, across = recipe.over, 1 - recipe.over
    factor, even = np.ones_like(x.sum(across, keepdims=True)), x
    for _ in range(recipe.rounds):
        step = _deviation(even, across)
        factor, even = factor * step, even / step
        even = even / _deviation(even, along)
    factor = to_bf16(factor)
    even = x / factor
    low, high = even.min(along, keepdims=True), even.max(along, keepdims=True)
    n = 2**recipe.bits - 1
    zero, scale = to_bf16(low), to_bf16((high - low) / n)
    codes = np.clip(np.round(np.divide(even - zero, scale, out=np.zeros_like(x), where=scale > 0)), 0, n)
    return Tile(codes, factor, scale, zero)


def _deviation(x: Array, axis: int) -> Array:
    found = x.std(axis, ddof=1, keepdims=True)
    return np.where(found > 0, found, 1.0)


def code_values(held: Tensor, keys: Recipe = KEYS, values: Recipe = VALUES) -> Tensor:
    """What codes leave of pages [2, J, PAGE, E], K and V, in the same dtype."""
    found = held.double().numpy().copy()
    for half, recipe in enumerate((keys, values)):
        if recipe.bits < 16:
            for tile in found[half]:
                tile[:] = code_tile(tile, recipe).values
    return torch.from_numpy(found).to(held.dtype)
