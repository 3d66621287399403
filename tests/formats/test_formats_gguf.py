"""GGUF types, bit for bit against the gguf package."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from formats_reference import (
    HALVES,
    assert_same_bits,
    e2m1,
    e4m3,
    e8m0,
    random_blocks,
    random_floats,
)

from bytefloor import formats
from bytefloor.errors import FileError, ShapeError, UnsupportedError
from bytefloor.formats import chunks, ggml, legacy

BLOCK_TYPES = [name for name, record in formats.FORMATS.items() if record.block_bytes is not None]
OUR_TYPES = [name for name in BLOCK_TYPES if name not in ggml.BLOCK_BYTES]


def oracle(name: str, blocks: torch.Tensor) -> np.ndarray:
    gguf = pytest.importorskip("gguf")
    with np.errstate(all="ignore"):
        return gguf.quants.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[name])


def sample(name: str, n_rows: int = 7, blocks_per_row: int = 5, seed: int = 0) -> torch.Tensor:
    block_bytes = formats.get(name).block_bytes
    assert block_bytes is not None
    return random_blocks(name, block_bytes, n_rows, blocks_per_row, seed)


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_decode_is_bit_equal_to_the_gguf_package(name):
    """K14: every type we list, on random blocks with zero, subnormal, negative and largest scales."""
    blocks = sample(name, n_rows=13, blocks_per_row=20)
    assert_same_bits(formats.get(name).decode({"blocks": blocks}), oracle(name, blocks))


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_block_sizes_are_those_of_the_gguf_package(name):
    gguf = pytest.importorskip("gguf")
    record = formats.get(name)
    assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]] == (record.block, record.block_bytes)
    assert record.bits_per_weight == record.block_bytes * 8 / record.block


@pytest.mark.parametrize("name", OUR_TYPES)
def test_each_byte_of_a_block_matters_as_in_the_gguf_package(name):
    """One byte set at a time in a block with plain scales: a field that is read from the wrong byte shows."""
    n_bytes = formats.get(name).block_bytes
    blocks = torch.zeros(n_bytes + 1, n_bytes, dtype=torch.uint8)
    for offset in HALVES.get(name, ()):
        blocks[:, offset + 1] = 0x3C
    scale_bytes = {offset + i for offset in HALVES.get(name, ()) for i in (0, 1)}
    if name in ("MXFP4", "NVFP4"):
        scale_bytes = set(range(1 if name == "MXFP4" else 4))
        blocks[:, : len(scale_bytes)] = torch.tensor([0x38, 0x39, 0x3B, 0x41])[: len(scale_bytes)]
    for byte in set(range(n_bytes)) - scale_bytes:
        blocks[byte, byte] = 0xE9
    assert_same_bits(formats.get(name).decode({"blocks": blocks}), oracle(name, blocks))


@pytest.mark.parametrize("name", ["Q4_0", "Q4_K", "Q6_K", "MXFP4", "NVFP4"])
@pytest.mark.parametrize("piece", ["threads", "small"])
def test_decode_in_pieces_equals_decode_at_once(name, piece, monkeypatch):
    blocks = sample(name, n_rows=11, blocks_per_row=6)
    whole = formats.get(name).decode({"blocks": blocks})
    # Pieces that end within a row, the last one short.
    monkeypatch.setattr(chunks, "SMALL_PIECE", 4 * formats.get(name).block)
    if piece == "threads":
        monkeypatch.setattr(chunks, "CPU_PIECE", 4 * formats.get(name).block)
        monkeypatch.setattr(chunks, "_threads_for", lambda out: 3)
    assert_same_bits(formats.get(name).decode({"blocks": blocks}), whole.numpy())


def test_decode_leaves_the_thread_count_as_it_was(monkeypatch):
    # A thread's own count, and the one that a thread started afterwards begins with.
    with ThreadPoolExecutor(1) as pool:
        before = torch.get_num_threads(), pool.submit(torch.get_num_threads).result()
    monkeypatch.setattr(chunks, "CPU_PIECE", 256)
    monkeypatch.setattr(chunks, "_threads_for", lambda out: 3)
    formats.get("Q8_0").decode({"blocks": sample("Q8_0", 40, 10)})
    with ThreadPoolExecutor(1) as pool:
        assert (torch.get_num_threads(), pool.submit(torch.get_num_threads).result()) == before


@pytest.mark.parametrize(("name", "offset"), [(n, o) for n, offsets in HALVES.items() for o in offsets])
@pytest.mark.parametrize("half", [0x7C00, 0xFC00, 0x7E00, 0xFC01])
def test_fp16_scales_that_are_nan_or_infinite_are_refused_by_place(name, offset, half, monkeypatch):
    monkeypatch.setattr(chunks, "SMALL_PIECE", 512)
    blocks = sample(name, n_rows=4, blocks_per_row=3)
    flat = blocks.view(12, -1)
    for block in (8, 10):  # the first one counts
        flat[block, offset], flat[block, offset + 1] = half & 255, half >> 8
    pytest.importorskip("gguf")
    with np.errstate(all="ignore"), pytest.raises(FileError, match=rf"^{name}: .*row 2, group 2$"):
        formats.get(name).decode({"blocks": blocks})


def test_first_bad_scale_is_named_when_threads_find_several(monkeypatch):
    monkeypatch.setattr(chunks, "CPU_PIECE", 64)
    monkeypatch.setattr(chunks, "_threads_for", lambda out: 3)
    blocks = sample("Q8_0", n_rows=30, blocks_per_row=4)
    for row in (9, 20, 29):
        blocks[row, 35] = 0x7F
    with pytest.raises(FileError, match="row 9, group 1"):
        formats.get("Q8_0").decode({"blocks": blocks})


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_row_bytes_that_are_not_whole_blocks_are_refused(name):
    n_bytes = formats.get(name).block_bytes
    with pytest.raises(ShapeError, match=rf"{name}: part blocks: .*multiple of {n_bytes}, found {n_bytes * 2 + 1}"):
        formats.get(name).decode({"blocks": torch.zeros(3, n_bytes * 2 + 1, dtype=torch.uint8)})


@pytest.mark.parametrize("name", ["Q4_0", "MXFP4", "NVFP4", "TQ1_0"])
def test_wrong_parts_are_refused_by_name(name):
    decode = formats.get(name).decode
    with pytest.raises(FileError, match="part blocks is missing"):
        decode({})
    with pytest.raises(FileError, match="unexpected part extra"):
        decode({"blocks": sample(name), "extra": torch.zeros(1)})
    with pytest.raises(ShapeError, match=r"part blocks: expected dtype torch\.uint8, found torch\.int8"):
        decode({"blocks": sample(name).view(torch.int8)})
    with pytest.raises(ShapeError, match="part blocks: expected 2 dimensions"):
        decode({"blocks": sample(name)[0]})


def test_blocks_that_start_at_an_odd_byte_decode():
    blocks = sample("Q6_K", 3, 2)
    shifted = torch.cat((torch.zeros(1, dtype=torch.uint8), blocks.flatten()))[1:].view(3, -1)
    assert shifted.storage_offset() == 1
    decode = formats.get("Q6_K").decode
    assert_same_bits(decode({"blocks": shifted}), decode({"blocks": blocks}).numpy())


@pytest.mark.parametrize("name", OUR_TYPES)
def test_no_rows_decode_to_no_rows(name):
    record = formats.get(name)
    out = record.decode({"blocks": torch.zeros(0, 3 * record.block_bytes, dtype=torch.uint8)})
    assert out.shape == (0, 3 * record.block)


def test_mxfp4_element_j_is_the_low_nibble_and_j_plus_16_the_high_one_of_byte_j():
    """K06: GGUF's order, on one block of 16 distinct bytes; pairing neighbours gives fluent nonsense."""
    packed = [(i * 17 + 3 * i) % 256 for i in range(16)]
    assert len(set(packed)) == 16
    block = torch.tensor([[128, *packed]], dtype=torch.uint8)
    codes = [byte & 15 for byte in packed] + [byte >> 4 for byte in packed]
    expected = np.array([[e2m1(code) * 2.0 + 0.0 for code in codes]], dtype=np.float32)
    assert_same_bits(formats.get("MXFP4").decode({"blocks": block}), expected)
    assert_same_bits(formats.get("MXFP4").decode({"blocks": block}), oracle("MXFP4", block))


@pytest.mark.parametrize("code", [0, 1, 126, 127, 128, 254])
def test_mxfp4_scale_is_two_to_the_code_minus_127(code):
    """K07: 127 is 1.0, and 0 is 2^-127, a subnormal and not zero."""
    block = torch.tensor([[code, *[0x21] * 16]], dtype=torch.uint8)
    out = formats.get("MXFP4").decode({"blocks": block})
    expected = np.array([[0.5 * e8m0(code)] * 16 + [e8m0(code)] * 16], dtype=np.float32)
    assert (expected != 0).all()
    assert_same_bits(out, expected)


def test_mxfp4_scale_code_255_is_refused_by_place():
    """K07: E8M0 255 is NaN."""
    blocks = sample("MXFP4", 3, 4)
    blocks.view(12, 17)[6, 0] = 255
    with pytest.raises(FileError, match=r"MXFP4: E8M0 scale .*row 1, group 2$"):
        formats.get("MXFP4").decode({"blocks": blocks})


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_nvfp4_scale_codes_that_mean_nan_are_refused_by_place(code):
    blocks = sample("NVFP4", 3, 2)
    blocks.view(6, 36)[3, 2] = code  # row 1, second block, third of its four groups
    with pytest.raises(FileError, match=r"NVFP4: E4M3 scale .*row 1, group 6$"):
        formats.get("NVFP4").decode({"blocks": blocks})


def test_nvfp4_per_tensor_scale_multiplies_and_is_one_when_absent():
    """K09: the companion tensor's scale, on a product that is rounded once."""
    blocks = sample("NVFP4", 3, 4)
    decode = formats.get("NVFP4").decode
    plain = decode({"blocks": blocks})
    scale = torch.tensor([0.01])
    scaled = decode({"blocks": blocks, "scale": scale})
    assert_same_bits(scaled, plain.numpy() * np.float32(0.01))
    assert_same_bits(decode({"blocks": blocks, "scale": torch.tensor(1.0)}), plain.numpy())
    assert not torch.equal(scaled, plain)
    codes = blocks.view(-1, 36)[5, 4:12].tolist()
    expected = [e2m1(c) * e4m3(int(blocks.view(-1, 36)[5, 0]) & 127) + 0.0 for c in [b & 15 for b in codes]]
    assert plain.view(-1, 64)[5, :8].tolist() == expected


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nvfp4_per_tensor_scale_must_be_finite(bad):
    with pytest.raises(FileError, match=r"scale is (nan|inf)"):
        formats.get("NVFP4").decode({"blocks": sample("NVFP4"), "scale": torch.tensor(bad)})


def test_q4_0_is_offset_binary_in_split_order():
    """K16: nibble - 8, low nibbles first: neither two's complement nor pairs."""
    packed = [(i * 37 + 5) % 256 for i in range(16)]
    block = torch.tensor([[0x00, 0x3C, *packed]], dtype=torch.uint8)
    expected = [byte % 16 - 8 for byte in packed] + [byte // 16 - 8 for byte in packed]
    assert formats.get("Q4_0").decode({"blocks": block})[0].tolist() == expected
    weights = random_floats(3, 4, 64)
    blocks = legacy._encode_q4_0(weights)["blocks"]
    decoded = formats.get("Q4_0").decode({"blocks": blocks})
    assert_same_bits(decoded, oracle("Q4_0", blocks))
    assert (decoded - weights).abs().max() <= weights.abs().max() / 8


@pytest.mark.parametrize("name", sorted(ggml.BLOCK_BYTES))
def test_types_left_to_the_package_say_what_to_install_without_it(name, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    with pytest.raises(UnsupportedError, match=rf"{name}: .*pip install gguf"):
        formats.get(name).decode({"blocks": sample(name)})


def test_types_left_to_the_package_decode_in_pieces(monkeypatch):
    monkeypatch.setattr(ggml, "PIECE", 2 * 5 * 256)
    blocks = sample("IQ3_S", n_rows=7)
    assert_same_bits(formats.get("IQ3_S").decode({"blocks": blocks}), oracle("IQ3_S", blocks))


def test_a_large_tensor_decodes_on_threads_to_the_same_bits():
    n_rows = 3 * chunks.CPU_PIECE // 1024
    blocks = random_blocks("Q4_1", 20, n_rows, 32, seed=9)
    assert_same_bits(formats.get("Q4_1").decode({"blocks": blocks}), oracle("Q4_1", blocks))
