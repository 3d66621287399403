"""Inverse frequencies, radians a position, for every RoPE rule that is supported. Computed in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence

from bytefloor.errors import FileError, UnsupportedError
from bytefloor.model.values import Values

RULES = ("default", "linear", "llama3", "proportional")
LARGEST_HEAD = 4096
"""Several times what any model has; a size beyond it is a broken file's, and no table is built for it."""


def plain(head_size: int, base: float, factor: float = 1.0) -> tuple[float, ...]:
    """base^(-2i/E) / factor for pair i; factor > 1 is linear position scaling."""
    if head_size > LARGEST_HEAD:
        raise UnsupportedError(f"a head size of {head_size} is not supported, at most {LARGEST_HEAD}")
    if base < 1:
        raise FileError(f"RoPE: the base is {base}, expected at least 1")
    return tuple(base ** (-2 * i / head_size) / factor for i in range(head_size // 2))


def proportional(head_size: int, base: float, rotated_share: float, factor: float = 1.0) -> tuple[float, ...]:
    """The first share of the pairs turns, exponents running over the whole head; the others stand still."""
    n_rotated = int(rotated_share * head_size // 2)
    table = plain(head_size, base, factor)
    return table[:n_rotated] + (0.0,) * (len(table) - n_rotated)


def llama3(head_size: int, base: float, scaling: Values) -> tuple[float, ...]:
    """Llama 3.1's rule: long wavelengths are divided by the factor, short ones kept, those between interpolated."""
    factor = scaling.positive("factor")
    low, high = scaling.positive("low_freq_factor"), scaling.positive("high_freq_factor")
    original_context = scaling.positive("original_max_position_embeddings")
    if high <= low:
        raise scaling.wrong("high_freq_factor", high, f"more than low_freq_factor = {low}")
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


def from_parameters(head_size: int, parameters: Values) -> tuple[float, ...]:
    """A config.json's rope_parameters or rope_scaling, with rope_theta merged in; unknown rules are refused."""
    rule = parameters.get("rope_type", "default")
    if rule not in RULES:
        raise UnsupportedError(f"RoPE scaling {rule} is not implemented ({', '.join(RULES)} are)")
    base, share = parameters.positive("rope_theta"), parameters.positive("partial_rotary_factor", 1.0)
    if share > 1:
        raise parameters.wrong("partial_rotary_factor", share, "at most 1")
    if rule == "proportional":
        return proportional(head_size, base, share, parameters.positive("factor", 1.0))
    if share != 1.0:
        raise UnsupportedError(f"RoPE {rule} with partial_rotary_factor {share} is not supported, only proportional is")
    if rule == "llama3":
        return llama3(head_size, base, parameters)
    if rule == "linear":
        return plain(head_size, base, parameters.positive("factor"))
    if parameters.get("rope_type") is None and parameters.get("factor") is not None:
        raise parameters.wrong("rope_type", None, f"the rule that factor = {parameters.get('factor')} is for")
    return plain(head_size, base)
