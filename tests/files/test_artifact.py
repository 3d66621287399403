"""Mila's flat FP4 artifacts, presented under the names of Hugging Face."""

import json

import container_bytes as make
import pytest
import torch

from bytefloor.errors import FileError, UnsupportedError
from bytefloor.files.checkpoint import open_checkpoint
from bytefloor.formats import FORMATS

GEMMA = {
    "architecture": "gemma", "vocab_size": 32, "max_seq_length": 4096, "embedding_dim": 128, "num_layers": 2,
    "num_heads": 4, "num_kv_heads": 2, "head_dim": 32, "hidden_dim": 256, "use_bias": False,
    "tie_word_embeddings": True, "norm_epsilon": 1e-6,
    "global_head_dim": 64, "num_global_kv_heads": 1, "key_equals_value": True, "window": 512,
    "sliding_window_pattern": 2, "global_rotary_dim": 16, "rope_theta_local": 1e4, "rope_theta_global": 1e6,
    "final_logit_softcapping": 30.0, "num_experts": 0,
}  # fmt: skip
LLAMA = {
    "architecture": "llama", "vocab_size": 32, "max_seq_length": 8192, "embedding_dim": 128, "num_layers": 1,
    "num_heads": 4, "num_kv_heads": 2, "head_dim": 0, "hidden_dim": 256, "norm_epsilon": 1e-5, "rope_theta": 5e5,
    "tie_word_embeddings": False,
}  # fmt: skip


def fp4(n_rows, columns):
    torch.manual_seed(n_rows * columns)
    return FORMATS["FP4-E2M1-g128"].encode(torch.randn(n_rows, columns))


def add(tensors, name, parts):
    tensors[name], tensors[f"{name}_scale"] = parts["weight"], parts["weight_scale"]


def gemma_tensors():
    tensors = {"rmsn_final.weight": torch.randn(128).bfloat16()}
    add(tensors, "temb.wte", FORMATS["FP8-E4M3-row"].encode(torch.randn(32, 128)))
    tensors["temb.wte_scale"] = tensors["temb.wte_scale"].reshape(32)
    for layer, (q, kv, n_kv) in enumerate([(128, 64, 2), (256, 64, 1)]):
        prefix = f"tf_layer_{layer}"
        for norm in ("input", "q", "k", "v", "post_attn", "pre_ffn", "post_ffn"):
            tensors[f"{prefix}.{norm}_norm.weight"] = torch.randn(128).bfloat16()
        tensors[f"{prefix}.layer_scalar"] = torch.tensor([0.5 + layer])
        add(tensors, f"{prefix}.qkv_proj.weight", fp4(q + n_kv * kv, 128))
        add(tensors, f"{prefix}.o_proj.weight", fp4(128, q))
        add(tensors, f"{prefix}.fc_gate_up.weight", fp4(512, 128))
        add(tensors, f"{prefix}.fc_down.weight", fp4(128, 256))
    return tensors


def llama_tensors():
    tensors = {"rmsn_final.weight": torch.randn(128), "lm_head.weight": torch.randn(32, 128).bfloat16()}
    tensors["temb.wte"] = torch.randn(32, 128).bfloat16()
    for norm in ("rmsn_1", "rmsn_2"):
        tensors[f"tf_layer_0.{norm}.weight"] = torch.randn(128)
    for name, n_rows, columns in (
        ("fc_qkv_proj", 256, 128),
        ("fc_out_proj", 128, 128),
        ("fc_gate_up", 512, 128),
        ("fc_down", 128, 256),
    ):
        add(tensors, f"tf_layer_0.{name}.weight", fp4(n_rows, columns))
    return tensors


def opened(path, tensors, config, scheme="per_group_fp4_128"):
    metadata = {"mila_config": json.dumps(config), "mila_quantization": scheme}
    file = path / "model_fp4.safetensors"
    file.write_bytes(make.safetensors_of(tensors, metadata))
    return open_checkpoint(file)


@pytest.mark.parametrize("scheme", ["per_group_fp4_128", '"per_group_fp4_128"'])
def test_gemma_has_the_names_of_hugging_face(tmp_path, scheme):
    tensors = gemma_tensors()
    checkpoint = opened(tmp_path, tensors, GEMMA, scheme)
    per_layer = {"input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm",
                 "post_feedforward_layernorm", "self_attn.q_norm",
                 "self_attn.k_norm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj",
                 "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}  # fmt: skip
    expected = {"embed_tokens.weight", "norm.weight", "layers.0.self_attn.v_proj.weight"}
    for layer in (0, 1):
        expected |= {f"layers.{layer}.layer_scalar", *(f"layers.{layer}.{name}.weight" for name in per_layer)}
    assert set(checkpoint.tensors) == expected
    assert checkpoint.tensors["embed_tokens.weight"].format_name == "FP8-E4M3-row"
    assert checkpoint.tensors["layers.1.layer_scalar"].decode().item() == 1.5


def test_concatenated_rows_come_apart_in_order(tmp_path):
    tensors = gemma_tensors()
    checkpoint = opened(tmp_path, tensors, GEMMA)

    def whole(name):
        return FORMATS["FP4-E2M1-g128"].decode({"weight": tensors[name], "weight_scale": tensors[f"{name}_scale"]})

    def joined(layer, *names):
        parts = [checkpoint.tensors[f"layers.{layer}.{name}.weight"] for name in names]
        return [part.shape[0] for part in parts], torch.cat([part.decode() for part in parts])

    for layer, names, rows in ((0, "qkv", [128, 64, 64]), (1, "qk", [256, 64])):
        found_rows, values = joined(layer, *(f"self_attn.{name}_proj" for name in names))
        assert found_rows == rows
        assert torch.equal(values, whole(f"tf_layer_{layer}.qkv_proj.weight"))
    assert torch.equal(joined(0, "mlp.gate_proj", "mlp.up_proj")[1], whole("tf_layer_0.fc_gate_up.weight"))
    total = sum(tensor.n_bytes for name, tensor in checkpoint.tensors.items())
    unit_norms = 2 * tensors["tf_layer_0.v_norm.weight"].nbytes
    assert total == sum(tensor.nbytes for tensor in tensors.values()) - unit_norms


def test_gemma_config_is_that_of_hugging_face(tmp_path):
    config = opened(tmp_path, gemma_tensors(), GEMMA).metadata
    assert config["model_type"] == "gemma4_text"
    assert config["layer_types"] == ["sliding_attention", "full_attention"]
    assert (config["head_dim"], config["global_head_dim"], config["num_global_key_value_heads"]) == (32, 64, 1)
    assert config["rope_parameters"]["full_attention"] == {
        "rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25}  # fmt: skip
    assert (config["sliding_window"], config["attention_k_eq_v"], config["tie_word_embeddings"]) == (512, True, True)


def test_llama_names_sizes_and_rope_scaling(tmp_path):
    scaling = {"rope_scaling": "llama3", "rope_scaling_factor": 32.0, "rope_low_frequency_factor": 1.0,
               "rope_high_frequency_factor": 4.0, "rope_original_context_length": 8192}  # fmt: skip
    checkpoint = opened(tmp_path, llama_tensors(), {**LLAMA, "max_seq_length": 131072, **scaling})
    assert checkpoint.metadata["rope_scaling"]["factor"] == 32
    assert checkpoint.metadata["head_dim"] == 32
    shapes = {
        name: tensor.shape for name, tensor in checkpoint.tensors.items() if name.startswith("layers.0.self_attn")
    }
    assert shapes == {
        "layers.0.self_attn.q_proj.weight": (128, 128), "layers.0.self_attn.k_proj.weight": (64, 128),
        "layers.0.self_attn.v_proj.weight": (64, 128), "layers.0.self_attn.o_proj.weight": (128, 128),
    }  # fmt: skip
    assert "lm_head.weight" in checkpoint.tensors
    assert "rope_scaling" not in opened(tmp_path, llama_tensors(), LLAMA).metadata


@pytest.mark.parametrize("name", ["model.safetensors", "gemma4_12b_it_fp4.safetensors"])
def test_directory_with_one_artifact_opens(tmp_path, name):
    """Its content says what it is, whatever it is called."""
    metadata = {"mila_config": json.dumps(GEMMA), "mila_quantization": "per_group_fp4_128"}
    (tmp_path / name).write_bytes(make.safetensors_of(gemma_tensors(), metadata))
    checkpoint = open_checkpoint(tmp_path)
    assert (checkpoint.path, checkpoint.directory) == (tmp_path, tmp_path)
    assert "layers.1.self_attn.k_proj.weight" in checkpoint.tensors


def test_sizes_that_contradict_the_shapes_are_refused(tmp_path):
    with pytest.raises(
        FileError, match=r"tf_layer_0\.qkv_proj\.weight has 256 rows, mila_config expects 256 \(self_attn"
    ):
        opened(tmp_path, gemma_tensors(), {**GEMMA, "num_heads": 8})


@pytest.mark.parametrize(("changes", "message"), [
    ({"architecture": "qwen"}, "architecture 'qwen'"), ({"architecture": ["llama"]}, "architecture"),
    ({"num_experts": 128}, "mixture-of-experts"), ({"use_bias": True}, "bias"), ({"rope_scaling": "yarn"}, "'yarn'"),
    ({"max_seq_length": 131072}, "does not say whether RoPE is scaled"),
])  # fmt: skip
def test_unsupported_model_is_refused_by_name(tmp_path, changes, message):
    with pytest.raises(UnsupportedError, match=message):
        opened(tmp_path, llama_tensors(), {**LLAMA, **changes})


@pytest.mark.parametrize("scheme", ["codebook", "per_group_fp4_64", "q4_0", '"codebook"'])
def test_other_schemes_are_refused_by_name(tmp_path, scheme):
    with pytest.raises(UnsupportedError, match=f"quantization '{scheme.strip(chr(34))}' is not supported"):
        opened(tmp_path, llama_tensors(), LLAMA, scheme)


@pytest.mark.parametrize(
    ("key", "value"), [("num_heads", 0), ("num_layers", 10**9), ("vocab_size", "32"), ("hidden_dim", None)]
)
def test_broken_config_is_refused(tmp_path, key, value):
    with pytest.raises(FileError, match=key):
        opened(tmp_path, llama_tensors(), {**LLAMA, key: value})


def test_scales_that_do_not_fit_are_refused(tmp_path):
    tensors = llama_tensors()
    tensors["tf_layer_0.fc_down.weight_scale"] = torch.ones(128, 1)
    with pytest.raises(FileError, match=r"fc_down\.weight: scales \[128, 1\] do not fit 128 rows of 256 columns"):
        opened(tmp_path, tensors, LLAMA)
