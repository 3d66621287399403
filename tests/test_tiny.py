"""The builders of tiny models: what they promise to the tests that use them."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Q
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

import tiny_gguf
import tiny_mlx
from tiny import (
    TINY_NAMES,
    TinyModel,
    build_tiny,
    own_tensors,
    prompt_ids,
    reference_logits,
    stored_name,
    token_list,
)
from tiny_variants import VARIANTS, WINDOW

Tiny = Callable[[str], TinyModel]

IDS = prompt_ids(40)
WINDOWED = tuple(name for name in TINY_NAMES if name.startswith("gemma") and not VARIANTS[name].weights)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Matrices this small only wait for a second thread."""
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n_threads)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    root = tmp_path_factory.mktemp("tiny")
    return functools.cache(lambda name: build_tiny(name, root))


def assert_same_logits(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-4) -> None:
    assert (found - expected).abs().max() < tolerance


@pytest.mark.parametrize("name", TINY_NAMES)
def test_logits_tell_models_apart(name: str, tiny: Tiny) -> None:
    model = tiny(name)
    logits = reference_logits(model, IDS)
    assert logits.shape == (len(IDS), model.config.vocab_size)
    assert logits.isfinite().all()
    assert 1.0 < logits.std() < 3.0
    # Neither uniform nor an echo of the input, which would hide everything between embedding and head.
    assert logits.softmax(-1).amax(-1).mean() > 5 / model.config.vocab_size
    assert (logits.argmax(-1) == torch.tensor(IDS)).float().mean() < 0.5


@pytest.mark.parametrize("name", TINY_NAMES)
def test_attention_is_not_uniform(name: str, tiny: Tiny) -> None:
    model = tiny(name)
    with torch.inference_mode():
        out = model.reference(input_ids=torch.tensor([IDS]), output_attentions=True, use_cache=False)
    for layer in out.attentions:
        row = layer[0, :, -1]
        n_seen = int((row > 0).any(0).sum())
        assert row.amax(-1).mean() > 1.5 / n_seen


@pytest.mark.parametrize("name", TINY_NAMES)
def test_norms_and_scalars_are_neither_zero_nor_one(name: str, tiny: Tiny) -> None:
    for key, tensor in own_tensors(tiny(name).reference).items():
        if tensor.dim() == 1 and tensor.numel() > 1:
            assert tensor.std() > 0.01, key
        if key.endswith("layer_scalar"):
            assert abs(float(tensor) - 1.0) > 1e-3, key


def with_window(model: TinyModel, window: int) -> TinyModel:
    config = copy.deepcopy(model.config)
    config.sliding_window = window
    wide = type(model.reference)(config).eval()
    wide.load_state_dict(model.reference.state_dict())
    return TinyModel(model.name, model.directory, wide, config, model.family)


@pytest.mark.parametrize("name", WINDOWED)
def test_the_window_matters_and_counts_the_current_token(name: str, tiny: Tiny) -> None:
    model = tiny(name)
    expected = reference_logits(model, IDS)
    everything = reference_logits(with_window(model, 512), IDS)
    assert_same_logits(everything[:WINDOW], expected[:WINDOW])
    assert ((everything - expected)[WINDOW:].abs().amax(-1) > 1e-3).all()


@pytest.mark.parametrize("name", TINY_NAMES)
def test_transformers_reads_the_directory_alike(name: str, tiny: Tiny) -> None:
    """Every respelling of config.json means the same model to the library that made it."""
    model = tiny(name)
    if VARIANTS[name].prefix == "model.":
        loaded = AutoModelForCausalLM.from_pretrained(model.directory, attn_implementation="eager").float().eval()
    else:
        config = AutoConfig.from_pretrained(model.directory).get_text_config()
        config._attn_implementation = "eager"
        loaded = type(model.reference)(config).float().eval()
        stored = load_file(model.directory / "model.safetensors")
        assert any("vision_tower" in key for key in stored)
        for key in own_tensors(loaded):
            tiny_gguf.set_weight(loaded, key, stored[stored_name(key, model.prefix)])
    assert_same_logits(reference_logits(loaded, IDS), reference_logits(model, IDS))


@pytest.mark.parametrize("name", ["llama", "gemma3-nested", "gemma4-e-unused-kv"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_files_are_the_same_every_time(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    first, second = (build_tiny(name, tmp_path / part, dtype) for part in ("a", "b"))
    again = build_tiny(name, tmp_path / "a", dtype)
    assert again.directory == first.directory
    files = sorted(path.name for path in first.directory.iterdir())
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= set(files)
    assert files == sorted(path.name for path in second.directory.iterdir())
    for file in files:
        assert (first.directory / file).read_bytes() == (second.directory / file).read_bytes(), file
    assert torch.equal(reference_logits(first, IDS), reference_logits(again, IDS))
    assert {t.dtype for t in load_file(first.directory / "model.safetensors").values()} == {dtype}


def test_bfloat16_directory_and_reference_agree(tmp_path: Path) -> None:
    model = build_tiny("llama", tmp_path, torch.bfloat16)
    stored = load_file(model.directory / "model.safetensors")
    for key, tensor in own_tensors(model.reference).items():
        assert torch.equal(tensor, stored[stored_name(key, model.prefix)].float())
    assert json.loads((model.directory / "config.json").read_text())["dtype"] == "bfloat16"


def test_overflow_variant_leaves_the_float16_range(tiny: Tiny) -> None:
    model = tiny("gemma3-overflow")
    with torch.inference_mode():
        out = model.reference(input_ids=torch.tensor([IDS]), output_hidden_states=True, use_cache=False)
    assert out.logits.isfinite().all()
    assert max(float(hidden.abs().max()) for hidden in out.hidden_states) > 65504


def test_llama3_scaling_has_all_three_bands(tiny: Tiny) -> None:
    for name, factor in (("llama3-rope", 8.0), ("llama3-rope-type", 32.0)):
        model = tiny(name)
        factors = torch.tensor(tiny_gguf.rope_factors(model.config, model.family))
        assert factors.min() == 1.0
        assert factors.max() == factor
        assert ((factors > 1.0) & (factors < factor)).any()
        rope = model.config.rope_parameters
        plain = rope["rope_theta"] ** (-torch.arange(0, 32, 2) / 32)
        torch.testing.assert_close(plain / factors, model.reference.model.rotary_emb.inv_freq)


def test_spellings(tiny: Tiny) -> None:
    def config(name: str) -> dict:
        return json.loads((tiny(name).directory / "config.json").read_text())

    assert config("llama3-rope-type")["rope_scaling"]["type"] == "llama3"
    assert config("llama3-rope")["rope_scaling"]["rope_type"] == "llama3"
    assert config("llama")["rope_scaling"] is None
    assert "rope_scaling" not in config("llama3-rope-parameters")
    assert config("gemma3-linear")["rope_scaling"] == {"factor": 8.0, "rope_type": "linear"}
    assert set(config("gemma4-unified")["per_layer_config"]) == {"5"}
    published = config("gemma4-unified-global-keys")
    assert "per_layer_config" not in published
    assert (published["global_head_dim"], published["num_global_key_value_heads"]) == (32, 1)
    assert "num_attention_heads" not in config("gemma3-nested-sparse")["text_config"]


# ---------------------------------------------------------------------------------------------------------------------
# GGUF


def read_by_transformers(model: TinyModel, path: Path) -> torch.Tensor:
    """Logits with the weights as the loader of transformers reads them: it undoes the converter by code of its own.

    Its reading of the keys is not used: it takes no head size for Qwen3 and no attention scale for Gemma 3.
    """
    parsed = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model.reference)
    loaded = type(model.reference)(model.config).float().eval()
    missing, unexpected = loaded.load_state_dict(parsed["tensors"], strict=False)
    assert not set(missing) - {"lm_head.weight"}
    assert not unexpected
    return reference_logits(loaded, IDS)


@pytest.mark.parametrize("name", ["llama", "llama-tied", "smollm2", "qwen3", "qwen3-untied", "gemma3"])
def test_transformers_reads_the_gguf_file_alike(name: str, tiny: Tiny, tmp_path: Path) -> None:
    model = tiny(name)
    path = tiny_gguf.write_tiny_gguf(model, tmp_path / "model.gguf")
    assert_same_logits(read_by_transformers(model, path), reference_logits(model, IDS))


@pytest.mark.parametrize("name", TINY_NAMES)
def test_gguf_holds_every_tensor_once(name: str, tiny: Tiny, tmp_path: Path) -> None:
    model = tiny(name)
    path = tmp_path / "model.gguf"
    if not tiny_gguf.can_be_gguf(model):
        with pytest.raises(ValueError, match="attention scale"):
            tiny_gguf.write_tiny_gguf(model, path)
        return
    reader = gguf.GGUFReader(tiny_gguf.write_tiny_gguf(model, path))
    shapes = {t.name: tuple(int(n) for n in reversed(t.shape)) for t in reader.tensors}
    factors = tiny_gguf.rope_factors(model.config, model.family)
    assert len(shapes) == len(own_tensors(model.reference)) + len(model.unused) + (factors is not None)
    assert shapes["token_embd.weight"] == (model.config.vocab_size, model.config.hidden_size)
    assert ("output.weight" in shapes) == (not model.config.tie_word_embeddings)
    tokens = reader.fields["tokenizer.ggml.tokens"]
    assert len(tokens.data) == model.config.vocab_size


def test_gemma4_keys_are_as_real_files_have_them(tiny: Tiny) -> None:
    keys = tiny_gguf.gguf_keys(tiny("gemma4-unified"))
    assert keys["gemma4.attention.head_count_kv"] == [4, 4, 4, 4, 4, 1]
    assert keys["gemma4.attention.sliding_window_pattern"] == [True] * 5 + [False]
    assert keys["gemma4.attention.key_length"] == keys["gemma4.rope.dimension_count"] == 32
    assert keys["gemma4.attention.key_length_swa"] == keys["gemma4.rope.dimension_count_swa"] == 16
    keys = tiny_gguf.gguf_keys(tiny("gemma4-e"))
    assert keys["gemma4.attention.head_count_kv"] == 2
    assert keys["gemma4.feed_forward_length"] == [192] * 5 + [384] * 3
    assert keys["gemma4.attention.shared_kv_layers"] == 3
    assert tiny_gguf.gguf_keys(tiny("gemma4-e4b"))["gemma4.feed_forward_length"] == 192
    factors = tiny_gguf.rope_factors(tiny("gemma4-e").config, "gemma4")
    assert factors == [1.0] * 4 + [1e30] * 12


def test_keys_can_be_left_out_and_changed(tiny: Tiny, tmp_path: Path) -> None:
    model = tiny("gemma3")
    path = tiny_gguf.write_tiny_gguf(
        model, tmp_path / "m.gguf", omit=["gemma3.rope.freq_base_swa"], extra={"gemma3.context_length": 99}
    )
    fields = gguf.GGUFReader(path).fields
    assert "gemma3.rope.freq_base_swa" not in fields
    assert fields["gemma3.context_length"].contents() == 99


def test_permuted_rows_rotate_in_pairs_as_halves_do() -> None:
    n_heads, head, n_in = 2, 8, 5
    w, x = torch.randn(n_heads * head, n_in), torch.randn(n_in)
    angle = torch.randn(head // 2)

    def rotated(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.stack((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), dim=1)

    halves = (w @ x).view(n_heads, 2, head // 2)
    pairs = (tiny_gguf.permute_rows(w, n_heads) @ x).view(n_heads, head // 2, 2)
    by_halves, by_pairs = rotated(halves[:, 0], halves[:, 1]), rotated(pairs[..., 0], pairs[..., 1])
    torch.testing.assert_close(by_pairs, by_halves)
    assert torch.equal(tiny_gguf.unpermute_rows(tiny_gguf.permute_rows(w, n_heads), n_heads), w)


QUANTISED = [kind for kind in (*tiny_gguf.ENCODED_TYPES, *tiny_gguf.RANDOM_BLOCK_TYPES) if kind != Q.F32]


@pytest.mark.parametrize(
    ("name", "kind"),
    [*(("llama-wide", kind) for kind in QUANTISED), ("gemma4-wide", Q.Q4_K), ("gemma4-e", Q.Q8_0), ("gemma3", Q.Q5_1)],
    ids=str,
)
def test_quantised_gguf_has_an_oracle(name: str, kind: Q, tiny: Tiny, tmp_path: Path) -> None:
    model = tiny(name)
    path = tmp_path / "model.gguf"
    oracle = tiny_gguf.write_tiny_quant_gguf(model, path, {"*": kind})
    stored = {t.name: t for t in gguf.GGUFReader(path).tensors}
    assert stored["blk.0.attn_q.weight"].tensor_type == kind
    assert stored["output_norm.weight"].tensor_type == Q.F32
    before, after = reference_logits(model, IDS), reference_logits(oracle, IDS)
    assert after.isfinite().all()
    assert 0.5 < after.std() < 4.0
    assert not torch.equal(before, after)
    if kind != Q.NVFP4 and not name.startswith("gemma4"):  # transformers reads neither
        assert_same_logits(read_by_transformers(oracle, path), after)


def test_mixed_gguf_is_read_alike_by_transformers(tiny: Tiny, tmp_path: Path) -> None:
    types = {"token_embd*": Q.Q6_K, "*attn_v*": Q.Q6_K, "blk.1.ffn_down*": Q.Q5_K, "blk.*": Q.Q4_K, "output.*": Q.Q8_0}
    path = tmp_path / "model.gguf"
    oracle = tiny_gguf.write_tiny_quant_gguf(tiny("qwen3-wide"), path, types)
    assert_same_logits(read_by_transformers(oracle, path), reference_logits(oracle, IDS))


# ---------------------------------------------------------------------------------------------------------------------
# MLX


def unpack(words: torch.Tensor, bits: int, n: int) -> torch.Tensor:
    """One Python integer a row: nothing to get wrong but the order of words and bits."""
    rows = []
    for row in words.tolist():
        stream = sum(word << (32 * i) for i, word in enumerate(row))
        rows.append([(stream >> (bits * i)) & (2**bits - 1) for i in range(n)])
    return torch.tensor(rows)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_affine_triples_mean_their_values(bits: int, group: int) -> None:
    w = torch.randn(5, 256, generator=torch.Generator().manual_seed(bits))
    packed = tiny_mlx.quantise_affine(w, bits, group, torch.bfloat16)
    assert packed.weight.shape == (5, 256 * bits // 32)
    assert packed.biases is not None
    assert (packed.scales < 0).any()
    codes = unpack(packed.weight, bits, 256).view(5, -1, group).float()
    values = codes * packed.scales.float()[..., None] + packed.biases.float()[..., None]
    assert torch.equal(values.view(5, 256), packed.values)
    assert (packed.values - w).abs().max() < 8.0 / 2**bits


@pytest.mark.parametrize("mode", tiny_mlx.MODES)
def test_float_modes_mean_their_values(mode: str) -> None:
    w = torch.randn(5, 128, generator=torch.Generator().manual_seed(1))
    packed = tiny_mlx.quantise_float(w, mode, "x")
    bits, group = tiny_mlx.MODES[mode]
    codes = unpack(packed.weight, bits, 128)
    fp4 = torch.cat((tiny_mlx.E2M1, -tiny_mlx.E2M1))
    plain = fp4[codes] if bits == 4 else codes.to(torch.uint8).view(torch.float8_e4m3fn).float()
    if mode == "nvfp4":
        scales = packed.scales.view(torch.float8_e4m3fn).float()
    else:
        scales = torch.exp2(packed.scales.float() - 127)
    assert torch.equal((plain.view(5, -1, group) * scales[..., None]).view(5, 128), packed.values)
    assert (packed.values - w).abs().mean() < 0.25
    assert len(packed.scales.unique()) > 2


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "gemma4-unified", "gemma4-e"])
@pytest.mark.parametrize("prefix", ["model.", "language_model.model.", "model.language_model.", ""])
def test_mlx_directory(name: str, prefix: str, tiny: Tiny, tmp_path: Path) -> None:
    model = tiny(name)
    if prefix not in ("model.", "") and not name.startswith("gemma"):
        pytest.skip("only Gemma files nest the text model")
    overrides = {"embed_tokens": {"bits": 8, "group_size": 32}, "layers.1.mlp.*": {"bits": 6, "group_size": 64}}
    oracle = tiny_mlx.write_tiny_mlx(
        model, tmp_path / "mlx", {"bits": 4}, {**overrides, "layers.0.self_attn.o_proj": False}, prefix=prefix
    )
    stored = load_file(tmp_path / "mlx" / "model.safetensors")
    assert stored[f"{prefix}embed_tokens.weight"].dtype == torch.uint32
    assert stored[f"{prefix}embed_tokens.scales"].shape == (model.config.vocab_size, model.config.hidden_size // 32)
    assert f"{prefix}layers.0.self_attn.o_proj.scales" not in stored
    table = json.loads((tmp_path / "mlx" / "config.json").read_text())["quantization"]
    assert table[f"{prefix}layers.1.mlp.down_proj"] == {"bits": 6, "group_size": 64}
    assert table[f"{prefix}layers.0.self_attn.o_proj"] is False
    difference = (reference_logits(oracle, IDS) - reference_logits(model, IDS)).abs()
    assert 1e-3 < difference.mean() < 2.0


def test_mlx_mixed_modes(tiny: Tiny, tmp_path: Path) -> None:
    default = {"bits": 4, "group_size": 32, "mode": "mxfp4"}
    overrides = {"layers.*.self_attn.*": {"bits": 8, "group_size": 64, "mode": "affine"}}
    tiny_mlx.write_tiny_mlx(
        tiny("gemma3"),
        tmp_path / "mlx",
        default,
        overrides,
        override_prefix="",
        config_key="quantization_config",
    )
    stored = load_file(tmp_path / "mlx" / "model.safetensors")
    assert "model.layers.0.mlp.up_proj.biases" not in stored
    assert "model.layers.0.self_attn.q_proj.biases" in stored
    table = json.loads((tmp_path / "mlx" / "config.json").read_text())["quantization_config"]
    assert table["mode"] == "mxfp4"
    assert table["layers.0.self_attn.q_proj"]["bits"] == 8


def test_prompt_uses_tokens_of_the_tokenizer() -> None:
    assert prompt_ids(12) == prompt_ids(12)
    assert len(prompt_ids(12)) == 12
    assert max(prompt_ids(500)) < len(token_list())
