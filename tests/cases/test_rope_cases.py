"""R01-R03: which frequencies each layer turns with, from either container, at real sizes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from checkpoints import read_config, read_keys
from transformers import Gemma3TextConfig, Gemma4UnifiedForCausalLM, Gemma4UnifiedTextConfig, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.gemma4_unified.modeling_gemma4_unified import apply_rotary_pos_emb

from bytefloor.errors import FileError, UnsupportedError
from bytefloor.ops.rope import reference as rope

LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
SIZES = {
    "3.1-8B": {"hidden_size": 4096, "heads": 32, "head_dim": 128, "factor": 8.0},
    "3.2-1B": {"hidden_size": 2048, "heads": 32, "head_dim": 64, "factor": 32.0},
}


def llama_config(name: str, **rope_keys: Any) -> dict[str, Any]:
    size = SIZES[name]
    return {
        "model_type": "llama",
        "hidden_size": size["hidden_size"],
        "num_attention_heads": size["heads"],
        "num_key_value_heads": 8,
        "num_hidden_layers": 2,
        "intermediate_size": 8192,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        **rope_keys,
    }


def llama_keys(name: str) -> dict[str, Any]:
    size = SIZES[name]
    return {
        "block_count": 2,
        "embedding_length": size["hidden_size"],
        "attention.head_count": size["heads"],
        "attention.head_count_kv": 8,
        "feed_forward_length": 8192,
        "rope.freq_base": 500000.0,
        "rope.dimension_count": size["head_dim"],
    }


def published(head_size: int, factor: float) -> list[float]:
    """Meta's own words for it: keep short waves, divide long ones, blend between 8192 / 4 and 8192."""
    out = []
    for i in range(head_size // 2):
        frequency = 500000.0 ** (-2 * i / head_size)
        wave = 2 * math.pi / frequency
        if wave < 8192 / 4.0:
            out.append(frequency)
        elif wave > 8192 / 1.0:
            out.append(frequency / factor)
        else:
            smooth = (8192 / wave - 1.0) / (4.0 - 1.0)
            out.append((1 - smooth) * frequency / factor + smooth * frequency)
    return out


SPELLINGS = {
    "rope_type": lambda f: {"rope_theta": 5e5, "rope_scaling": {**LLAMA3, "factor": f, "rope_type": "llama3"}},
    "type": lambda f: {"rope_theta": 5e5, "rope_scaling": {**LLAMA3, "factor": f, "type": "llama3"}},
    "both": lambda f: {
        "rope_theta": 5e5,
        "rope_scaling": {**LLAMA3, "factor": f, "type": "llama3", "rope_type": "llama3"},
    },
    "rope_parameters": lambda f: {"rope_parameters": {**LLAMA3, "factor": f, "rope_type": "llama3", "rope_theta": 5e5}},
}


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("name", SIZES)
def test_llama3_table_of_config_json_is_the_published_one(name: str, spelling: str) -> None:
    """R01: whichever key carries it; factor 8 and factor 32."""
    head_size, factor = SIZES[name]["head_dim"], SIZES[name]["factor"]
    config = read_config(llama_config(name, **SPELLINGS[spelling](factor)))
    assert {layer.rope.style for layer in config.layers} == {"split"}
    for layer in config.layers:
        assert layer.rope.inverse_frequencies == pytest.approx(published(head_size, factor), rel=1e-12)
    theirs = LlamaConfig(**llama_config(name, **SPELLINGS[spelling](factor)))
    expected, attention_factor = ROPE_INIT_FUNCTIONS["llama3"](theirs, torch.device("cpu"))
    assert attention_factor == 1.0
    assert layer.rope.inverse_frequencies == pytest.approx(expected.tolist(), rel=1e-6)


@pytest.mark.parametrize("name", SIZES)
def test_llama3_table_of_gguf_is_that_of_config_json(name: str) -> None:
    """R01: rope_freqs.weight holds what each frequency is divided by, as float32: equal where it is whole, and to
    the last bit of a float32 between."""
    head_size, factor = SIZES[name]["head_dim"], SIZES[name]["factor"]
    plain = [500000.0 ** (-2 * i / head_size) for i in range(head_size // 2)]
    scaled = read_config(llama_config(name, **SPELLINGS["rope_type"](factor))).layers[0].rope.inverse_frequencies
    factors = torch.tensor([p / s for p, s in zip(plain, scaled, strict=True)], dtype=torch.float32)
    assert {1.0, factor} < set(factors.tolist())
    found = read_keys("llama", llama_keys(name), factors).layers[0].rope
    assert found.style == "interleaved"
    for ours, theirs, divisor in zip(found.inverse_frequencies, scaled, factors.tolist(), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-12 if divisor in (1.0, factor) else 2**-23)
    unscaled = read_keys("llama", llama_keys(name)).layers[0].rope.inverse_frequencies
    assert unscaled == pytest.approx(plain, rel=1e-12)


@pytest.mark.parametrize(("factors", "message"), [
    ([1.0] * 63, "63 factors, expected 64"), ([1.0] * 63 + [0.0], "not a positive number"),
    ([1.0] * 63 + [float("nan")], "not a positive number"),
])  # fmt: skip
def test_a_rope_freqs_tensor_that_cannot_be_is_refused(factors: list[float], message: str) -> None:
    """R01: no guess at what a broken table means."""
    with pytest.raises(FileError, match=message):
        read_keys("llama", llama_keys("3.1-8B"), torch.tensor(factors))


@pytest.mark.parametrize("factor", [None, "eight", 0, "absent"])
@pytest.mark.parametrize("rule", ["llama3", "linear"])
def test_a_scaling_without_a_usable_factor_is_refused_by_name(rule: str, factor: Any) -> None:
    """R01: an error of ours that names the key."""
    scaling = {**LLAMA3, "rope_type": rule, **({} if factor == "absent" else {"factor": factor})}
    with pytest.raises(FileError, match="factor"):
        read_config(llama_config("3.1-8B", rope_theta=5e5, rope_scaling=scaling))


# --- Gemma 3


GEMMA3_4B = {
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "model_type": "gemma3_text",
    "num_hidden_layers": 34,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "sliding_window": 1024,
}
"""The text_config of the published 4B: what equals the family's default is left out, the vocabulary's size too."""
GEMMA3_1B = {
    "model_type": "gemma3_text",
    "vocab_size": 262144,
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "num_hidden_layers": 26,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "rope_theta": 1000000,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "max_position_embeddings": 32768,
}


def gemma3_new(config: dict[str, Any], factor: float | None) -> dict[str, Any]:
    """The same in the words of later files: layer types, and parameters by layer type."""
    out = {key: value for key, value in config.items() if key not in ("rope_scaling", "rope_theta")}
    full = {"rope_type": "default"} if factor is None else {"rope_type": "linear", "factor": factor}
    out["rope_parameters"] = {
        "full_attention": {**full, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    n_layers = config["num_hidden_layers"]
    out["layer_types"] = ["sliding_attention" if (i + 1) % 6 else "full_attention" for i in range(n_layers)]
    return out


def gemma3_keys(config: dict[str, Any], factor: float | None) -> dict[str, Any]:
    keys = {
        "block_count": config["num_hidden_layers"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config.get("num_attention_heads", 8),
        "attention.head_count_kv": config.get("num_key_value_heads", 4),
        "attention.key_length": 256,
        "attention.value_length": 256,
        "attention.sliding_window": config["sliding_window"],
        "rope.freq_base": 1e6,
    }
    return keys if factor is None else {**keys, "rope.scaling.type": "linear", "rope.scaling.factor": factor}


def bases_and_scales(config: Any) -> list[tuple[bool, float, float]]:
    """(is sliding, base, scale) of each layer, recovered from the table itself."""
    out = []
    for layer in config.layers:
        first, second = layer.rope.inverse_frequencies[:2]
        base = (first / second) ** (layer.head_size / 2)
        out.append((layer.window is not None, round(base), first))
    return out


def expected_table(n_layers: int, factor: float) -> list[tuple[bool, float, float]]:
    """Every sixth layer sees everything, with base 1e6 over the factor; the others turn with 1e4, unscaled."""
    return [(True, 10_000, 1.0) if (i + 1) % 6 else (False, 1_000_000, 1 / factor) for i in range(n_layers)]


@pytest.mark.parametrize(("config", "factor"), [(GEMMA3_4B, 8.0), (GEMMA3_1B, None)], ids=["4B", "1B"])
@pytest.mark.parametrize("source", ["old keys", "rope_parameters", "gguf"])
def test_gemma3_scales_global_layers_only_and_only_from_4b_up(
    config: dict[str, Any], factor: float | None, source: str
) -> None:
    """R02: (1e6, 1/8) on global layers, (1e4, 1) on sliding ones; the 1B unscaled."""
    if source == "gguf":
        found = read_keys("gemma3", gemma3_keys(config, factor))
    else:
        stated = {"vocab_size": 262208, **config}
        found = read_config(stated if source == "old keys" else gemma3_new(stated, factor))
    expected = expected_table(config["num_hidden_layers"], factor or 1.0)
    assert bases_and_scales(found) == expected
    assert {layer.window for layer in found.layers} == {None, config["sliding_window"]}
    assert {layer.attention_scale for layer in found.layers} == {1 / 16}
    assert {layer.rope.style for layer in found.layers} == {"split"}


def test_gemma3_27b_scales_attention_by_what_no_gguf_key_says() -> None:
    """R02, M11: 168^-0.5, told by the number of layers; head size 128."""
    keys = {**gemma3_keys(GEMMA3_4B, 8.0), "block_count": 62, "embedding_length": 5376, "attention.head_count": 32}
    keys |= {"attention.head_count_kv": 16, "attention.key_length": 128, "attention.value_length": 128}
    assert {layer.attention_scale for layer in read_keys("gemma3", keys).layers} == {168**-0.5}
    config = {**GEMMA3_4B, "vocab_size": 262208, "num_hidden_layers": 62, "hidden_size": 5376}
    config |= {"num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128, "query_pre_attn_scalar": 168}
    assert {layer.attention_scale for layer in read_config(config).layers} == {168**-0.5}


def test_the_published_config_of_gemma3_4b_needs_no_more_keys() -> None:
    """M11: what text_config leaves out is the family's default: 8 and 4 heads of 256, a context of 131,072."""
    nested = {"model_type": "gemma3", "text_config": GEMMA3_4B, "vision_config": {"hidden_size": 1152}}
    theirs = Gemma3TextConfig(**GEMMA3_4B)
    config = read_config(nested, {"embed_tokens.weight": torch.zeros(262208, 1)})
    layer = config.layers[0]
    heads = (theirs.num_attention_heads, theirs.num_key_value_heads, theirs.head_dim)
    assert (layer.n_heads, layer.n_kv_heads, layer.head_size) == heads == (8, 4, 256)
    assert config.vocabulary_size == theirs.vocab_size == 262208
    assert config.context_length == theirs.max_position_embeddings == 131072


# --- Gemma 4


GEMMA4_12B = {
    "model_type": "gemma4_unified_text",
    "vocab_size": 262144,
    "hidden_size": 3840,
    "intermediate_size": 15360,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 256,
    "global_head_dim": 512,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "sliding_window": 1024,
    "layer_types": ["sliding_attention" if (i + 1) % 6 else "full_attention" for i in range(12)],
}
GEMMA4_KEYS = {
    "block_count": 12,
    "embedding_length": 3840,
    "feed_forward_length": 15360,
    "attention.head_count": 16,
    "attention.head_count_kv": [1 if (i + 1) % 6 == 0 else 8 for i in range(12)],
    "attention.key_length": 512,
    "attention.key_length_swa": 256,
    "attention.sliding_window": 1024,
    "attention.sliding_window_pattern": [bool((i + 1) % 6) for i in range(12)],
    "rope.freq_base": 1e6,
    "rope.freq_base_swa": 1e4,
    "rope.dimension_count": 512,
    "rope.dimension_count_swa": 256,
}
GEMMA4_FREQS = torch.tensor([1.0] * 64 + [1e30] * 192)
GEMMA4_V = {f"blk.{i}.attn_v.weight": torch.zeros(1, 1) for i in range(12) if (i + 1) % 6}


@pytest.mark.parametrize("source", ["config.json", "gguf"])
@pytest.mark.parametrize("layer_type", ["full_attention", "sliding_attention"])
def test_gemma4_turns_as_transformers_does_at_position_5000(source: str, layer_type: str) -> None:
    """R03: exponents over the whole head of 512, 64 frequencies and then zeros, lanes paired (i, i + 256)."""
    ours = (
        read_config(GEMMA4_12B) if source == "config.json" else read_keys("gemma4", GEMMA4_KEYS, GEMMA4_FREQS, GEMMA4_V)
    )
    layer = ours.layers[5 if layer_type == "full_attention" else 0]
    table = torch.tensor(layer.rope.inverse_frequencies, dtype=torch.float64)
    small = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 6, "vocab_size": 32}
    config = Gemma4UnifiedTextConfig(**{**GEMMA4_12B, **small, "layer_types": GEMMA4_12B["layer_types"][:6]})
    rotary = Gemma4UnifiedForCausalLM(config).model.rotary_emb
    theirs = getattr(rotary, f"{layer_type}_inv_freq").double()
    assert table.shape == theirs.shape == (256 if layer_type == "full_attention" else 128,)
    assert int((table == 0).sum()) == (192 if layer_type == "full_attention" else 0)
    torch.testing.assert_close(table, theirs, rtol=1e-6, atol=0)
    x = torch.randn(1, 3, 2, layer.head_size, generator=torch.Generator().manual_seed(3))
    positions = torch.tensor([4999, 5000, 5001])
    cos, sin = rotary(x, positions[None], layer_type)
    expected = apply_rotary_pos_emb(x, cos, sin, unsqueeze_dim=2)
    # Its angles are float32: at 5000 rad they are off by up to 2.5e-4.
    torch.testing.assert_close(
        rope(x[0], positions, layer.rope.style, layer.rope.inverse_frequencies), expected[0], rtol=0, atol=2e-3
    )


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize("name", ["yarn", "longrope", "dynamic"])
@pytest.mark.parametrize("model_type", ["llama", "smollm3", "qwen3", "gemma3_text"])
def test_a_scaling_that_is_not_implemented_is_refused_by_name(model_type: str, name: str) -> None:
    """R01: under either key, in every family; never ignored."""
    config = {**GEMMA3_1B, "model_type": model_type, "rope_scaling": {**YARN, "rope_type": name}}
    with pytest.raises(UnsupportedError, match=name):
        read_config(config)
    config["rope_scaling"] = {"type": name, "factor": 4.0}
    with pytest.raises(UnsupportedError, match=name):
        read_config(config)


def test_yarn_on_gemma4_is_refused_by_name() -> None:
    """R01"""
    parameters = {"full_attention": {**YARN, "rope_theta": 1e6}, "sliding_attention": {"rope_type": "default"}}
    with pytest.raises(UnsupportedError, match="yarn"):
        read_config({**GEMMA4_12B, "rope_parameters": parameters})


@pytest.mark.parametrize("name", ["yarn", "longrope"])
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3", "gemma4"])
def test_a_scaling_that_is_not_implemented_is_refused_in_gguf_too(architecture: str, name: str) -> None:
    """R01"""
    keys = GEMMA4_KEYS if architecture == "gemma4" else gemma3_keys(GEMMA3_1B, None)
    freqs = GEMMA4_FREQS if architecture == "gemma4" else None
    scaled = {**keys, "rope.scaling.type": name, "rope.scaling.factor": 4.0}
    with pytest.raises(UnsupportedError, match=name):
        read_keys(architecture, scaled, freqs, GEMMA4_V)


# --- what is written down and not read


def test_a_null_rope_type_does_not_hide_the_type_beside_it() -> None:
    """R01: two keys for one thing; the one that says something counts."""
    scaling = {**LLAMA3, "factor": 8.0, "rope_type": None, "type": "llama3"}
    config = read_config(llama_config("3.1-8B", rope_theta=5e5, rope_scaling=scaling))
    assert config.layers[0].rope.inverse_frequencies == pytest.approx(published(128, 8.0), rel=1e-12)


def test_flat_parameters_never_scale_gemma3s_sliding_layers() -> None:
    """R02: what is meant for global layers stays there."""
    config = {key: value for key, value in GEMMA3_4B.items() if key != "rope_scaling"}
    config["rope_parameters"] = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
    assert bases_and_scales(read_config({"vocab_size": 262208, **config})) == expected_table(34, 8.0)


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_a_partial_rotation_at_the_root_is_refused_too(model_type: str) -> None:
    """R07: older files keep partial_rotary_factor beside rope_theta."""
    config = {**llama_config("3.1-8B", rope_theta=5e5), "model_type": model_type, "partial_rotary_factor": 0.5}
    with pytest.raises(UnsupportedError, match="partial_rotary_factor"):
        read_config(config)


def test_a_per_layer_value_that_is_not_read_is_refused() -> None:
    """S02, R04: a layer's own window is honoured, or refused as here; never ignored."""
    wide = {"05": {"head_dim": 512, "num_key_value_heads": 1}, "11": {"head_dim": 512, "num_key_value_heads": 1}}
    config = {**GEMMA4_12B, "per_layer_config": {**wide, "00": {"sliding_window": 77}}}
    with pytest.raises(UnsupportedError, match="sliding_window"):
        read_config(config)


@pytest.mark.parametrize(("key", "value"), [("rope_theta", -1e4), ("rope_theta", 0), ("rms_norm_eps", -1.0)])
def test_a_number_that_cannot_be_is_refused_by_name(key: str, value: float) -> None:
    """R01"""
    with pytest.raises(FileError, match=key):
        read_config(llama_config("3.1-8B", **{key: value}))
