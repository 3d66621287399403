"""Which weight format each module of a safetensors model is in.

A module is a name and its arrays: ``q_proj`` with ``weight``, ``scales``, ``biases``. config.json says what was meant,
the arrays say what is there; the two must agree, and where they do not the model is refused with the names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from bytefloor.errors import FileError, UnsupportedError
from bytefloor.files import huggingface, mlx
from bytefloor.files.directory import Arrays
from bytefloor.files.safetensors import RawTensor
from bytefloor.files.stored import StoredTensor, find_format

_PLAIN = ("F32", "F16", "BF16")
# What turns a plain weight into a quantised module. ``bias`` is a tensor of its own, not a part.
_SCALE_PARTS = (
    "scales", "biases", "weight_scale", "weight_scale_inv", "weight_scale_2", "weight_global_scale", "weight_packed",
    "weight_shape", "weight_zero_point",
)  # fmt: skip
# Parts that only other quantisers write, whatever config.json says.
_FOREIGN_PARTS = {
    "qweight": "GPTQ or AWQ",
    "qzeros": "GPTQ or AWQ",
    "g_idx": "GPTQ",
    "absmax": "bitsandbytes",
    "quant_map": "bitsandbytes",
    "SCB": "bitsandbytes",
    "pre_quant_scale": "AWQ (pre_quant_scale)",
    "weight_g_idx": "activation-ordered compressed-tensors",
}

# name and parts of a module -> name of its format, shape of its weight, its parts under the format's names.
Resolved = tuple[str, tuple[int, ...], dict[str, RawTensor]]
Resolver = Callable[[str, Mapping[str, RawTensor]], Resolved]


def interpret(arrays: Arrays) -> dict[str, StoredTensor]:
    """Every tensor of a model, quantised modules put together under ``<module>.weight``."""
    settings = _settings(arrays.config)
    resolve = _resolver(settings)
    modules = _modules(arrays.raw)
    tensors: dict[str, StoredTensor] = {}
    for name, raw in arrays.raw.items():
        module, _, part = name.rpartition(".")
        _refuse_foreign(raw, part)
        if module not in modules or part not in modules[module]:
            tensors[name] = plain(name, raw)
    for module, parts in modules.items():
        format_name, shape, named = resolve(module, parts)
        tensors[f"{module}.weight"] = assemble(f"{module}.weight", format_name, shape, named)
    if settings is not None and mlx.is_mlx(settings) and (unused := mlx.unmatched(settings, modules)):
        arrays.notices.append(f"{len(unused)} quantization entries of config.json fit no module, such as {unused[0]}")
    return tensors


def _resolver(settings: Mapping[str, Any] | None) -> Resolver:
    """The reading of config.json's quantisation settings that fits who wrote them."""
    if settings is None:
        return _refuse_unexplained
    return mlx.resolver(settings) if mlx.is_mlx(settings) else huggingface.resolver(settings)


def _settings(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """``quantization`` or ``quantization_config``, at the root or in text_config; MLX's own key first."""
    text = config.get("text_config")
    for key in ("quantization", "quantization_config"):
        for holder in (config, text):
            found = holder.get(key) if isinstance(holder, Mapping) else None
            if isinstance(found, Mapping) and found:
                return found
    return None


def _refuse_unexplained(module: str, parts: Mapping[str, RawTensor]) -> Resolved:
    raise FileError(
        f"module {module}: its parts ({', '.join(sorted(parts))}) say that it is quantised, but config.json holds no "
        "quantization settings"
    )


def _modules(raw: Mapping[str, RawTensor]) -> dict[str, dict[str, RawTensor]]:
    """Arrays by module and part, for the modules that have scales."""
    modules: dict[str, dict[str, RawTensor]] = {}
    for name, array in raw.items():
        module, _, part = name.rpartition(".")
        if part in _SCALE_PARTS:
            modules.setdefault(module, {})[part] = array
    for module, parts in modules.items():
        if f"{module}.weight" in raw:
            parts["weight"] = raw[f"{module}.weight"]
    return modules


def _refuse_foreign(raw: RawTensor, part: str) -> None:
    if part in _FOREIGN_PARTS:
        raise UnsupportedError(f"tensor {raw.name}: {_FOREIGN_PARTS[part]} weights are not supported")


def plain(name: str, raw: RawTensor) -> StoredTensor:
    """A tensor that is its values. Other types are listed, not decoded."""

    def read() -> dict[str, Tensor]:
        tensor.require_format()
        return {"values": raw.read().reshape(tensor.n_rows, raw.shape[-1] if raw.shape else 1)}

    record = find_format(raw.dtype) if raw.dtype in _PLAIN else None
    tensor = StoredTensor(name, raw.shape, raw.dtype, record, raw.n_bytes, read)
    return tensor


def assemble(name: str, format_name: str, shape: tuple[int, ...], parts: Mapping[str, RawTensor]) -> StoredTensor:
    """A quantised weight from its arrays."""

    def read() -> dict[str, Tensor]:
        return {part: raw.read() for part, raw in parts.items()}

    n_bytes = sum(raw.n_bytes for raw in parts.values())
    return StoredTensor(name, shape, format_name, find_format(format_name), n_bytes, read)
