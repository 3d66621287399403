"""Rows of a table without decoding the table: equal, bit for bit, to rows of the decoded table."""

import container_bytes as make
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from bytefloor.errors import ShapeError, UnsupportedError
from bytefloor.files.checkpoint import open_checkpoint
from bytefloor.files.gguf_types import TENSOR_TYPES
from bytefloor.files.gguf_writer import NewTensor, write_gguf
from bytefloor.files.stored import StoredTensor, find_format
from bytefloor.formats import FORMATS

IDS = torch.tensor([299, 0, 7, 7, 128, 127])
N, K = 300, 256


def table(parts, name, shape=(N, K)):
    return StoredTensor("embed", shape, name, find_format(name), 0, lambda: parts)


def random_blocks(kind):
    """Blocks with finite fp16 scales everywhere: no byte pair has all exponent bits set."""
    torch.manual_seed(3)
    return torch.randint(0, 256, (N, K // kind.block * kind.block_bytes), dtype=torch.uint8) & 0x77


@pytest.mark.parametrize("name", [kind.name for kind in TENSOR_TYPES.values() if kind.name in FORMATS])
def test_rows_equal_those_of_the_decoded_gguf_table(tmp_path, name):
    """K13: a quantised token embedding, for every GGUF type that decodes; the reference package agrees (K14)."""
    kind = next(kind for kind in TENSOR_TYPES.values() if kind.name == name)
    blocks = random_blocks(kind)
    write_gguf(tmp_path / "m.gguf", {}, [NewTensor("token_embd.weight", (N, K), name, blocks)])
    embedding = open_checkpoint(tmp_path / "m.gguf").tensors["token_embd.weight"]
    rows = embedding.rows(IDS)
    assert rows.dtype == torch.float32
    assert torch.equal(rows, embedding.decode()[IDS])
    raw = (
        blocks.numpy()
        if kind.block > 1
        else blocks.numpy().view({"F32": np.float32, "F16": np.float16}.get(name, np.uint8))
    )
    assert torch.equal(rows, torch.from_numpy(dequantize(raw, GGMLQuantizationType[name]).copy())[IDS])


def e4m3(*shape):
    torch.manual_seed(5)
    return (torch.randint(0, 256, shape, dtype=torch.uint8) & 0xF7).view(torch.float8_e4m3fn)


def codes(*shape):
    torch.manual_seed(6)
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def group_scales(n_groups):
    """No neighbour, across or down, has an equal scale."""
    return ((torch.arange(N)[:, None] * 7 + torch.arange(n_groups)) % 61 + 40).to(torch.uint8)


NIBBLES, WORDS = codes(N, K // 2), codes(N, K // 2).view(torch.int32)
E8M0, E4M3 = group_scales(8), group_scales(16).view(torch.float8_e4m3fn)
TABLES = {
    "affine-4b-g64": {"weight": WORDS, "scales": torch.randn(N, 4).bfloat16(), "biases": torch.randn(N, 4).bfloat16()},
    "affine-8b-g32": {
        "weight": codes(N, K).view(torch.int32),
        "scales": torch.randn(N, 8).half(), "biases": torch.randn(N, 8).half()},
    "mlx-mxfp4": {"weight": WORDS, "scales": E8M0},
    "FP4-E2M1-g128": {"weight": NIBBLES, "weight_scale": torch.rand(N, 2)},
    "FP8-E4M3-row": {"weight": e4m3(N, K), "weight_scale": torch.rand(N, 1)},
    "FP8-E4M3-tensor": {"weight": e4m3(N, K), "weight_scale": torch.tensor(0.37)},
    "FP8-E4M3-128x128": {"weight": e4m3(N, K), "weight_scale_inv": torch.rand(3, 2) + 0.5},
    "NVFP4-modelopt": {"weight": NIBBLES, "weight_scale": E4M3, "weight_scale_2": torch.tensor(0.01)},
    "NVFP4-compressed-tensors": {
        "weight_packed": NIBBLES, "weight_scale": E4M3, "weight_global_scale": torch.tensor([300.0])},
    "MXFP4-modelopt": {"weight": NIBBLES, "weight_scale": E8M0},
}  # fmt: skip


@pytest.mark.parametrize("name", TABLES)
def test_rows_equal_those_of_the_decoded_safetensors_table(name):
    """K13: parts by row, by tensor and by 128x128 block each keep their meaning."""
    tensor = table(TABLES[name], name)
    whole = tensor.decode()
    assert torch.equal(tensor.rows(IDS), whole[IDS])
    assert not torch.equal(whole[0], whole[7])
    assert tensor.rows(IDS[:0]).shape == (0, K)


@pytest.mark.parametrize("name", [name for name in TABLES if "128x128" not in name])
def test_row_slice_is_a_tensor_of_its_own_without_a_copy(name):
    tensor = table(TABLES[name], name)
    part = tensor.row_slice("v_proj", 100, 230)
    assert (part.name, part.shape) == ("v_proj", (130, K))
    assert torch.equal(part.decode(), tensor.decode()[100:230])
    assert torch.equal(part.rows(IDS[1:3]), tensor.decode()[IDS[1:3] + 100])
    first = next(iter(TABLES[name]))
    assert part.read()[first].untyped_storage().data_ptr() == TABLES[name][first].untyped_storage().data_ptr()


def test_only_the_rows_asked_for_are_decoded():
    seen = []

    def decode(parts):
        seen.append(parts["values"].shape[0])
        return parts["values"]

    record = FORMATS["F32"].__class__("counting", 1, 32.0, ("values",), decode)
    tensor = StoredTensor("t", (1000, 4), "counting", record, 0, lambda: {"values": torch.randn(1000, 4)})
    tensor.rows(torch.tensor([5, 999]))
    assert seen == [2]


@pytest.mark.parametrize("scale", [torch.tensor(0.5), torch.tensor([0.5]), torch.tensor([[0.5]])])
@pytest.mark.parametrize("name", ["FP8-E4M3-row", "FP8-E4M3-tensor"])
def test_table_of_one_row_takes_either_kind_of_scale(name, scale):
    """One row: a scale a row and a scale a tensor have the same shape."""
    if name == "FP8-E4M3-row" and not scale.dim():
        scale = scale.reshape(1)
    tensor = table({"weight": e4m3(1, K), "weight_scale": scale}, name, (1, K))
    assert torch.equal(tensor.rows(torch.tensor([0, 0])), tensor.decode()[[0, 0]])


def test_slicing_through_128x128_blocks_is_refused():
    with pytest.raises(ShapeError, match=r"weight_scale_inv has shape \[3, 2\], expected 300 rows or one value"):
        table(TABLES["FP8-E4M3-128x128"], "FP8-E4M3-128x128").row_slice("v", 0, 64).read()


@pytest.mark.parametrize(("ids", "row"), [([-1], -1), ([N], N), ([0, 5000], 5000), ([5, -3], -3)])
def test_row_outside_the_table_is_refused(ids, row):
    with pytest.raises(ShapeError, match=rf"embed: row {row} asked for, it has rows 0 to 299"):
        table(TABLES["MXFP4-modelopt"], "MXFP4-modelopt").rows(torch.tensor(ids))


def test_rows_of_an_unknown_type_name_tensor_and_type():
    with pytest.raises(UnsupportedError, match="embed: type 42"):
        table({"blocks": torch.zeros(N, 4)}, "type 42").rows(IDS)


def test_nan_scale_names_the_tensor(tmp_path):
    """K07: 255 is NaN in E8M0."""
    raw = make.gguf_bytes(entries=[make.entry("w", (32,), 39, 0)], data=b"\xff" + bytes(16))
    (tmp_path / "m.gguf").write_bytes(raw)
    with pytest.raises(Exception, match=r"tensor w: .*row 0") as caught:
        open_checkpoint(tmp_path / "m.gguf").tensors["w"].decode()
    assert type(caught.value).__name__ == "FileError"
