"""Checkpoints of real shapes with random weights: what a kernel's speed can be measured on where no weights are.

``synthetic:gemma4-12b/Q4_K_M`` names a model and a mixture. Metadata and tensor names are those of a GGUF file, and
from there on everything is the ordinary road. Weights are random blocks with small finite scales, drawn on the device
where they will be used, some thousand rows at a time: whoever looks up rows of a table pays for those alone.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import pre_tokenizers
from torch import Tensor

from bytefloor.errors import RequestError
from bytefloor.files.stored import Checkpoint, StoredTensor
from bytefloor.formats import get
from bytefloor.formats.finite import SCALE_OFFSETS
from bytefloor.formats.record import QuantFormat

PREFIX = "synthetic:"
BAND = 4096
"""Rows of a matrix that are drawn at once."""
KEPT = ("per_layer_model_proj.weight",)
"""Matrices that the quantiser leaves as they are: in 16 bits, whatever the mixture."""
SAMPLED = 16
"""Rows that tell how many bytes a row has."""


@dataclass(frozen=True)
class Roles:
    """Formats of a mixture's matrices. None: as all others. table: the embedding and the head."""

    others: str
    gate_up: str | None = None
    down: str | None = None
    table: str | None = None


BY_ROLE = {
    "Q8_0": Roles("Q8_0"),
    "BF16": Roles("BF16"),
    "MLX-4bit": Roles("affine-4b-g64"),
    "MLX-4bit-MLP-8bit": Roles("affine-4b-g64", gate_up="affine-8b-g64", down="affine-8b-g64"),
    "MLX-4bit-down-8bit": Roles("affine-4b-g64", down="affine-8b-g64"),
    "MLX-4bit-MLP-g32": Roles("affine-4b-g64", gate_up="affine-4b-g32", down="affine-4b-g32"),
    "FP4": Roles("FP4-E2M1-g128", table="FP8-E4M3-row"),
    "FP8": Roles("FP8-E4M3-row", table="BF16"),
    "NVFP4": Roles("NVFP4-modelopt", table="BF16"),
}
"""Mixtures whose formats follow from what a matrix does; those of Q4_K_M follow from the layer too."""
MIXTURES = ("Q4_K_M", *BY_ROLE)


@dataclass(frozen=True)
class Shape:
    """A published model's sizes, per layer where they differ. ``keys`` are more GGUF keys, without the architecture.

    has_global_v: whether global layers have a V projection; those of K=V models have none. n_shared_kv: last layers
    without keys and values of their own. per_layer_width: width of per-layer embeddings, 0 where there are none.
    """

    architecture: str
    width: int
    ffn: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_size: int
    vocabulary: int
    context: int
    is_tied: bool
    keys: dict[str, Any] = field(default_factory=dict)
    global_every: int = 0
    n_global_kv_heads: int = 0
    global_head_size: int = 0
    has_global_v: bool = False
    n_shared_kv: int = 0
    per_layer_width: int = 0


SHAPES = {
    "gemma4-12b": Shape(
        "gemma4", 3840, 15360, 48, 16, 8, 256, 262144, 131072, True,
        {"attention.sliding_window": 1024, "final_logit_softcapping": 30.0,
         "rope.freq_base": 1e6, "rope.freq_base_swa": 1e4},
        global_every=6, n_global_kv_heads=1, global_head_size=512,
    ),
    "gemma4-e4b": Shape(
        "gemma4", 2560, 10240, 42, 8, 2, 256, 262144, 131072, True,
        {"attention.sliding_window": 512, "final_logit_softcapping": 30.0,
         "rope.freq_base": 1e6, "rope.freq_base_swa": 1e4},
        global_every=6, n_global_kv_heads=2, global_head_size=512, has_global_v=True, n_shared_kv=18,
        per_layer_width=256,
    ),
    "llama31-8b": Shape("llama", 4096, 14336, 32, 32, 8, 128, 128256, 131072, False, {"rope.freq_base": 5e5}),
    "qwen3-8b": Shape("qwen3", 4096, 12288, 36, 32, 8, 128, 151936, 40960, False, {"rope.freq_base": 1e6}),
    "smollm2-135m": Shape("llama", 576, 1536, 30, 9, 3, 64, 49152, 8192, True, {"rope.freq_base": 1e5}),
    # No published model: sixteen query heads over one KV head in every layer, whose long caches are all that counts.
    "multi-query": Shape("llama", 2048, 8192, 24, 16, 1, 128, 32768, 131072, True, {"rope.freq_base": 5e5}),
    "gemma3-270m": Shape(
        "gemma3", 640, 2048, 18, 4, 1, 256, 262144, 32768, True,
        {"attention.sliding_window": 512, "rope.freq_base": 1e6, "attention.sliding_window_pattern": 6},
    ),
}  # fmt: skip


def is_synthetic(name: str | None) -> bool:
    """Whether a model's name asks for one of these."""
    return name is not None and name.startswith(PREFIX)


def make_checkpoint(name: str, device: torch.device | str) -> Checkpoint:
    """The checkpoint of a ``synthetic:MODEL/MIXTURE``; RequestError lists what there is."""
    model, _, mixture = name.removeprefix(PREFIX).partition("/")
    if model not in SHAPES or mixture not in MIXTURES:
        unknown = f"model {model!r}" if model not in SHAPES else f"mixture {mixture!r}"
        known = f"{', '.join(SHAPES)} and {', '.join(MIXTURES)}"
        raise RequestError(f"{name}: no {unknown}; expected {PREFIX}MODEL/MIXTURE of {known}")
    for tensor, size in _tensor_shapes(SHAPES[model]).items():
        kind = _format(tensor, size, SHAPES[model], mixture)
        if size[-1] % get(kind).block:
            raise RequestError(f"{name}: {tensor} has {size[-1]} columns, {kind} needs a multiple of {get(kind).block}")
    return checkpoint_of(name, SHAPES[model], mixture, device)


def checkpoint_of(name: str, shape: Shape, mixture: str, device: torch.device | str) -> Checkpoint:
    """The same for any shape; a mixture may also be the name of one format, for all matrices."""
    tensors = {
        tensor: _stored(
            tensor, size, _format(tensor, size, shape, mixture), torch.device(device), _mean(tensor, size, shape)
        )
        for tensor, size in _tensor_shapes(shape).items()
    }
    return Checkpoint(Path(name), "gguf", _metadata(name, shape), tensors)


def with_tokenizer(checkpoint: Checkpoint) -> Checkpoint:
    """The same with a vocabulary, so that an engine can be opened: bytes, words that nobody can ask for, an end."""
    n_tokens = checkpoint.tensors["token_embd.weight"].shape[0]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [f"\u0120w{i}" for i in range(len(alphabet), n_tokens - 1)]  # each with a space before it
    keys = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": [*alphabet, *words, "<end>"],
        "token_type": [1] * (n_tokens - 1) + [3],
        "merges": [],
        "eos_token_id": n_tokens - 1,
        "add_bos_token": False,
    }
    named = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    return replace(checkpoint, metadata={**checkpoint.metadata, **named})


def _is_global(shape: Shape, layer: int) -> bool:
    return bool(shape.global_every) and (layer + 1) % shape.global_every == 0


def _metadata(name: str, shape: Shape) -> dict[str, Any]:
    n = shape.n_layers
    kv_heads: int | list[int] = shape.n_kv_heads
    keys: dict[str, Any] = {"attention.key_length": shape.head_size}
    if shape.global_every:
        kv_heads = [shape.n_global_kv_heads if _is_global(shape, i) else shape.n_kv_heads for i in range(n)]
        keys = {"attention.key_length": shape.global_head_size, "attention.key_length_swa": shape.head_size}
        keys["attention.sliding_window_pattern"] = [not _is_global(shape, i) for i in range(n)]
    if shape.per_layer_width:
        keys["embedding_length_per_layer_input"] = shape.per_layer_width
        keys["attention.shared_kv_layers"] = shape.n_shared_kv
    keys |= {
        "block_count": n,
        "embedding_length": shape.width,
        "feed_forward_length": shape.ffn,
        "attention.head_count": shape.n_heads,
        "attention.head_count_kv": kv_heads,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "context_length": shape.context,
        **shape.keys,
    }
    named = {f"{shape.architecture}.{key}": value for key, value in keys.items()}
    return {"general.architecture": shape.architecture, "general.name": name.removeprefix(PREFIX), **named}


def _tensor_shapes(shape: Shape) -> dict[str, tuple[int, ...]]:
    d, p, n = shape.width, shape.per_layer_width, shape.n_layers
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (shape.vocabulary, d), "output_norm.weight": (d,)}
    if not shape.is_tied:
        shapes["output.weight"] = (shape.vocabulary, d)
    if shape.architecture == "gemma4":
        shapes["rope_freqs.weight"] = (shape.global_head_size // 2,)
    if p:
        shapes["per_layer_token_embd.weight"] = (shape.vocabulary, n * p)
        shapes |= {"per_layer_model_proj.weight": (n * p, d), "per_layer_proj_norm.weight": (p,)}
    for i in range(n):
        shapes |= {f"blk.{i}.{name}.weight": size for name, size in _layer_shapes(shape, i).items()}
    return shapes


def _layer_shapes(shape: Shape, layer: int) -> dict[str, tuple[int, ...]]:
    d, p = shape.width, shape.per_layer_width
    is_gemma, is_global = shape.architecture.startswith("gemma"), _is_global(shape, layer)
    e = shape.global_head_size if is_global else shape.head_size
    j = shape.n_global_kv_heads if is_global else shape.n_kv_heads
    shapes: dict[str, tuple[int, ...]] = {
        "attn_norm": (d,), "attn_q": (shape.n_heads * e, d), "attn_output": (d, shape.n_heads * e), "ffn_norm": (d,),
        "ffn_gate": (shape.ffn, d), "ffn_up": (shape.ffn, d), "ffn_down": (d, shape.ffn),
    }  # fmt: skip
    has_qk_norm = is_gemma or shape.architecture == "qwen3"
    if has_qk_norm:
        shapes["attn_q_norm"] = (e,)
    if layer < shape.n_layers - shape.n_shared_kv:
        shapes["attn_k"] = (j * e, d)
        if shape.has_global_v or not is_global:
            shapes["attn_v"] = (j * e, d)
        if has_qk_norm:
            shapes["attn_k_norm"] = (e,)
    if is_gemma:
        shapes |= {"post_attention_norm": (d,), "post_ffw_norm": (d,)}
    if shape.architecture == "gemma4":
        shapes["layer_output_scale"] = (1,)
    if p:
        shapes |= {"inp_gate": (p, d), "proj": (d, p), "post_norm": (d,)}
    return shapes


def _format(tensor: str, size: tuple[int, ...], shape: Shape, mixture: str) -> str:
    """What llama.cpp's quantiser gives the tensor in a mixture, substitutes for narrow rows included."""
    if len(size) == 1:
        return "F32"
    if tensor in KEPT:
        return "BF16"
    if mixture != "Q4_K_M":
        return _format_by_role(tensor, BY_ROLE.get(mixture, Roles(mixture)))
    wanted = "Q4_K"
    if tensor in ("token_embd.weight", "output.weight"):
        is_head = tensor == "output.weight" or shape.is_tied
        wanted = "Q6_K" if is_head else "Q4_K"
    elif "attn_v" in tensor or "ffn_down" in tensor:
        wanted = "Q6_K" if _has_more_bits(int(tensor.split(".")[1]), shape.n_layers) else "Q4_K"
    narrow = {"Q4_K": "Q5_0", "Q6_K": "Q8_0"}
    return narrow[wanted] if size[1] % 256 else wanted


def _format_by_role(tensor: str, roles: Roles) -> str:
    if tensor in ("token_embd.weight", "output.weight", "per_layer_token_embd.weight"):
        return roles.table or roles.others
    own = roles.down if "ffn_down" in tensor else roles.gate_up if "ffn_" in tensor else None
    return own or roles.others


def _has_more_bits(layer: int, n_layers: int) -> bool:
    """The first and last eighth of the layers, and every third between."""
    eighth = n_layers // 8
    return layer < eighth or layer >= 7 * n_layers // 8 or (layer - eighth) % 3 == 2


@dataclass(frozen=True)
class _Banded(StoredTensor):
    """A matrix of more than BAND rows; band(i) draws rows i * BAND and on, each band from a seed of its own."""

    band: Callable[[int], StoredTensor] = field(repr=False, kw_only=True)

    def rows(self, ids: Tensor) -> Tensor:
        """Float32 [n, K], of the bands that are asked for alone."""
        if not ids.numel() or not 0 <= int(ids.min()) <= int(ids.max()) < self.n_rows:
            return super().rows(ids)
        numbers, members = torch.unique(ids // BAND, return_inverse=True)
        found = [self.band(int(i)).rows(ids[members == m] - int(i) * BAND) for m, i in enumerate(numbers)]
        out = found[0].new_empty(ids.numel(), self.shape[1])
        for m, values in enumerate(found):
            out[members == m] = values
        return out


def _mean(tensor: str, size: tuple[int, ...], shape: Shape) -> float:
    """Of a vector's values. Gemma 4 has no attention scale: its query norm keeps scores near 1, as training does.

    With weights around 1 they would be around sqrt(E), every softmax would pick one key, and after a few layers no two
    ways of rounding would agree on which.
    """
    return size[0] ** -0.5 if shape.architecture == "gemma4" and "attn_q_norm" in tensor else 1.0


def _stored(name: str, size: tuple[int, ...], kind: str, device: torch.device, mean: float = 1.0) -> StoredTensor:
    record = get(kind)
    n_bytes = _n_bytes(kind, size) if len(size) == 2 else math.prod(size) * 4
    if len(size) < 2 or size[0] <= BAND:
        return StoredTensor(name, size, kind, record, n_bytes, lambda: _draw(name, size, record, device, mean))

    def band(i: int) -> StoredTensor:
        return _stored(f"{name} {i}", (min(BAND, size[0] - i * BAND), size[1]), kind, device)

    def read() -> dict[str, Tensor]:
        first = band(0).read()
        # What is not by rows, a scale of the whole tensor, is the same in every band.
        whole = {
            name: part.new_empty(size[0], part.shape[1]) if _is_by_row(part, BAND) else part
            for name, part in first.items()
        }
        for i in range(-(-size[0] // BAND)):
            for name, part in (first if i == 0 else band(i).read()).items():
                if _is_by_row(first[name], BAND):
                    whole[name][i * BAND : (i + 1) * BAND] = part
        return whole

    return _Banded(name, size, kind, record, n_bytes, read, band=band)


def _is_by_row(part: Tensor, n_rows: int) -> bool:
    return part.dim() == 2 and part.shape[0] == n_rows


@cache
def _n_bytes(kind: str, size: tuple[int, int]) -> int:
    """Of all parts of a matrix, from those of a few rows."""
    parts = _draw(kind, (SAMPLED, size[1]), get(kind), torch.device("cpu"), 1.0).values()
    by_row = sum(part.nbytes for part in parts if _is_by_row(part, SAMPLED))
    return by_row // SAMPLED * size[0] + sum(part.nbytes for part in parts if not _is_by_row(part, SAMPLED))


def _draw(
    name: str, size: tuple[int, ...], record: QuantFormat, device: torch.device, mean: float
) -> dict[str, Tensor]:
    # Seeded by its name: a tensor has the same values whenever and by whomever it is read.
    generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
    if name == "rope_freqs.weight":
        factors = torch.full(size, 1e30)
        factors[: size[0] // 4] = 1.0
        return {"values": factors}
    if record.block_bytes is not None:
        return {"blocks": _random_blocks(record, size, generator, device)}
    if record.name.startswith("NVFP4"):
        return _random_nvfp4(record, size, generator, device)
    values = torch.randn(size, generator=generator, device=device)
    if record.name == "F32":
        return {"values": values.mul_(0.1).add_(1.0).mul_(mean)}
    assert record.encode is not None
    return record.encode(values.mul_(size[-1] ** -0.5))


def _random_nvfp4(
    record: QuantFormat, size: tuple[int, ...], generator: torch.Generator, device: torch.device
) -> dict[str, Tensor]:
    """Random codes, whose root mean square is 2.9, scales of 0.5 to 1.9, and a scale of the tensor for the spread."""
    codes, scales, whole = *record.parts, *record.optional_parts
    shape = (size[0], size[1] // record.block)
    chosen = torch.randint(0x30, 0x40, shape, generator=generator, device=device, dtype=torch.uint8)
    pairs = (size[0], size[1] // 2)
    return {
        codes: torch.randint(0, 256, pairs, generator=generator, device=device, dtype=torch.uint8),
        scales: chosen.view(torch.float8_e4m3fn),
        whole: torch.tensor(size[1] ** -0.5 / 3, device=device),
    }


def _random_blocks(
    record: QuantFormat, size: tuple[int, ...], generator: torch.Generator, device: torch.device
) -> Tensor:
    """Random codes; fp16 scales such that weights have about the spread of trained ones."""
    assert record.block_bytes is not None
    n_blocks = size[0] * size[1] // record.block
    blocks = torch.randint(
        0, 256, (n_blocks, record.block_bytes), generator=generator, device=device, dtype=torch.uint8
    )
    spread = size[1] ** -0.5
    for i, offset in enumerate(SCALE_OFFSETS[record.name]):
        unit = {"Q4_K": 32 * 4.6, "Q5_K": 32 * 9.2, "Q6_K": 70 * 18.0, "Q8_0": 73.0}.get(record.name, 4.6)
        scale = torch.rand(n_blocks, 1, generator=generator, device=device).add_(0.5).mul_(spread / unit)
        if i == 1 and record.name in ("Q4_1", "Q5_1"):
            scale = scale * -7.5
        elif i == 1:
            scale = scale * (7.5 if record.name == "Q4_K" else 15.5)
        blocks[:, offset : offset + 2] = scale.half().view(torch.uint8)
    return blocks.view(size[0], -1)
