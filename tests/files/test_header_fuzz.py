"""Damaged headers: whatever the damage, our own errors, little memory, little time."""

import contextlib
import json
import struct
import time
import tracemalloc

import container_bytes as make
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bytefloor.errors import BytefloorError, FileError, UnsupportedError
from bytefloor.files.checkpoint import open_checkpoint

MAX_BYTES = 64 << 20
MAX_SECONDS = 1.0


def small_gguf():
    pairs = [
        make.string("general.architecture", "llama"), make.u32("general.alignment", 32),
        make.u32("llama.block_count", 1),
        make.array("tokenizer.ggml.tokens", make.STRING, 3, make.text("a") + make.text("bb") + make.text("ccc")),
        make.array("tokenizer.ggml.scores", make.F32, 3, bytes(12)), make.pair("flag", make.BOOL, b"\1"),
        make.u16("split.count", 1),
    ]  # fmt: skip
    entries = [
        make.entry("token_embd.weight", (32, 4), make.TYPE_Q8_0, 0),
        make.entry("blk.0.attn_q.weight", (64, 2), make.TYPE_NVFP4, 160),
        make.entry("blk.0.attn_q.scale", (1,), make.TYPE_F32, 256),
        make.entry("norm.weight", (8,), make.TYPE_F32, 288),
    ]
    return make.gguf_bytes(pairs, entries, bytes(range(64)) * 5)


def small_safetensors():
    tensors = {
        "model.a.weight": torch.zeros(2, 8, dtype=torch.uint32),
        "model.a.scales": torch.zeros(2, 1, dtype=torch.bfloat16),
        "model.a.biases": torch.zeros(2, 1, dtype=torch.bfloat16), "model.norm.weight": torch.ones(8),
    }  # fmt: skip
    return make.safetensors_of(tensors)


def small_artifact():
    config = {"architecture": "llama", "vocab_size": 4, "max_seq_length": 64, "embedding_dim": 128, "num_layers": 1,
              "num_heads": 2, "num_kv_heads": 1, "head_dim": 4, "hidden_dim": 8}  # fmt: skip
    tensors = {"tf_layer_0.fc_qkv_proj.weight": torch.zeros(16, 8), "temb.wte": torch.zeros(4, 8)}
    return make.safetensors_of(tensors, {"mila_config": json.dumps(config), "mila_quantization": "none"})


GOOD = {"gguf": small_gguf(), "safetensors": small_safetensors(), "artifact": small_artifact()}
CONFIG = {"quantization": {"group_size": 64, "bits": 4, "a": {"bits": 4, "group_size": 64}}}


def use(path):
    """Open a file and read all of it; nothing but our own errors may come out, and no error without a message."""
    tracemalloc.start()
    start = time.process_time()
    message = "opened"
    try:
        for tensor in open_checkpoint(path).tensors.values():
            with contextlib.suppress(BytefloorError):
                tensor.decode()
                tensor.rows(torch.zeros(1, dtype=torch.int64))
    except (FileError, UnsupportedError) as error:
        message = str(error)
    seconds = time.process_time() - start
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert message
    assert peak < MAX_BYTES
    assert seconds < MAX_SECONDS


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("fuzz")
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


@pytest.fixture(scope="module")
def fresh(directory):
    """A new name for each example: a mapped file must not be rewritten."""
    count = iter(range(1_000_000))

    def place(raw):
        for old in directory.glob("*.model"):
            old.unlink()
        path = directory / f"{next(count)}.model"
        path.write_bytes(raw)
        return path

    return place


FUZZ = settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("kind", GOOD)
def test_undamaged_files_open(fresh, kind):
    """The fuzzing below starts from files that are good, not from ones refused at the first byte."""
    checkpoint = open_checkpoint(fresh(GOOD[kind]))
    assert all(tensor.decode().shape == tensor.shape for tensor in checkpoint.tensors.values())
    assert len(checkpoint.tensors) >= 2


@pytest.mark.parametrize("kind", GOOD)
def test_every_truncation_is_refused_or_opens(fresh, kind):
    raw = GOOD[kind]
    for length in range(1, len(raw)):
        use(fresh(raw[:length]))


@pytest.mark.parametrize("kind", GOOD)
@FUZZ
@given(data=st.data())
def test_flipped_bits_are_refused_or_open(fresh, kind, data):
    raw = bytearray(GOOD[kind])
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(4, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    use(fresh(bytes(raw)))


@pytest.mark.parametrize("kind", GOOD)
@FUZZ
@given(data=st.data())
def test_wild_numbers_are_refused_or_open(fresh, kind, data):
    """Eight bytes somewhere become a count that no file holds."""
    raw = bytearray(GOOD[kind])
    at = data.draw(st.integers(0, len(raw) - 8))
    wild = data.draw(st.sampled_from([0, 1, 2**16, 2**30, 2**31, 2**32 - 1, 2**60, 2**63 - 1, 2**63, 2**64 - 1]))
    raw[at : at + 8] = struct.pack("<Q", wild)
    use(fresh(bytes(raw)))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)
ENTRY = st.fixed_dictionaries({"dtype": JSON | st.sampled_from(["F32", "U8", "U32", "F8_E4M3"]),
                               "shape": JSON | st.lists(st.integers(0, 9), max_size=3),
                               "data_offsets": JSON | st.tuples(st.integers(0, 40), st.integers(0, 40))})  # fmt: skip
NAMES = st.sampled_from(["a.weight", "a.scales", "a.biases", "a.weight_scale", "b", "__metadata__"])


@FUZZ
@given(header=st.dictionaries(NAMES, JSON | ENTRY, max_size=5))
def test_arbitrary_json_headers_are_refused_or_open(fresh, header):
    use(fresh(make.safetensors_bytes(header, bytes(40))))


SETTINGS = st.dictionaries(
    st.sampled_from(["quant_method", "group_size", "bits", "mode", "a", "model.a", "format", "config_groups", "fmt",
                     "weight_block_size", "quant_algo", "transform_config"]),
    JSON | st.sampled_from(["fp8", "compressed-tensors", "modelopt", "affine", "mxfp4", "float-quantized", 64, "FP8"]),
    max_size=6,
)  # fmt: skip


@FUZZ
@given(found=SETTINGS, key=st.sampled_from(["quantization", "quantization_config"]))
def test_arbitrary_settings_are_refused_or_open(fresh, directory, found, key):
    (directory / "config.json").write_text(json.dumps({key: found}))
    try:
        use(fresh(GOOD["safetensors"]))
    finally:
        (directory / "config.json").write_text(json.dumps(CONFIG))
