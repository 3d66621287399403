"""Quantised files of tiny models: logits equal transformers with the same values put in by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Q

from bytefloor.files.checkpoint import open_checkpoint
from parity import assert_close, logits_of
from tiny import build_tiny, prompt_ids, reference_logits
from tiny_gguf import ENCODED_TYPES, RANDOM_BLOCK_TYPES, write_tiny_quant_gguf
from tiny_mlx import write_tiny_mlx

NARROW_TYPES = [kind for kind in ENCODED_TYPES if kind != Q.F32]
PREFIXES = ["model.", "language_model.model.", "model.language_model.", ""]


@pytest.mark.parametrize("kind", NARROW_TYPES, ids=lambda kind: kind.name)
def test_gguf_of_each_encoded_type_gives_its_own_logits(kind: Q, tmp_path: Path) -> None:
    """K13, R06: matrices and embedding in that type, looked up and multiplied with."""
    oracle = write_tiny_quant_gguf(build_tiny("smollm2", tmp_path), tmp_path / "q" / "m.gguf", {"*": kind})
    ids = prompt_ids()
    assert_close(logits_of(tmp_path / "q" / "m.gguf", ids, 64), reference_logits(oracle, ids))


@pytest.mark.parametrize("kind", RANDOM_BLOCK_TYPES, ids=lambda kind: kind.name)
def test_gguf_of_each_block_type_gives_its_own_logits(kind: Q, tmp_path: Path) -> None:
    """K09, K13: rows of 256 in K-quants and the other block types."""
    oracle = write_tiny_quant_gguf(build_tiny("llama-wide", tmp_path), tmp_path / "q" / "m.gguf", {"blk.*": kind})
    ids = prompt_ids()
    assert_close(logits_of(tmp_path / "q" / "m.gguf", ids, 64), reference_logits(oracle, ids))


def test_gguf_mixture_in_every_family(tmp_path: Path) -> None:
    """G16: a file is a mixture; each tensor is read by its own type."""
    mixture = {
        "token_embd*": Q.Q6_K,
        "*attn_v*": Q.Q6_K,
        "*ffn_down*": Q.Q5_K,
        "*attn_q.*": Q.Q5_0,
        "*inp_gate*": Q.F16,
        "blk.*": Q.Q4_K,
    }
    for name in ("llama-wide", "qwen3-wide", "gemma3-wide", "gemma4-wide", "gemma4-e-wide"):
        path = tmp_path / name / "m.gguf"
        oracle = write_tiny_quant_gguf(build_tiny(name, tmp_path / "hf"), path, mixture)
        ids = prompt_ids()
        assert_close(logits_of(path, ids, 64), reference_logits(oracle, ids))


@pytest.mark.parametrize("kind", [Q.F16, Q.BF16], ids=lambda kind: kind.name)
def test_gguf_whose_rows_no_block_divides(kind: Q, tmp_path: Path) -> None:
    """G17: 172 columns; what converters put in 16 bits there is read, looked up and multiplied with."""
    oracle = write_tiny_quant_gguf(build_tiny("llama-172", tmp_path), tmp_path / "q" / "m.gguf", {"*": kind})
    ids = prompt_ids()
    assert_close(logits_of(tmp_path / "q" / "m.gguf", ids, 64), reference_logits(oracle, ids))
    stored = open_checkpoint(tmp_path / "q" / "m.gguf").tensors["blk.0.ffn_down.weight"]
    assert (stored.shape, stored.format_name) == ((172, 172), kind.name)


@pytest.mark.parametrize("override_prefix", PREFIXES)
@pytest.mark.parametrize("prefix", ["model.", "language_model.model.", "model.language_model."])
def test_mlx_overrides_hold_under_every_prefix(prefix: str, override_prefix: str, tmp_path: Path) -> None:
    """M01, M05, M07: an override spelled with another prefix than the tensors, a false, a 6-bit embedding."""
    overrides = {
        "layers.*.mlp.*": {"bits": 8, "group_size": 64},
        "embed_tokens": {"bits": 6, "group_size": 32},
        "layers.0.self_attn.q_proj": False,
        "layers.1.self_attn.k_proj": {"bits": 3, "group_size": 64},
    }
    oracle = write_tiny_mlx(
        build_tiny("gemma3-wide", tmp_path / "hf"),
        tmp_path / "mlx",
        {"bits": 4, "group_size": 64},
        overrides,
        prefix=prefix,
        override_prefix=override_prefix,
    )
    ids = prompt_ids()
    assert_close(logits_of(tmp_path / "mlx", ids, 64), reference_logits(oracle, ids))


def test_mlx_mixed_inside_one_mlp_and_modes(tmp_path: Path) -> None:
    """M02, M09: down in 8 bits and another group, attention in mxfp4, settings in text_config."""
    overrides = {
        "layers.*.mlp.down_proj": {"bits": 8, "group_size": 32, "mode": "affine"},
        "layers.*.mlp.*": {"bits": 4, "group_size": 64, "mode": "affine"},
        "embed_tokens": {"bits": 8, "group_size": 32, "mode": "mxfp8"},
    }
    oracle = write_tiny_mlx(
        build_tiny("gemma4-wide", tmp_path / "hf"),
        tmp_path / "mlx",
        {"bits": 4, "group_size": 32, "mode": "mxfp4"},
        overrides,
        prefix="model.language_model.",
        in_text_config=True,
        config_key="quantization_config",
    )
    ids = prompt_ids()
    assert_close(logits_of(tmp_path / "mlx", ids, 64), reference_logits(oracle, ids))


def test_mlx_quantised_per_layer_projection(tmp_path: Path) -> None:
    """M08: E models whose per-layer projections and tables are quantised like everything else."""
    oracle = write_tiny_mlx(
        build_tiny("gemma4-e-wide", tmp_path / "hf"), tmp_path / "mlx", {"bits": 4, "group_size": 32}
    )
    ids = prompt_ids()
    assert_close(logits_of(tmp_path / "mlx", ids, 64), reference_logits(oracle, ids))
