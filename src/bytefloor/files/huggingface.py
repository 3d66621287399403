"""``quantization_config`` as transformers, compressed-tensors and ModelOpt write it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from bytefloor.errors import FileError, UnsupportedError
from bytefloor.files.directory import strip_prefix
from bytefloor.files.safetensors import RawTensor

Resolved = tuple[str, tuple[int, ...], dict[str, RawTensor]]
Resolver = Callable[[str, Mapping[str, RawTensor]], Resolved]

_BAND = 128
_CT_FORMATS = ("float-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized", "dense")
_MODELOPT_ALGORITHMS = ("FP8", "NVFP4", "MXFP4")


def resolver(settings: Mapping[str, Any]) -> Resolver:
    """A function from a module and its arrays to its format, or a refusal that names the method."""
    method = settings.get("quant_method")
    if method == "fp8":
        return _fp8(settings)
    if method == "compressed-tensors":
        _check_compressed_tensors(settings)
        return _compressed_tensors
    if method == "modelopt":
        return _modelopt(settings)
    if method == "bytefloor":
        return _own(settings)
    raise UnsupportedError(
        f"quantization method {method!r} is not supported; supported are fp8, compressed-tensors "
        "(float-quantized, nvfp4, mxfp4), modelopt (FP8, NVFP4, MXFP4), bytefloor, MLX and GGUF files"
    )


def from_hf_quant_config(document: Mapping[str, Any]) -> dict[str, Any]:
    """ModelOpt's own file, hf_quant_config.json, in the form of a quantization_config."""
    inner = document.get("quantization")
    if not isinstance(inner, Mapping):
        raise FileError("hf_quant_config.json has no quantization section")
    return {**inner, "quant_method": "modelopt"}


def _fp8(settings: Mapping[str, Any]) -> Resolver:
    block = settings.get("weight_block_size")
    if block not in (None, [_BAND, _BAND]):
        raise UnsupportedError(f"fp8 weights with weight_block_size {block} are not supported, only [128, 128]")
    if settings.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise UnsupportedError(f"fp8 weights of kind {settings['fmt']} are not supported, only e4m3")

    def resolve(module: str, parts: Mapping[str, RawTensor]) -> Resolved:
        return _resolve_fp8(module, parts, is_blocked=block is not None)

    return resolve


def _resolve_fp8(module: str, parts: Mapping[str, RawTensor], is_blocked: bool) -> Resolved:
    """One scale a tensor, a row or a 128x128 block; told apart by the scale's shape, checked against the settings."""
    weight = _need(module, parts, "weight", ("F8_E4M3",))
    n_rows, columns = _matrix(module, weight)
    name = "weight_scale_inv" if "weight_scale_inv" in parts else "weight_scale"
    scale = _need(module, parts, name, ("F32", "BF16", "F16"))
    _refuse_extra(module, parts, {"weight", name})
    if is_blocked:
        expected = (-(-n_rows // _BAND), -(-columns // _BAND))
        if name != "weight_scale_inv" or scale.shape != expected:
            raise FileError(
                f"module {module}: {name} has shape {list(scale.shape)}, expected weight_scale_inv "
                f"{list(expected)} for 128x128 blocks of {list(weight.shape)}"
            )
        return "FP8-E4M3-128x128", weight.shape, {"weight": weight, "weight_scale_inv": scale}
    named = {"weight": weight, "weight_scale": scale}
    if scale.n_elements == 1:
        return "FP8-E4M3-tensor", weight.shape, named
    if scale.shape in ((n_rows,), (n_rows, 1)) and name == "weight_scale":
        return "FP8-E4M3-row", weight.shape, named
    raise FileError(f"module {module}: {name} has shape {list(scale.shape)}, expected one value or {n_rows} rows")


def _check_compressed_tensors(settings: Mapping[str, Any]) -> None:
    groups = settings.get("config_groups")
    schemes = list(groups.values()) if isinstance(groups, Mapping) else []
    own = [scheme.get("format") for scheme in schemes if isinstance(scheme, Mapping)]
    default = settings.get("format")
    # "mixed-precision" at the top means that each group names its own.
    named = [item or default for item in own] or [default]
    for item in named:
        if item not in _CT_FORMATS:
            raise UnsupportedError(f"compressed-tensors format {item!r} is not supported ({', '.join(_CT_FORMATS)})")
    for key in ("transform_config", "sparsity_config"):
        value = settings.get(key)
        if isinstance(value, Mapping) and value and value.get("format") != "dense":
            raise UnsupportedError(f"compressed-tensors {key} is not supported")
    for scheme in schemes:
        _check_scheme(scheme)


def _check_scheme(scheme: Any) -> None:
    weights = scheme.get("weights") if isinstance(scheme, Mapping) else None
    if not isinstance(weights, Mapping):
        return
    kind, bits, strategy = weights.get("type"), weights.get("num_bits"), weights.get("strategy")
    if kind != "float" or bits not in (4, 8):
        raise UnsupportedError(f"compressed-tensors weights of type {kind}, {bits} bits are not supported")
    if bits == 8 and strategy not in ("channel", "tensor"):
        raise UnsupportedError(f"compressed-tensors FP8 with strategy {strategy!r} is not supported (channel, tensor)")
    if weights.get("symmetric") is False or weights.get("actorder"):
        raise UnsupportedError("compressed-tensors with zero points or activation order is not supported")


def _compressed_tensors(module: str, parts: Mapping[str, RawTensor]) -> Resolved:
    if "weight_packed" not in parts:
        return _resolve_fp8(module, parts, is_blocked=False)
    packed = _need(module, parts, "weight_packed", ("U8",))
    scale = parts.get("weight_scale")
    if scale is not None and scale.dtype == "F8_E4M3":
        return _fp4(module, parts, packed, "NVFP4-compressed-tensors", 16, "weight_global_scale")
    return _fp4(module, parts, packed, "MXFP4-compressed-tensors", 32, None)


def _modelopt(settings: Mapping[str, Any]) -> Resolver:
    algorithm = settings.get("quant_algo")
    if algorithm not in _MODELOPT_ALGORITHMS:
        raise UnsupportedError(f"ModelOpt algorithm {algorithm!r} is not supported ({', '.join(_MODELOPT_ALGORITHMS)})")

    def resolve(module: str, parts: Mapping[str, RawTensor]) -> Resolved:
        if algorithm == "FP8":
            return _resolve_fp8(module, parts, is_blocked=False)
        weight = _need(module, parts, "weight", ("U8",))
        if algorithm == "NVFP4":
            return _fp4(module, parts, weight, "NVFP4-modelopt", 16, "weight_scale_2")
        return _fp4(module, parts, weight, "MXFP4-modelopt", 32, None)

    return resolve


def _own(settings: Mapping[str, Any]) -> Resolver:
    """This project's own files: the name of a format for all quantised modules, and of those that differ."""
    modules = settings.get("modules", {})
    if not isinstance(modules, Mapping):
        raise FileError(
            f"quantization_config: modules is {type(modules).__name__}, expected names of formats by module"
        )
    others = {strip_prefix(module): name for module, name in modules.items()}

    def resolve(module: str, parts: Mapping[str, RawTensor]) -> Resolved:
        name = others.get(module, settings.get("format"))
        if name == "FP8-E4M3-row":
            resolved = _resolve_fp8(module, parts, is_blocked=False)
            # One scale for a matrix of one row looks like one for the tensor.
            return (name, *resolved[1:]) if resolved[0] == "FP8-E4M3-tensor" and resolved[1][0] == 1 else resolved
        if name != "FP4-E2M1-g128":
            raise UnsupportedError(
                f"module {module}: bytefloor format {name!r} is not known (FP4-E2M1-g128, FP8-E4M3-row)"
            )
        return _fp4(module, parts, _need(module, parts, "weight", ("U8",)), name, 128, None)

    return resolve


def _fp4(
    module: str, parts: Mapping[str, RawTensor], packed: RawTensor, format_name: str, group: int, extra: str | None
) -> Resolved:
    """Two codes a byte, a scale a group, and for NVFP4 possibly one more scale for the tensor."""
    n_rows, n_bytes = _matrix(module, packed)
    columns = 2 * n_bytes
    # E8M0 scales are often typed U8; which of the two they are follows from the method, never from the type.
    dtypes = {16: ("F8_E4M3",), 32: ("U8", "F8_E8M0"), 128: ("F32",)}[group]
    scale = _need(module, parts, "weight_scale", dtypes)
    if columns % group or scale.shape != (n_rows, columns // group):
        raise FileError(
            f"module {module}: weight_scale has shape {list(scale.shape)}, expected "
            f"[{n_rows}, {columns / group:g}] for {columns} columns in groups of {group}"
        )
    packed_name = "weight_packed" if "weight_packed" in parts else "weight"
    named = {packed_name: packed, "weight_scale": scale}
    if extra is not None and extra in parts:
        second = _need(module, parts, extra, ("F32",))
        if second.n_elements != 1:
            raise FileError(f"module {module}: {extra} has shape {list(second.shape)}, expected one value")
        named[extra] = second
    _refuse_extra(module, parts, set(named))
    return format_name, (n_rows, columns), named


def _need(module: str, parts: Mapping[str, RawTensor], part: str, dtypes: tuple[str, ...]) -> RawTensor:
    raw = parts.get(part)
    if raw is None:
        raise FileError(f"module {module}: has {', '.join(sorted(parts))}, expected {part}")
    if raw.dtype not in dtypes:
        raise FileError(f"module {module}: {part} is {raw.dtype}, expected {' or '.join(dtypes)}")
    return raw


def _matrix(module: str, raw: RawTensor) -> tuple[int, int]:
    if len(raw.shape) != 2:
        raise FileError(f"module {module}: weight has shape {list(raw.shape)}, expected a matrix")
    return raw.shape[0], raw.shape[1]


def _refuse_extra(module: str, parts: Mapping[str, RawTensor], used: set[str]) -> None:
    """A scale that nobody applies is a wrong model."""
    extra = sorted(set(parts) - used)
    if extra:
        raise FileError(f"module {module}: part {extra[0]} does not belong to a module with {', '.join(sorted(used))}")
