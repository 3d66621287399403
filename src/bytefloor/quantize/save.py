"""A plan's tensors into their file: GGUF, or safetensors with the settings that say what each module is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bytefloor.files.gguf_writer import NewTensor, write_gguf
from bytefloor.files.safetensors_writer import NewArray, stream_safetensors
from bytefloor.formats import get
from bytefloor.quantize.plan import Plan, Planned
from bytefloor.quantize.target import FP4, FP8, PLAIN
from bytefloor.quantize.write import Loss, pieces

Importances = Mapping[str, Tensor]
Told = Callable[[Loss, int, int], None]
"""Called when a tensor is written: its loss, how many are, of how many."""
_PLAIN_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def save_gguf(
    path: Path, plan: Plan, metadata: Mapping[str, Any], importances: Importances, device: torch.device, told: Told
) -> None:
    """The file, or nothing."""

    def stretches(planned: Planned, number: int) -> Iterator[Tensor]:
        loss = Loss(planned.name, planned.format_name)
        for _, parts in pieces(planned, importances.get(planned.name), device, loss):
            (part,) = parts.values()
            yield part
        told(loss, number, len(plan.tensors))

    def entry(planned: Planned, number: int) -> NewTensor:
        return NewTensor(planned.name, planned.tensor.shape, planned.format_name, lambda: stretches(planned, number))

    write_gguf(path, metadata, [entry(planned, number) for number, planned in enumerate(plan.tensors, 1)])


def save_safetensors(path: Path, plan: Plan, importances: Importances, device: torch.device, told: Told) -> None:
    """model.safetensors, or nothing."""
    arrays: dict[str, NewArray] = {}
    for planned in plan.tensors:
        arrays |= {_part_name(planned, part): array for part, array in _arrays(planned).items()}

    def stretches() -> Iterator[tuple[str, int, Tensor]]:
        for number, planned in enumerate(plan.tensors, 1):
            loss = Loss(planned.name, planned.format_name)
            for start, parts in pieces(planned, importances.get(planned.name), device, loss):
                for part, rows in parts.items():
                    if planned.tensor.is_matrix:
                        yield _part_name(planned, part), start, rows.reshape(len(rows), -1)
                    else:
                        yield _part_name(planned, part), 0, rows.reshape(-1)
            told(loss, number, len(plan.tensors))

    stream_safetensors(path, arrays, stretches(), {"format": "mlx" if plan.target.container == "mlx" else "pt"})


def _part_name(planned: Planned, part: str) -> str:
    return planned.name if part in ("values", "weight") else f"{planned.name.removesuffix('.weight')}.{part}"


def _arrays(planned: Planned) -> dict[str, NewArray]:
    """The parts of a tensor in its new format, with their types and shapes."""
    tensor, name = planned.tensor, planned.format_name
    if name in PLAIN:
        return {"values": NewArray(_PLAIN_DTYPES[name], tensor.shape)}
    if planned.is_copied:
        return {part: _as_stored(part, rows) for part, rows in tensor.stored.read().items()}
    n_rows, n_columns = tensor.shape
    if name == FP8:
        scales = NewArray(torch.float32, (n_rows, 1))
        return {"weight": NewArray(torch.float8_e4m3fn, (n_rows, n_columns)), "weight_scale": scales}
    if name == FP4:
        scales = NewArray(torch.float32, (n_rows, n_columns // get(name).block))
        return {"weight": NewArray(torch.uint8, (n_rows, n_columns // 2)), "weight_scale": scales}
    bits, group = affine_numbers(name)
    scales = NewArray(torch.bfloat16, (n_rows, n_columns // group))
    return {"weight": NewArray(torch.uint32, (n_rows, n_columns * bits // 32)), "scales": scales, "biases": scales}


def _as_stored(part: str, rows: Tensor) -> NewArray:
    # The reader holds words of codes as int32; in files they are unsigned.
    return NewArray(torch.uint32 if rows.dtype == torch.int32 else rows.dtype, tuple(rows.shape))


def affine_numbers(format_name: str) -> tuple[int, int]:
    """Bits and group of ``affine-4b-g64``."""
    _, bits, group = format_name.split("-")
    return int(bits.removesuffix("b")), int(group.removeprefix("g"))


def settings(plan: Plan) -> tuple[str, dict[str, Any]]:
    """The key of config.json and its value that say which module has which format."""
    modules = {planned.name.removesuffix(".weight"): planned.format_name for planned in plan.tensors}
    quantised = {module: name for module, name in modules.items() if name not in PLAIN}
    plain = [p.name.removesuffix(".weight") for p in plan.tensors if p.tensor.is_matrix and p.format_name in PLAIN]
    own = plan.target.format_name
    if plan.target.container == "mlx":
        bits, group = affine_numbers(own)
        table: dict[str, Any] = {"group_size": group, "bits": bits, "mode": "affine"}
        for module, name in quantised.items():
            if name != own:
                bits, group = affine_numbers(name)
                table[module] = {"group_size": group, "bits": bits}
        return "quantization", table | dict.fromkeys(plain, False)
    has_table = any(planned.tensor.is_table and planned.format_name not in PLAIN for planned in plan.tensors)
    if plan.target.container == "compressed" and not has_table:
        # A head that is the embedding is a product of its own to other readers: it is not quantised either.
        tied = [] if "lm_head" in modules else ["lm_head"]
        return "quantization_config", _compressed_tensors([*plain, *tied])
    others = {module: name for module, name in quantised.items() if name != own}
    return "quantization_config", {"quant_method": "bytefloor", "format": own, "modules": others}


def _compressed_tensors(ignored: list[str]) -> dict[str, Any]:
    """FP8 with a scale a row as compressed-tensors describes it; activations stay as they are."""
    weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ignored,
    }
