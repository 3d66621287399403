"""N09, R07, R08, R10, R12, K13, M11, M12: what a file holds is checked against what its configuration says, by name."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import FAMILY_NAMES, Open, read_config, read_keys, with_tensor, with_value, without_tensor
from safetensors.torch import load_file, save_file
from transformers import Gemma4UnifiedTextConfig, Qwen3Config

from bytefloor.errors import BytefloorError, FileError, ShapeError, UnsupportedError
from bytefloor.files.checkpoint import open_checkpoint
from bytefloor.files.stored import Checkpoint
from bytefloor.model.families import load_model
from parity import assert_close, logits_of
from tiny import TinyModel, build_tiny, prompt_ids, reference_logits, seeded

# --- head size (R07)


QWEN3_4B = {
    "model_type": "qwen3",
    "hidden_size": 2560,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 2,
    "intermediate_size": 9728,
    "vocab_size": 151936,
    "rope_theta": 1e6,
}
QWEN3_4B_KEYS = {
    "embedding_length": 2560,
    "attention.head_count": 32,
    "attention.head_count_kv": 8,
    "block_count": 2,
    "feed_forward_length": 9728,
    "rope.freq_base": 1e6,
}


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize(("stated", "expected"), [(128, 128), (None, 80)])
def test_head_size_is_read_and_only_then_derived(family: str, stated: int | None, expected: int) -> None:
    """R07: Qwen3-4B has heads of 128 where 2560 / 32 is 80; the scale and the table follow."""
    config = {**QWEN3_4B, "model_type": family, **({} if stated is None else {"head_dim": stated})}
    keys = {**QWEN3_4B_KEYS, **({} if stated is None else {"attention.key_length": stated})}
    for found in (read_config(config), read_config({**config, "head_dim": stated}), read_keys(family, keys)):
        for layer in found.layers:
            assert layer.head_size == expected
            assert layer.attention_scale == expected**-0.5
            assert len(layer.rope.inverse_frequencies) == expected // 2


def test_values_of_another_width_than_keys_are_refused() -> None:
    """R07"""
    keys = {**QWEN3_4B_KEYS, "attention.key_length": 128, "attention.value_length": 64}
    with pytest.raises(UnsupportedError, match=r"qwen3\.attention\.value_length is 64, expected 128"):
        read_keys("qwen3", keys)


@pytest.mark.parametrize("container", ["safetensors", "gguf"])
def test_query_heads_that_no_key_head_divides_are_refused_at_load(container: str, opened: Open) -> None:
    """R08: right, or refused at load: 4 query heads cannot share 3; the tensors fit the configuration."""
    checkpoint = opened("llama", container)
    key = "num_key_value_heads" if container == "safetensors" else "llama.attention.head_count_kv"
    checkpoint = with_value(checkpoint, key, 3)
    for name in checkpoint.tensors:
        if name.endswith(("k_proj.weight", "v_proj.weight", "attn_k.weight", "attn_v.weight")):
            checkpoint = with_tensor(checkpoint, name, 96, 128)
    with pytest.raises(BytefloorError, match=r"4.*3|3.*4"):
        load_model(checkpoint)


# --- output head (R10)


def copy_with_head(model: TinyModel, directory: Path, is_tied: bool) -> torch.Tensor:
    """The directory once more, with a head of its own that differs from the embedding; returns the head."""
    shutil.copytree(model.directory, directory)
    tensors = load_file(directory / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    head = torch.randn(embedding.shape, generator=seeded("head")) * embedding.std()
    save_file({**tensors, "lm_head.weight": head}, directory / "model.safetensors", {"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": is_tied}))
    return head


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("name", ["llama-tied", "qwen3"])
def test_the_head_in_the_file_is_used_whatever_the_config_says(name: str, is_tied: bool, tmp_path: Path) -> None:
    """R10: present with other values than the embedding -> it is the head; absent -> the embedding is."""
    model, ids = build_tiny(name, tmp_path), prompt_ids()
    head = copy_with_head(model, tmp_path / "headed", is_tied)
    hidden = model.reference.model(input_ids=torch.tensor([ids]), use_cache=False).last_hidden_state[0]
    assert_close(logits_of(tmp_path / "headed", ids, 64), hidden @ head.T)
    assert_close(logits_of(model.directory, ids, 64), reference_logits(model, ids))
    assert (hidden @ head.T - reference_logits(model, ids)).abs().max() > 1


@pytest.mark.parametrize("name", ["llama", "llama-tied", "qwen3", "qwen3-untied"])
def test_the_head_of_a_gguf_file_is_used_where_there_is_one(name: str, opened: Open) -> None:
    """R10"""
    checkpoint = opened(name, "gguf")
    weights = load_model(checkpoint).weights
    has_head = "output.weight" in checkpoint.tensors
    assert has_head == (name in ("llama", "qwen3-untied"))
    assert weights.head.stored.name == ("output.weight" if has_head else "token_embd.weight")
    assert torch.equal(weights.head.load(), weights.embedding.load()) != has_head


def test_a_head_that_the_config_promises_and_no_file_holds_is_missed(opened: Open) -> None:
    """R10, K13: tie_word_embeddings = false is written down; tying all the same answers with a wrong head."""
    checkpoint = without_tensor(opened("llama", "safetensors"), "lm_head.weight")
    assert checkpoint.metadata["tie_word_embeddings"] is False
    with pytest.raises(FileError, match=r"lm_head\.weight"):
        load_model(checkpoint)


# --- every wanted tensor (K13)


def optional_names(name: str, checkpoint: Checkpoint) -> set[str]:
    """What may be absent: a head (then the embedding is it), and Llama's frequencies."""
    optional = {"lm_head.weight", "output.weight"}
    # Those have tests of their own, below.
    if name.startswith("gemma4"):
        optional |= {key for key in checkpoint.tensors if key.endswith("attn_v.weight") or key == "rope_freqs.weight"}
    return optional


@pytest.mark.parametrize("container", ["safetensors", "gguf"])
@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_each_tensor_is_missed_by_name(name: str, container: str, opened: Open) -> None:
    """K13: a model of which any wanted tensor was not filled does not load."""
    checkpoint = opened(name, container)
    optional = optional_names(name, checkpoint)
    wanted = [key for key in checkpoint.tensors if key not in optional]
    assert len(wanted) > 20
    for key in wanted:
        with pytest.raises(FileError, match=f"{key.removesuffix('.weight')}.*missing"):
            load_model(without_tensor(checkpoint, key))


@pytest.mark.parametrize("name", ["gemma4-unified", "gemma4-e"])
def test_a_gemma4_gguf_that_lost_one_value_projection_is_refused(name: str, opened: Open) -> None:
    """K13, R04: only global layers take V from K, all of them or none."""
    checkpoint = opened(name, "gguf")
    for key in [key for key in checkpoint.tensors if key.endswith("attn_v.weight")]:
        with pytest.raises(FileError, match=key):
            load_model(without_tensor(checkpoint, key))


@pytest.mark.parametrize("name", ["gemma4-unified", "gemma4-e"])
def test_a_gemma4_gguf_without_its_table_of_frequencies_is_refused(name: str, opened: Open) -> None:
    """R03, K13: global layers would turn all their pairs in place of a quarter, silently."""
    checkpoint = without_tensor(opened(name, "gguf"), "rope_freqs.weight")
    with pytest.raises(FileError, match="rope_freqs"):
        load_model(checkpoint)


@pytest.mark.parametrize(("name", "n_pairs"), [("qwen3", 24), ("gemma3", 16)])
def test_a_table_of_frequencies_that_a_family_does_not_read_is_refused(name: str, n_pairs: int, opened: Open) -> None:
    """R01: a scaling is applied or refused, never ignored."""
    checkpoint = with_tensor(opened(name, "gguf"), "rope_freqs.weight", n_pairs)
    with pytest.raises(BytefloorError, match="rope_freqs"):
        load_model(checkpoint)


# --- shapes (M11)


@pytest.mark.parametrize("name", FAMILY_NAMES)
@pytest.mark.parametrize("container", ["safetensors", "gguf"])
def test_a_wrong_shape_names_tensor_axis_found_and_expected(name: str, container: str, opened: Open) -> None:
    """M11: for every tensor of the model, along its first and its last axis, and with an axis too many."""
    checkpoint = opened(name, container)
    for key, tensor in checkpoint.tensors.items():
        # Where the configuration is read from a tensor, another shape is another model.
        if key in ("rope_freqs.weight", "token_embd.weight") or tensor.shape in ((), (1,)):
            continue
        for axis in {0, len(tensor.shape) - 1}:
            shape = list(tensor.shape)
            found, expected = shape[axis] + 32, shape[axis]
            shape[axis] = found
            with pytest.raises(ShapeError, match=rf"tensor {key} axis {axis} is {found}, expected {expected}"):
                load_model(with_tensor(checkpoint, key, *shape))
        with pytest.raises(ShapeError, match=rf"tensor {key} has shape .* expected \["):
            load_model(with_tensor(checkpoint, key, *tensor.shape, 1))


def test_a_wrong_number_of_kv_heads_is_told_by_the_tensor(opened: Open) -> None:
    """M11: the message of the report, with names: k_proj has 64 rows where 4 heads of 32 want 128."""
    checkpoint = with_value(opened("llama", "safetensors"), "num_key_value_heads", 4)
    message = r"layers\.0\.self_attn\.k_proj\.weight axis 0 is 64, expected 128 of \[128, 128\]"
    with pytest.raises(ShapeError, match=message):
        load_model(checkpoint)


def test_text_config_wins_over_the_root() -> None:
    """M11: the key is read where it is; a value at the root does not shadow it, and fills in where it is alone."""
    text = {**QWEN3_4B, "head_dim": 128}
    root = {"model_type": "wrapper", "text_config": text, "num_key_value_heads": 32, "rms_norm_eps": 0.5}
    config = read_config(root)
    assert config.layers[0].n_kv_heads == 8
    assert config.eps == 0.5


# --- what nobody multiplies with


LEFTOVERS = {
    "safetensors": [
        "layers.0.self_attn.q_proj.bias",
        "layers.1.mlp.down_proj.bias",
        "layers.0.mlp.gate.weight",
        "layers.0.self_attn.sinks",
        "layers.99.input_layernorm.weight",
        "embed_tokens.bias",
        "final_logits_bias",
    ],
    "gguf": [
        "blk.0.attn_q.bias",
        "blk.0.ffn_gate_inp.weight",
        "blk.0.ffn_gate_exps.weight",
        "blk.99.attn_norm.weight",
        "output.bias",
        "rope_factors_long.weight",
    ],
}


@pytest.mark.parametrize("name", ["llama", "gemma3", "gemma4-e"])
@pytest.mark.parametrize("container", ["safetensors", "gguf"])
def test_a_tensor_without_a_place_is_refused_by_name(name: str, container: str, opened: Open) -> None:
    """K13, M12: a bias or a router that is not applied changes every answer."""
    for extra in LEFTOVERS[container]:
        with pytest.raises(UnsupportedError, match=rf"tensor {extra.replace('.', '[.]')} has no place"):
            load_model(with_tensor(opened(name, container), extra, 8))


@pytest.mark.parametrize("name", ["layers.0.mlp.down_proj.block_scale", "layers.0.mlp.per_layer_input_scale"])
def test_a_scale_whose_name_only_ends_like_an_ignored_one_is_refused(name: str, opened: Open) -> None:
    """K09: block_scale is not k_scale."""
    with pytest.raises(UnsupportedError, match=name):
        load_model(with_tensor(opened("llama", "safetensors"), name, 8))


def test_weights_of_layers_that_read_another_cache_are_stepped_over_or_not_there(opened: Open) -> None:
    """M12: extra ones ignored, missing ones not demanded; in a layer that owns its cache both are refused."""
    for container, k in (("safetensors", "layers.{}.self_attn.k_proj.weight"), ("gguf", "blk.{}.attn_k.weight")):
        checkpoint = opened("gemma4-e", container)
        assert k.format(7) not in checkpoint.tensors
        load_model(with_tensor(checkpoint, k.format(7), 8, 8))
        with pytest.raises(FileError, match="missing"):
            load_model(without_tensor(checkpoint, k.format(0)))


# --- experts, and methods of others


@pytest.mark.parametrize(("key", "value"), [
    ("num_experts", 128), ("num_local_experts", 8), ("n_routed_experts", 64), ("enable_moe_block", True),
    ("attention_bias", True), ("mlp_bias", True),
])  # fmt: skip
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3-nested", "gemma4-31b-nested"])
def test_experts_and_biases_are_refused_by_their_key(name: str, key: str, value: Any, opened: Open) -> None:
    """M11: also where the key stands in text_config."""
    checkpoint = opened(name, "safetensors")
    text = checkpoint.metadata.get("text_config")
    changed = {**text, key: value} if text else value
    with pytest.raises(UnsupportedError, match=f"{key} = {value}: .* not supported"):
        load_model(with_value(checkpoint, "text_config" if text else key, changed))


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_what_no_family_computes_is_refused_by_its_key(name: str, opened: Open) -> None:
    """N09, S02: a soft cap inside attention, scales of other families, a window of a family that has none."""
    with pytest.raises(UnsupportedError, match=r"attn_logit_softcapping = 50\.0: .* not supported"):
        load_model(with_value(opened(name, "safetensors"), "attn_logit_softcapping", 50.0))
    checkpoint = opened(name, "gguf")
    prefix = checkpoint.metadata["general.architecture"]
    values = {"attn_logit_softcapping": 50.0, "attention.scale": 0.9, "attention.clamp_kqv": 8.0}
    values |= {"embedding_scale": 12.0, "residual_scale": 0.2, "logit_scale": 16.0, "attention.causal": False}
    if "gemma" not in name:
        values["attention.sliding_window"] = 4096
    for key, value in values.items():
        with pytest.raises(UnsupportedError, match=rf"{prefix}\.{key} = {value}.* not supported"):
            load_model(with_value(checkpoint, f"{prefix}.{key}", value))
    for key in ("attention.scale", "residual_scale"):
        load_model(with_value(checkpoint, f"{prefix}.{key}", 0.0))


@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral", "gpt_oss", "qwen2", "phi3"])
def test_an_architecture_that_is_not_there_is_refused_by_name(model_type: str, opened: Open) -> None:
    """Found and known are both told; experts are named as the reason where the name shows them."""
    with pytest.raises(UnsupportedError, match=f"architecture {model_type}: .*not supported.*llama") as caught:
        load_model(with_value(opened("llama", "safetensors"), "model_type", model_type))
    assert ("mixture-of-experts" in str(caught.value)) == ("moe" in model_type)


def test_experts_in_gguf_are_refused_by_name(opened: Open) -> None:
    for name, architecture in (("llama", "llama"), ("qwen3", "qwen3"), ("gemma4-31b", "gemma4")):
        with pytest.raises(UnsupportedError, match="8 experts: mixture-of-experts models are not supported"):
            load_model(with_value(opened(name, "gguf"), f"{architecture}.expert_count", 8))
    with pytest.raises(UnsupportedError, match="architecture qwen3moe: mixture-of-experts"):
        load_model(with_value(opened("qwen3", "gguf"), "general.architecture", "qwen3moe"))


@pytest.mark.parametrize("part", ["qweight", "qzeros", "scales", "g_idx"])
@pytest.mark.parametrize("method", ["gptq", "awq", None])
def test_gptq_and_awq_directories_are_refused_by_name(method: str | None, part: str, tmp_path: Path) -> None:
    """Whether the config says so or only the tensors do."""
    model = build_tiny("llama-tied", tmp_path)
    directory = tmp_path / "foreign"
    shutil.copytree(model.directory, directory)
    tensors = load_file(directory / "model.safetensors")
    tensors[f"model.layers.0.self_attn.q_proj.{part}"] = torch.ones(4, 4, dtype=torch.int32)
    save_file(tensors, directory / "model.safetensors")
    if method is not None:
        config = json.loads((directory / "config.json").read_text())
        config["quantization_config"] = {"quant_method": method, "bits": 4, "group_size": 128}
        (directory / "config.json").write_text(json.dumps(config))
    expected = "no quantization settings" if method is None and part == "scales" else "(?i)gptq|awq"
    with pytest.raises(BytefloorError, match=expected):
        load_model(open_checkpoint(directory))
    # The tensors are what counts: a config that says nothing hides nothing.
    assert "layers.0.self_attn.q_proj.weight" in open_checkpoint(model.directory).tensors


def test_a_head_that_is_not_there_is_the_embedding_unless_the_config_says_no(opened: Open) -> None:
    """R10: an absent key ties as true does; a GGUF file has no key and ties."""
    checkpoint = without_tensor(opened("llama", "safetensors"), "lm_head.weight")
    for value in (None, True):
        weights = load_model(with_value(checkpoint, "tie_word_embeddings", value)).weights
        assert weights.head is weights.embedding
    weights = load_model(without_tensor(opened("llama", "gguf"), "output.weight")).weights
    assert weights.head is weights.embedding


def test_a_gemma4_ends_in_a_global_layer_as_transformers_makes_it() -> None:
    """R04: whether its config leaves layer_types out or names a sliding one last."""
    config = {
        "model_type": "gemma4_unified_text",
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 8,
        "vocab_size": 32,
    }
    for more in ({}, {"layer_types": ["full_attention", *["sliding_attention"] * 7]}):
        theirs = Gemma4UnifiedTextConfig(**config, **copy.deepcopy(more))
        found = read_config({**config, **more})
        windows = [1024 if kind == "sliding_attention" else None for kind in theirs.layer_types]
        assert [layer.window for layer in found.layers] == windows
        assert windows[-1] is None
        assert found.context_length == theirs.max_position_embeddings


def test_qwen3_slides_from_layer_28_where_its_config_does_not_say() -> None:
    """S02: what is left out is what transformers takes for it."""
    config = {**QWEN3_4B, "num_hidden_layers": 36, "use_sliding_window": True}
    for more in ({}, {"max_window_layers": 0}, {"sliding_window": None}, {"sliding_window": 64}):
        theirs = Qwen3Config(**config, **more)
        found = [layer.window for layer in read_config({**config, **more}).layers]
        assert found == [theirs.sliding_window if "sliding" in kind else None for kind in theirs.layer_types]
