"""Values of a configuration that cannot be: refused as errors of ours, at once."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import FAMILY_NAMES, Open, with_value

from bytefloor.errors import BytefloorError, FileError, UnsupportedError
from bytefloor.files.checkpoint import open_checkpoint
from bytefloor.files.stored import Checkpoint
from bytefloor.model.families import load_model
from tiny import build_tiny

BAD_VALUES = (None, "x", -1, 0, [], {}, [1], {"0": None}, 1.5, True, 1000)


def crashes(checkpoint: Checkpoint, spoil: Callable[[Any], Checkpoint]) -> list[str]:
    """What escapes as anything but an error of ours."""
    found = []
    for value in BAD_VALUES:
        try:
            load_model(spoil(value))
        except BytefloorError:
            pass
        except Exception as error:
            found.append(f"{value!r}: {type(error).__name__}: {error}")
    return found


def gguf_keys_of(checkpoint: Checkpoint) -> list[str]:
    architecture = checkpoint.metadata["general.architecture"]
    more = ("rope.scaling.type", "rope.scaling.factor", "attention.sliding_window_pattern", "final_logit_softcapping")
    own = [key for key in checkpoint.metadata if key.startswith(f"{architecture}.")]
    return sorted({*own, *(f"{architecture}.{key}" for key in more)})


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_no_value_of_a_gguf_key_makes_loading_crash(name: str, opened: Open) -> None:
    """G18, R07: wrong types, zero and nothing are refused with the key, never with a traceback."""
    checkpoint = opened(name, "gguf")
    found = {key: crashes(checkpoint, lambda value, key=key: with_value(checkpoint, key, value))
             for key in gguf_keys_of(checkpoint)}  # fmt: skip
    assert not {key: errors for key, errors in found.items() if errors}


@pytest.mark.parametrize("name", [*FAMILY_NAMES, "gemma3-old-keys"])
def test_no_value_of_config_json_makes_loading_crash(name: str, opened: Open) -> None:
    """M11"""
    checkpoint = opened(name, "safetensors")
    more = ("layer_types", "rope_scaling", "no_rope_layers", "no_rope_layer_interval", "sliding_window_pattern")
    found = {key: crashes(checkpoint, lambda value, key=key: with_value(checkpoint, key, value))
             for key in sorted({*checkpoint.metadata, *more})}  # fmt: skip
    rope = checkpoint.metadata.get("rope_parameters") or {"rope_theta": 1e4, "factor": 8.0, "rope_type": "llama3"}
    for key in rope:
        spoil = lambda value, key=key: with_value(checkpoint, "rope_parameters", {**rope, key: value})  # noqa: E731
        found[f"rope_parameters.{key}"] = crashes(checkpoint, spoil)
    assert not {key: errors for key, errors in found.items() if errors}


@pytest.mark.parametrize(("name", "container", "key"), [
    ("qwen3", "gguf", "qwen3.block_count"), ("llama", "safetensors", "num_hidden_layers"),
])  # fmt: skip
def test_a_size_that_no_file_could_fill_is_refused_at_once(name: str, container: str, key: str, opened: Open) -> None:
    """G06: four bytes ask for 262,144 layers; 2^32 would take all memory."""
    checkpoint = with_value(opened(name, container), key, 1 << 18)
    start = time.process_time()
    with pytest.raises(BytefloorError):
        load_model(checkpoint)
    assert time.process_time() - start < 0.1


@pytest.mark.parametrize("key", ["gemma4.attention.key_length", "gemma4.attention.key_length_swa"])
def test_a_head_that_no_table_fits_is_refused_before_it_is_built(key: str, opened: Open) -> None:
    """G06: half of 2^62 frequencies would take all memory."""
    checkpoint = opened("gemma4-unified", "gguf")
    values = {key: 1 << 62, key.replace("key_length", "value_length"): 1 << 62}
    values[key.replace("attention.key_length", "rope.dimension_count")] = 1 << 62
    for name, value in values.items():
        checkpoint = with_value(checkpoint, name, value)
    with pytest.raises(UnsupportedError, match="head size of 4611686018427387904"):
        load_model(checkpoint)


# --- what an error says


@pytest.mark.parametrize("is_file", [True, False])
def test_an_error_names_the_config_that_is_there(is_file: bool, tmp_path: Path) -> None:
    """M11: whether the directory was opened, or the one file in it."""
    directory = build_tiny("qwen3", tmp_path).directory
    checkpoint = open_checkpoint(directory / "model.safetensors" if is_file else directory)
    with pytest.raises(FileError) as caught:
        load_model(with_value(checkpoint, "num_attention_heads", "x"))
    assert str(caught.value) == f"{directory}/config.json: num_attention_heads is 'x', expected a positive integer"
    assert (directory / "config.json").is_file()


@pytest.mark.parametrize(("name", "container", "key", "value", "message"), [
    ("gemma4-e", "gguf", "gemma4.attention.shared_kv_layers", 8, "layer 0 shares keys and values, but no earlier"),
    ("gemma4-e", "gguf", "gemma4.attention.shared_kv_layers", 9, "is 9, expected an integer from 0 to 8"),
    ("gemma4-e", "safetensors", "num_kv_shared_layers", 9, "num_kv_shared_layers is 9, expected .* 0 to 8"),
    ("llama", "gguf", "llama.rope.freq_base", 0.5, "RoPE: the base is 0.5, expected at least 1"),
    ("llama", "safetensors", "rope_scaling", {"factor": 8.0}, "RoPE: rope_type is absent, expected the rule that"),
    ("llama", "safetensors", "rope_scaling", {"rope_type": "linear", "factor": 1e-320}, "makes a frequency infinite"),
    ("llama", "safetensors", "head_dim", 33, "a head of 33 does not pair up"),
    ("gemma3", "safetensors", "rope_parameters", {"full_attention": "x", "a": {}}, r"rope_parameters\.full_attention"),
    ("gemma3", "safetensors", "use_bidirectional_attention", True, "use_bidirectional_attention = True is not"),
    ("gemma4-unified", "safetensors", "rope_scaling", {"type": "yarn", "factor": 4.0}, "RoPE scaling yarn"),
    ("gemma4-unified", "safetensors", "per_layer_config", {"6": {}}, "a layer '6', expected 0 to 5"),
    ("gemma4-unified", "safetensors", "per_layer_config", {"5": {"head_dim": "x"}}, r"config\.5\.head_dim is 'x'"),
    ("qwen3", "safetensors", "layer_types", ["sliding_attention"] * 3, "use_sliding_window or sliding_window says"),
])  # fmt: skip
def test_an_error_names_file_key_found_and_expected(
    name: str, container: str, key: str, value: Any, message: str, opened: Open
) -> None:
    """M11: errors of every part that reads, the tables of frequencies too."""
    checkpoint = with_value(opened(name, container), key, value)
    with pytest.raises(BytefloorError, match=message) as caught:
        load_model(checkpoint)
    place = checkpoint.path if container == "gguf" else checkpoint.path / "config.json"
    assert str(caught.value).startswith(f"{place}: ")
