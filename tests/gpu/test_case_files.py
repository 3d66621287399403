"""Cases from public threads on what files mean: one model in two containers, and transformers, on the kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from bytefloor.engine.cache import CachePlan
from bytefloor.engine.synthetic import Shape, checkpoint_of
from bytefloor.files.checkpoint import open_checkpoint
from bytefloor.files.stored import Checkpoint, StoredTensor
from bytefloor.model.config import Rounding
from device_rows import Make, difference, reference_rows, rows_of, step_of, stored_as, worst_row
from gpu.test_device_executor import SHAPES
from rows_reference import expected_rows

PLAN = CachePlan(256, 128)
IDS = torch.randint(0, 300, (60,), generator=torch.Generator().manual_seed(1)).tolist()
COMMON = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
NAMES = {
    "llama": {**COMMON, "ffn_norm": "post_attention_layernorm"},
    "gemma3": {
        **COMMON, "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
        "post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
}  # fmt: skip
OUTER = {"token_embd": "embed_tokens", "output_norm": "norm", "output": "lm_head"}


def config_of(shape: Shape) -> dict[str, Any]:
    """config.json of the same model."""
    return {
        "hidden_size": shape.width,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.n_layers,
        "num_attention_heads": shape.n_heads,
        "num_key_value_heads": shape.n_kv_heads,
        "head_dim": shape.head_size,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": shape.context,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": shape.is_tied,
    }


def as_safetensors(
    checkpoint: Checkpoint, architecture: str, config: Mapping[str, Any], convert: Callable[[str, Tensor], Tensor]
) -> Checkpoint:
    """A GGUF checkpoint under the names of Hugging Face; convert: from stored values to what those files hold."""

    def rename(name: str) -> str:
        word, _, inner = name.removesuffix(".weight").partition(".")
        if word != "blk":
            return f"{OUTER[word]}.weight"
        layer, _, inner = inner.partition(".")
        return f"layers.{layer}.{NAMES[architecture][inner]}.weight"

    def converted(name: str, tensor: StoredTensor) -> StoredTensor:
        values = convert(name, tensor.read()["values"])
        return stored_as(tensor.format_name, replace(tensor, name=rename(name)), {"values": values})

    tensors = [converted(name, tensor) for name, tensor in checkpoint.tensors.items()]
    return Checkpoint(Path("model"), "safetensors", config, {tensor.name: tensor for tensor in tensors})


def test_norms_that_hold_their_one_give_the_same_bits(make: Make, card: torch.device) -> None:
    """R05: Gemma 3 from GGUF, whose norm weights contain the +1, and from safetensors, whose do not."""
    shape = SHAPES["gemma3"]
    checkpoint = checkpoint_of("gemma3", shape, "BF16", card)
    config = {
        **config_of(shape), "model_type": "gemma3_text", "query_pre_attn_scalar": shape.head_size,
        "sliding_window": 24, "sliding_window_pattern": 3,
    }  # fmt: skip

    def without_one(name: str, values: Tensor) -> Tensor:
        return values - 1 if "norm" in name else values

    others = [as_safetensors(checkpoint, "gemma3", config, convert) for convert in (without_one, lambda _, v: v)]
    executors = [make(step_of(each), PLAN) for each in (checkpoint, *others)]
    for chunk in (1, 60):
        found, other, wrong = (rows_of(executor, IDS, chunk) for executor in executors)
        assert torch.equal(other, found)
        assert difference(wrong, found) > 0.3


def test_rows_permuted_for_interleaved_pairs_give_the_same_logits(make: Make, card: torch.device) -> None:
    """R06: q and k of a llama from GGUF and from safetensors; scores add up in another order, no more."""
    shape = SHAPES["llama"]
    checkpoint = checkpoint_of("llama", shape, "BF16", card)
    config = {**config_of(shape), "model_type": "llama", "rope_theta": 1e4}

    def unpermuted(name: str, values: Tensor) -> Tensor:
        """Rows of a head from pairs (2i, 2i + 1) to pairs (i, i + E / 2)."""
        if "attn_q" not in name and "attn_k" not in name:
            return values
        by_pair = values.view(-1, shape.head_size // 2, 2, values.shape[1])
        return by_pair.transpose(1, 2).reshape(values.shape).contiguous()

    others = [as_safetensors(checkpoint, "llama", config, convert) for convert in (unpermuted, lambda _, v: v)]
    executors = [make(step_of(each), PLAN) for each in (checkpoint, *others)]
    for chunk, bound in ((1, 1e-2), (60, 2e-2)):
        found, other, wrong = (rows_of(executor, IDS, chunk) for executor in executors)
        assert worst_row(other, found) < bound
        assert difference(wrong, found) > 0.3


@pytest.fixture(scope="session")
def tiny() -> ModuleType:
    """The builder of tiny models; it needs the transformers that has Gemma 4."""
    return pytest.importorskip("tiny", exc_type=ImportError)


@pytest.mark.parametrize("name", ["gemma4-wide", "gemma4-e", "gemma4-e4b", "gemma4-e-wide"])
def test_gemma_4_says_what_transformers_says(
    tiny: ModuleType, make: Make, card: torch.device, name: str, tmp_path: Path
) -> None:
    """R04: norms without +1, scale 1, norm on V, layer scalars, shared caches, wide MLPs, the last soft cap.

    The reference is theirs to 1e-4; the kernels add what rounding costs in these models, which no training has calmed.
    """
    model, ids = tiny.build_tiny(name, tmp_path, torch.bfloat16), tiny.prompt_ids(60)
    checkpoint, theirs = open_checkpoint(model.directory), tiny.reference_logits(model, ids).to(card)
    step = step_of(checkpoint)
    assert difference(reference_rows(step_of(checkpoint, Rounding()), ids, card), theirs) < 1e-4
    executor = make(step, PLAN)
    for chunk in (1, 60):
        executor.poison()
        cost = difference(expected_rows(step, ids, chunk, card), theirs)
        assert difference(rows_of(executor, ids, chunk), theirs) < 1.3 * cost
