"""Inverse frequencies, radians a position, for every RoPE rule that is supported. Computed in float64."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from bytefloor.errors import FileError, UnsupportedError


def plain(head_size: int, base: float, factor: float = 1.0) -> tuple[float, ...]:
    """base^(-2i/E) / factor for pair i; factor > 1 is linear position scaling."""
    return tuple(base ** (-2 * i / head_size) / factor for i in range(head_size // 2))


def proportional(head_size: int, base: float, rotated_share: float, factor: float = 1.0) -> tuple[float, ...]:
    """The first share of the pairs turns, exponents running over the whole head; the others stand still."""
    n_rotated = int(rotated_share * head_size // 2)
    table = plain(head_size, base, factor)
    return table[:n_rotated] + (0.0,) * (len(table) - n_rotated)


def llama3(head_size: int, base: float, scaling: Mapping[str, Any]) -> tuple[float, ...]:
    """Llama 3.1's rule: long wavelengths are divided by the factor, short ones kept, those between interpolated."""
    factor = float(scaling["factor"])
    low = float(scaling.get("low_freq_factor", 1.0))
    high = float(scaling.get("high_freq_factor", 4.0))
    original_context = float(scaling.get("original_max_position_embeddings", 8192))
    if high <= low:
        raise FileError(f"rope_scaling llama3: high_freq_factor {high} is not above low_freq_factor {low}")
    table = []
    for frequency in plain(head_size, base):
        wavelength = 2 * math.pi / frequency
        smooth = min(1.0, max(0.0, (original_context / wavelength - low) / (high - low)))
        table.append((1 - smooth) * frequency / factor + smooth * frequency)
    return tuple(table)


def with_factors(table: Sequence[float], factors: Sequence[float]) -> tuple[float, ...]:
    """GGUF's rope_freqs: each frequency divided by its factor. Gemma 4 writes 1e30 for a pair that stands still."""
    if len(table) != len(factors):
        raise FileError(f"rope_freqs.weight has {len(factors)} factors, expected {len(table)} (half the head size)")
    if any(not math.isfinite(f) or f <= 0 for f in factors):
        raise FileError("rope_freqs.weight holds a factor that is not a positive number")
    return tuple(0.0 if f > 1e20 else x / f for x, f in zip(table, factors, strict=True))


def from_parameters(head_size: int, parameters: Mapping[str, Any], default_base: float) -> tuple[float, ...]:
    """A config.json's rope_parameters or rope_scaling (with rope_theta merged in); unknown rules are refused."""
    rule = parameters.get("rope_type", parameters.get("type", "default")) or "default"
    base = float(parameters.get("rope_theta") or default_base)
    share = float(parameters.get("partial_rotary_factor", 1.0) or 1.0)
    if rule == "proportional":
        return proportional(head_size, base, share, float(parameters.get("factor", 1.0)))
    if share != 1.0:
        raise UnsupportedError(f"RoPE {rule} with partial_rotary_factor {share} is not supported, only proportional is")
    if rule == "default":
        return plain(head_size, base)
    if rule == "linear":
        return plain(head_size, base, float(parameters["factor"]))
    if rule == "llama3":
        return llama3(head_size, base, parameters)
    raise UnsupportedError(f"RoPE scaling {rule} is not implemented (default, linear, llama3 and proportional are)")
