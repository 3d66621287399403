"""Values of a configuration that cannot be: refused as errors of ours, at once."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from checkpoints import FAMILY_NAMES, Open, with_value

from bytefloor.errors import BytefloorError
from bytefloor.files.stored import Checkpoint
from bytefloor.model.families import load_model

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
