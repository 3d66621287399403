"""MLX-quantised directories of the tiny models, and their oracles. Packing goes bit by bit: slow and obvious."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from tiny import TinyModel, config_json, own_tensors, seeded, stored_name, write_json, write_tokenizer
from tiny_gguf import set_weight
from tiny_variants import Json, nest

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
MODES = {"mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)}  # bits and group that the float modes are tied to


@dataclass(frozen=True)
class Packed:
    weight: torch.Tensor  # uint32, low bits first
    scales: torch.Tensor
    biases: torch.Tensor | None
    values: torch.Tensor  # float32, what the three above mean


def pack_bits(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """[N, K] codes -> [N, K * bits / 32] words: code i fills bits i*bits and up of the row, low bit first."""
    planes = (codes.numpy().astype(np.uint8)[..., None] >> np.arange(bits, dtype=np.uint8)) & 1
    stream = planes.reshape(codes.shape[0], -1)
    words = np.packbits(stream, axis=1, bitorder="little").view("<u4")
    return torch.from_numpy(words.astype(np.int64)).to(torch.uint32)


def quantise_affine(w: torch.Tensor, bits: int, group: int, dtype: torch.dtype) -> Packed:
    """w = code * scale + bias. Every other group runs downward from its maximum: scales may be negative."""
    grouped = w.reshape(w.shape[0], -1, group)
    low, high = grouped.amin(-1), grouped.amax(-1)
    top = 2**bits - 1
    step = torch.where(high > low, (high - low) / top, torch.ones_like(low))
    is_downward = torch.arange(low.shape[1]) % 2 == 1
    scales = torch.where(is_downward, -step, step).to(dtype)
    biases = torch.where(is_downward, high, low).to(dtype)
    s, b = scales.float()[..., None], biases.float()[..., None]
    codes = ((grouped - b) / s).round().clamp(0, top)
    return Packed(pack_bits(codes.reshape(w.shape), bits), scales, biases, (codes * s + b).reshape(w.shape))


def quantise_float(w: torch.Tensor, mode: str, seed: str) -> Packed:
    """The three float modes: FP4 or FP8 codes under one scale byte a group, no biases."""
    bits, group = MODES[mode]
    grouped = w.reshape(w.shape[0], -1, group)
    largest = grouped.abs().amax(-1).clamp_min(1e-20)
    if mode == "nvfp4":
        coded = (largest / 6.0).clamp_min(2.0**-9).to(torch.float8_e4m3fn)  # the smallest scale that is not zero
        scales, s = coded.view(torch.uint8), coded.float()
    else:
        # Equal neighbours would hide a loader that takes its scales from the wrong place.
        slack = torch.randint(0, 3, largest.shape, generator=seeded(seed, mode))
        exponent = torch.log2(largest / (6.0 if mode == "mxfp4" else 448.0)).ceil() + slack
        scales, s = (exponent + 127).to(torch.uint8), torch.exp2(exponent)
    scaled = grouped / s[..., None]
    if bits == 8:
        coded = scaled.to(torch.float8_e4m3fn)
        codes, values = coded.view(torch.uint8), coded.float()
    else:
        nearest = (scaled.abs()[..., None] - E2M1).abs().argmin(-1)
        codes = nearest.to(torch.uint8) + 8 * (scaled < 0).to(torch.uint8)
        values = torch.copysign(E2M1[nearest], scaled)
    return Packed(pack_bits(codes.reshape(w.shape), bits), scales, None, (values * s[..., None]).reshape(w.shape))


def _settings(module: str, default: Json, overrides: Mapping[str, Json | bool]) -> Json | bool:
    return next((value for pattern, value in overrides.items() if fnmatchcase(module, pattern)), default)


def write_tiny_mlx(
    model: TinyModel,
    directory: Path,
    default: Json | None = None,
    overrides: Mapping[str, Json | bool] | None = None,
    *,
    prefix: str | None = None,
    override_prefix: str | None = None,
    config_key: str = "quantization",
    in_text_config: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> TinyModel:
    """The model as MLX stores it, embeddings included; returns the oracle of that directory.

    `default` and the values of `overrides` hold bits, group_size and, if not affine, mode; False leaves a module as it
    is. Keys of `overrides` are patterns over names without a prefix (`layers.0.mlp.down_proj`, `embed_tokens`); the
    config lists each module they match under `override_prefix`, which may differ from the `prefix` of the tensors.
    A prefix other than `model.` or nothing makes a conditional-generation directory.
    """
    default = {"group_size": 64, "bits": 4, **(default or {})}
    overrides = overrides or {}
    prefix = model.prefix if prefix is None else prefix
    override_prefix = prefix if override_prefix is None else override_prefix
    oracle = copy.deepcopy(model.reference)
    table: Json = dict(default)
    table.setdefault("mode", "affine")
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in {**own_tensors(model.reference), **model.unused}.items():
        module = name.removesuffix(".weight")
        bare = module.removeprefix("model.")
        setting = _settings(bare, default, overrides) if tensor.dim() == 2 else False
        if tensor.dim() == 2 and setting is not default:
            table[stored_name(module, override_prefix)] = setting
        # Rows that do not hold whole groups are left alone, as MLX leaves them.
        if isinstance(setting, bool) or tensor.shape[1] % setting["group_size"]:
            stored = tensor.to(dtype)
            tensors[stored_name(name, prefix)], values = stored, stored.float()
        else:
            packed = _pack(tensor, setting, name, dtype)
            stem = stored_name(module, prefix)
            tensors |= {f"{stem}.weight": packed.weight, f"{stem}.scales": packed.scales}
            if packed.biases is not None:
                tensors[f"{stem}.biases"] = packed.biases
            values = packed.values
        if name not in model.unused:
            set_weight(oracle, name, values)

    config = json.loads((model.directory / "config.json").read_text())
    if prefix not in ("model.", "") and "text_config" not in config:
        config = nest(config_json(model.reference, dtype), model.family)
    target = config["text_config"] if in_text_config else config
    target[config_key] = table
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / "config.json", config)
    write_tokenizer(directory)
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, directory / "model.safetensors", {"format": "mlx"})
    return replace(model, directory=directory, reference=oracle, config=oracle.config, prefix=prefix)


def _pack(w: torch.Tensor, setting: Json, name: str, dtype: torch.dtype) -> Packed:
    mode = setting.get("mode", "affine")
    if mode == "affine":
        return quantise_affine(w, setting["bits"], setting["group_size"], dtype)
    if MODES[mode] != (setting["bits"], setting["group_size"]):
        raise ValueError(f"{name}: {mode} has {MODES[mode][0]} bits in groups of {MODES[mode][1]}, not {setting}")
    return quantise_float(w, mode, name)
