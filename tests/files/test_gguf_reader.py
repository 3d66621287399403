"""GGUF files that must open, and what is found in them."""

import struct
import time
import warnings

import container_bytes as make
import gguf
import pytest
import torch

from bytefloor.errors import FileError, UnsupportedError
from bytefloor.files.checkpoint import open_checkpoint


def opened(tmp_path, raw, name="model.gguf"):
    path = tmp_path / name
    path.write_bytes(raw)
    return open_checkpoint(path)


def test_empty_header_opens(tmp_path):
    """G18: a header without pairs or tensors is legal."""
    checkpoint = opened(tmp_path, make.gguf_bytes())
    assert (dict(checkpoint.metadata), dict(checkpoint.tensors)) == ({}, {})


@pytest.mark.parametrize("version", [2, 3])
def test_values_come_back_as_stored(tmp_path, version):
    """G18: one pair of every type, in both versions of the container."""
    pairs = [
        make.pair("u8", make.U8, b"\xff"), make.pair("i8", make.I8, b"\xff"),
        make.pair("u16", make.U16, b"\xff\xff"), make.pair("i16", make.I16, b"\xfe\xff"),
        make.u32("u32", 2**32 - 1), make.pair("i32", make.I32, struct.pack("<i", -7)),
        make.pair("f32", make.F32, struct.pack("<f", 0.5)), make.pair("yes", make.BOOL, b"\1"),
        make.pair("u64", make.U64, struct.pack("<Q", 2**63)), make.pair("i64", make.I64, struct.pack("<q", -(2**40))),
        make.pair("f64", make.F64, struct.pack("<d", 1e300)), make.string("text", "héllo"),
        make.array("ints", make.I32, 3, struct.pack("<3i", 1, -2, 3)),
        make.array("flags", make.BOOL, 2, b"\0\1"), make.array("none", make.F32, 0, b""),
        make.array("words", make.STRING, 3, make.text("a") + make.text("") + make.text("ß")),
    ]  # fmt: skip
    metadata = opened(tmp_path, make.gguf_bytes(pairs, version=version)).metadata
    assert metadata == {
        "u8": 255, "i8": -1, "u16": 65535, "i16": -2, "u32": 2**32 - 1, "i32": -7, "f32": 0.5, "yes": True,
        "u64": 2**63, "i64": -(2**40), "f64": 1e300, "text": "héllo", "ints": [1, -2, 3], "flags": [False, True],
        "none": [], "words": ["a", "", "ß"],
    }  # fmt: skip
    assert metadata["yes"] is True


def test_strings_of_arbitrary_bytes_survive(tmp_path):
    """Vocabulary pieces need not be UTF-8; their bytes come back from the string."""
    raw = b"\xff\xfe piece \xc3"
    pairs = [make.string("one", raw), make.array("many", make.STRING, 1, make.text(raw))]
    metadata = opened(tmp_path, make.gguf_bytes(pairs)).metadata
    assert metadata["one"].encode("utf-8", "surrogateescape") == raw
    assert metadata["many"][0].encode("utf-8", "surrogateescape") == raw


def test_shape_is_outermost_first_and_values_are_in_place(tmp_path):
    checkpoint = opened(tmp_path, make.two_tensors())
    assert checkpoint.tensors["q.weight"].shape == (2, 8)
    assert torch.equal(checkpoint.tensors["q.weight"].decode(), torch.arange(16.0).reshape(2, 8))
    assert torch.equal(checkpoint.tensors["b.weight"].decode(), torch.arange(16.0, 24.0))


def test_reading_gives_no_warning_and_cannot_change_the_file(tmp_path):
    raw = make.two_tensors()
    checkpoint = opened(tmp_path, raw)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        values = checkpoint.tensors["q.weight"].read()["values"]
    values.fill_(9)
    assert (tmp_path / "model.gguf").read_bytes() == raw


def test_block_types_are_bytes_by_row(tmp_path):
    raw = bytes(range(72))
    checkpoint = opened(tmp_path, make.gguf_bytes(entries=[make.entry("w", (64, 2), make.TYPE_Q4_0, 0)], data=raw))
    tensor = checkpoint.tensors["w"]
    assert (tensor.format_name, tensor.shape, tensor.n_bytes) == ("Q4_0", (2, 64), 72)
    assert torch.equal(tensor.read()["blocks"], torch.arange(72, dtype=torch.uint8).reshape(2, 36))


def test_sizes_of_all_types_equal_those_of_the_reference_package(tmp_path):
    """Every type id that the reference knows has its name and its size here."""
    for kind, (block, n_bytes) in gguf.GGML_QUANT_SIZES.items():
        raw = make.gguf_bytes(entries=[make.entry("w", (block * 2, 3), int(kind), 0)], data=bytes(6 * n_bytes))
        tensor = opened(tmp_path, raw, f"{kind.name}.gguf").tensors["w"]
        assert (tensor.format_name, tensor.n_bytes) == (kind.name, 6 * n_bytes)


@pytest.mark.parametrize("alignment", [1, 8, 64, 4096])
def test_custom_alignment_opens(tmp_path, alignment):
    """G18: general.alignment moves the data; a misaligned F32 tensor is still read right."""
    entries = [make.entry("odd", (3,), make.TYPE_F16, 0)]
    at = -(-6 // alignment) * alignment
    entries.append(make.entry("w", (4,), make.TYPE_F32, at))
    data = bytes(at) + struct.pack("<4f", 1, 2, 3, 4)
    raw = make.gguf_bytes([make.u32("general.alignment", alignment)], entries, data, alignment=alignment)
    assert opened(tmp_path, raw).tensors["w"].decode().tolist() == [1, 2, 3, 4]


def test_file_without_tail_padding_opens(tmp_path):
    """G04: the last tensor ends with the file, unpadded."""
    raw = make.gguf_bytes(entries=[make.entry("w", (3,), make.TYPE_F32, 0)], data=struct.pack("<3f", 1, 2, 3))
    assert opened(tmp_path, raw).tensors["w"].decode().tolist() == [1, 2, 3]


@pytest.mark.parametrize("n_extra", [1, 32, 70_000])
def test_file_with_too_much_tail_padding_opens(tmp_path, n_extra):
    """G04: bytes behind the last tensor mean nothing, whatever they are."""
    raw = make.two_tensors() + b"GGUF" + bytes(n_extra)
    assert opened(tmp_path, raw).tensors["b.weight"].decode().tolist() == list(range(16, 24))


def test_zero_size_tensor_is_listed_and_reading_it_is_refused(tmp_path):
    """G18 accepts the file; G02: decoding a zero dimension is an error text, not a crash."""
    raw = make.gguf_bytes(
        entries=[make.entry("z", (0, 4), make.TYPE_F32, 0), make.entry("w", (1,), 0, 0)], data=bytes(4)
    )
    checkpoint = opened(tmp_path, raw)
    assert checkpoint.tensors["z"].shape == (4, 0)
    with pytest.raises(FileError, match=r"z: shape \[4, 0\]"):
        checkpoint.tensors["z"].decode()


@pytest.mark.parametrize("kind", [42, 153, 200])
def test_unknown_type_is_listed_and_reading_it_names_tensor_and_id(tmp_path, kind):
    """G08: one tensor of an unknown type does not hide the others."""
    entries = [make.entry("odd.weight", (8, 2), kind, 0), make.entry("b.weight", (8,), make.TYPE_F32, 64)]
    checkpoint = opened(tmp_path, make.two_tensors(entries=entries))
    odd = checkpoint.tensors["odd.weight"]
    assert (odd.shape, odd.format_name, odd.format, odd.n_bytes) == ((2, 8), f"type {kind}", None, 64)
    for use in (odd.read, odd.decode, odd.require_format):
        with pytest.raises(UnsupportedError, match=rf"odd.weight.*type {kind}.*newer"):
            use()
    assert checkpoint.tensors["b.weight"].decode().tolist() == list(range(16, 24))


@pytest.mark.parametrize("spelling", ["blk.0.attn_q.scale", "blk.0.attn_q.weight.scale"])
def test_nvfp4_scale_tensor_becomes_a_part(tmp_path, spelling):
    """K09: the companion tensor scales the weight by 0.01; it is not a tensor of its own any more."""
    entries = [make.entry("blk.0.attn_q.weight", (64, 1), make.TYPE_NVFP4, 0)]
    bare = opened(tmp_path, make.gguf_bytes(entries=entries, data=NVFP4_ROW), "bare.gguf").tensors
    entries.append(make.entry(spelling, (1,), make.TYPE_F32, 64))
    entries.append(make.entry("blk.0.attn_q.input_scale", (1,), make.TYPE_F32, 96))
    data = NVFP4_ROW + bytes(28) + struct.pack("<f", 0.01) + bytes(28) + struct.pack("<f", 3)
    checkpoint = opened(tmp_path, make.gguf_bytes(entries=entries, data=data))
    assert list(checkpoint.tensors) == ["blk.0.attn_q.weight"]
    tensor = checkpoint.tensors["blk.0.attn_q.weight"]
    assert tensor.n_bytes == 40
    assert "scale" not in bare["blk.0.attn_q.weight"].read()
    expected = bare["blk.0.attn_q.weight"].decode() * torch.tensor(0.01)
    assert torch.allclose(tensor.decode(), expected, rtol=1e-6, atol=0)
    assert expected.abs().max() > 0
    assert checkpoint.notices == ("1 activation scales ignored",)


# Four different scales, and 32 bytes of which no two are alike.
NVFP4_ROW = bytes([0x38, 0x40, 0x29, 0x51]) + bytes((37 * i + 11) % 256 for i in range(32))


def test_nvfp4_scale_of_another_shape_is_refused(tmp_path):
    entries = [make.entry("x.weight", (64, 1), make.TYPE_NVFP4, 0), make.entry("x.scale", (2,), make.TYPE_F32, 64)]
    with pytest.raises(FileError, match=r"x.scale is F32 \[2\], expected one F32"):
        opened(tmp_path, make.gguf_bytes(entries=entries, data=bytes(72)))


@pytest.mark.parametrize("pairs", [
    [make.string("general.architecture", "clip")],
    [make.string("general.architecture", "llama"), make.string("general.type", "mmproj")],
])  # fmt: skip
def test_projector_files_are_refused_by_name(tmp_path, pairs):
    with pytest.raises(UnsupportedError, match=r"mmproj"):
        opened(tmp_path, make.gguf_bytes(pairs))


def test_vision_tensors_merged_into_a_model_are_skipped_with_a_notice(tmp_path):
    entries = [make.entry("v.patch.weight", (8, 2), make.TYPE_F32, 0), make.entry("b.weight", (8,), make.TYPE_F32, 64)]
    checkpoint = opened(tmp_path, make.two_tensors(entries=entries))
    assert list(checkpoint.tensors) == ["b.weight"]
    assert "1 tensors of vision" in checkpoint.notices[0]


@pytest.mark.parametrize("name", ["gemma-4", "llama-bpe", "qwen2"])
def test_large_vocabulary_opens_in_a_second(shared_dir, name):
    """G19: 262k tokens and 514k merges, where the reference package takes 46 s. Processor time: tests share cores."""
    path = shared_dir / "vocab" / f"ggml-vocab-{name}.gguf"
    best = float("inf")
    for _ in range(3):
        start = time.process_time()
        checkpoint = open_checkpoint(path)
        best = min(best, time.process_time() - start)
    assert best < 1
    assert len(checkpoint.metadata["tokenizer.ggml.tokens"]) > 100_000


def test_sentencepiece_file_without_pre_tokenizer_key_opens(shared_dir):
    """G15: `tokenizer.ggml.pre` is for the text folder to miss, not for the reader."""
    assert (
        open_checkpoint(shared_dir / "vocab" / "ggml-vocab-llama-spm.gguf").metadata["tokenizer.ggml.model"] == "llama"
    )
