"""MLX's quantisation settings: which mode, bits and group each module has.

``quantization`` holds the defaults (group_size, bits, mode) and, under module names, what differs: a dict, or false
for a module that was left alone. Module names come in four prefix spellings, so they are compared normalised.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import Any, NamedTuple

from bytefloor.errors import FileError, UnsupportedError
from bytefloor.files.directory import is_tower, strip_prefix
from bytefloor.files.safetensors import RawTensor

_AFFINE_BITS = (2, 3, 4, 5, 6, 8)
_AFFINE_GROUPS = (32, 64, 128)
# mode -> group, bits when the settings leave them out. Only affine allows others.
_DEFAULTS = {"affine": (64, 4), "mxfp4": (32, 4), "mxfp8": (32, 8), "nvfp4": (16, 4)}
_WORD_BITS = 32

Resolved = tuple[str, tuple[int, ...], dict[str, RawTensor]]


class Layout(NamedTuple):
    """How one module is packed. ``is_explicit``: the module's own entry says so, not the defaults."""

    mode: str
    group: int
    bits: int
    is_explicit: bool


def is_mlx(settings: Mapping[str, Any]) -> bool:
    """MLX writes no quant_method, or a name of its own beside group_size."""
    method = settings.get("quant_method")
    return method is None or (method in ("mlx", "affine") and "group_size" in settings)


def resolver(settings: Mapping[str, Any]) -> Callable[[str, Mapping[str, RawTensor]], Resolved]:
    """The settings as a function from a module and its arrays to its format."""
    overrides = {strip_prefix(key): value for key, value in settings.items() if _is_override(key, value)}
    default = _layout("quantization", settings, None, is_explicit=False)

    def resolve(module: str, parts: Mapping[str, RawTensor]) -> Resolved:
        entry = overrides.get(module, True)
        if entry is False:
            raise FileError(
                f"module {module}: config.json leaves it unquantised, but it has {', '.join(sorted(parts))}"
            )
        layout = default
        if entry is not True:
            # An entry without a mode means affine to MLX; a module without biases shows that the file's mode is meant.
            implied = "affine" if "biases" in parts else default.mode
            layout = _layout(module, entry, implied, is_explicit=True)
        return _resolve(module, parts, layout)

    return resolve


def unmatched(settings: Mapping[str, Any], modules: Container[str]) -> list[str]:
    """Entries for modules that the model does not have quantised. An ignored override is worth a word."""
    named = {key: strip_prefix(key) for key, value in settings.items() if isinstance(value, Mapping)}
    return [key for key, module in named.items() if module not in modules and not is_tower(module)]


def _is_override(key: str, value: Any) -> bool:
    return isinstance(value, Mapping) or (isinstance(value, bool) and key not in _DEFAULTS)


def _layout(where: str, settings: Mapping[str, Any], implied: str | None, is_explicit: bool) -> Layout:
    mode = settings.get("mode", implied or "affine")
    if not isinstance(mode, str) or mode not in _DEFAULTS:
        raise UnsupportedError(f"{where}: quantization mode {mode!r} is not supported ({', '.join(_DEFAULTS)})")
    default_group, default_bits = _DEFAULTS[mode]
    group = settings.get("group_size") or default_group
    bits = settings.get("bits") or default_bits
    if not isinstance(group, int) or not isinstance(bits, int):
        raise FileError(f"{where}: group_size {group!r} and bits {bits!r} must be whole numbers")
    if mode == "affine":
        if bits not in _AFFINE_BITS or group not in _AFFINE_GROUPS:
            raise UnsupportedError(
                f"{where}: affine quantization with bits {bits} and group_size {group} is not "
                f"supported (bits {_AFFINE_BITS}, group_size {_AFFINE_GROUPS})"
            )
    elif (group, bits) != (default_group, default_bits):
        raise UnsupportedError(
            f"{where}: mode {mode} has bits {default_bits} and group_size {default_group}, found {bits} and {group}"
        )
    return Layout(mode, group, bits, is_explicit)


def _resolve(module: str, parts: Mapping[str, RawTensor], layout: Layout) -> Resolved:
    weight, scales = parts.get("weight"), parts.get("scales")
    if weight is None or scales is None:
        raise FileError(f"module {module}: has {', '.join(sorted(parts))}, expected weight and scales")
    _check_parts(module, parts, layout, weight, scales)
    bits = layout.bits if layout.is_explicit else _bits_from_shapes(module, weight, scales, layout)
    columns = weight.shape[-1] * _WORD_BITS // bits
    if weight.shape[-1] * _WORD_BITS % bits or columns != scales.shape[-1] * layout.group:
        raise FileError(
            f"module {module}: weight {list(weight.shape)} holds {columns} columns of {bits} bits, scales "
            f"{list(scales.shape)} cover {scales.shape[-1] * layout.group} in groups of {layout.group}; "
            "config.json and the arrays contradict each other"
        )
    shape = (*weight.shape[:-1], columns)
    if layout.mode != "affine":
        return f"mlx-{layout.mode}", shape, {"weight": weight, "scales": scales}
    named = {"weight": weight, "scales": scales, "biases": parts["biases"]}
    return f"affine-{bits}b-g{layout.group}", shape, named


def _check_parts(
    module: str, parts: Mapping[str, RawTensor], layout: Layout, weight: RawTensor, scales: RawTensor
) -> None:
    """Types and shapes that hold whatever the bits are."""
    biases = parts.get("biases")
    extra = set(parts) - {"weight", "scales", "biases"}
    if extra:
        raise FileError(f"module {module}: unexpected part {', '.join(sorted(extra))} in an MLX file")
    if (biases is not None) != (layout.mode == "affine"):
        found = "has" if biases is not None else "has no"
        raise FileError(f"module {module}: mode {layout.mode} by config.json, but it {found} biases")
    if weight.dtype != "U32":
        raise FileError(f"module {module}: weight is {weight.dtype}, expected packed U32")
    expected = ("BF16", "F16", "F32") if layout.mode == "affine" else ("U8", "F8_E4M3", "F8_E8M0")
    for name, part in (("scales", scales), ("biases", biases)):
        if part is None:
            continue
        if part.dtype not in expected:
            raise FileError(f"module {module}: {name} are {part.dtype}, expected one of {', '.join(expected)}")
        if len(part.shape) != 2 or len(weight.shape) != 2 or part.shape != (weight.shape[0], scales.shape[-1]):
            raise FileError(
                f"module {module}: {name} {list(part.shape)} do not fit weight {list(weight.shape)} "
                f"(expected [{weight.shape[0] if weight.shape else 0}, groups])"
            )


def _bits_from_shapes(module: str, weight: RawTensor, scales: RawTensor, layout: Layout) -> int:
    """Without an entry of its own the group is the default, and bits are what makes the arrays fit it."""
    columns = scales.shape[-1] * layout.group
    words = weight.shape[-1]
    bits = words * _WORD_BITS // columns if columns else 0
    if layout.mode != "affine":
        return layout.bits
    if bits not in _AFFINE_BITS or bits * columns != words * _WORD_BITS:
        raise FileError(
            f"module {module}: weight {list(weight.shape)} and scales {list(scales.shape)} fit no bits in groups of "
            f"{layout.group}, and config.json has no entry for it"
        )
    return bits
