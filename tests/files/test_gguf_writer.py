"""Files written by us, read by us and by the reference package."""

import gguf
import numpy as np
import pytest
import torch

from bytefloor.errors import FileError, UnsupportedError
from bytefloor.files.checkpoint import open_checkpoint
from bytefloor.files.gguf_writer import NewTensor, Typed, write_gguf

METADATA = {
    "general.architecture": "llama",
    "general.alignment": 64,
    "llama.block_count": 2,
    "small": -3,
    "wide": Typed("u64", 2**40),
    "yes": True,
    "eps": 1e-6,
    "double": Typed("f64", 0.1),
    "tokens": ["a", "\udcff\udcfe", "é"],
    "types": Typed("i32", [1, 3]),
    "scores": [0.5, -1.0],
    "flags": [True, False],
    "empty": Typed("string", []),
}


def tensors():
    torch.manual_seed(7)
    blocks = torch.randint(0, 256, (2, 36), dtype=torch.uint8)
    return [
        NewTensor("norm", (5,), "F32", torch.randn(5)),
        NewTensor("q", (2, 64), "Q4_0", blocks),
        NewTensor("half", (3, 2, 2), "F16", lambda: torch.randn(3, 2, 2).half()),
        NewTensor("brain", (2, 3), "BF16", torch.randn(3, 2).bfloat16().t()),
        NewTensor("raw", (4,), "I8", b"\1\2\3\4"),
    ]


def test_written_file_is_read_back_by_our_reader(tmp_path):
    path = tmp_path / "out.gguf"
    written = tensors()
    write_gguf(path, METADATA, written)
    checkpoint = open_checkpoint(path)
    expected = {key: value.value if isinstance(value, Typed) else value for key, value in METADATA.items()}
    expected["eps"] = pytest.approx(1e-6)
    assert dict(checkpoint.metadata) == expected
    for tensor in written:
        found = checkpoint.tensors[tensor.name]
        assert (found.shape, found.format_name) == (tensor.shape, tensor.format_name)
    assert torch.equal(checkpoint.tensors["q"].read()["blocks"], written[1].data)
    assert torch.equal(checkpoint.tensors["brain"].read()["values"], written[3].data)
    assert not list(tmp_path.glob("*.partial"))


def test_written_file_is_read_by_the_reference_package(tmp_path):
    path = tmp_path / "out.gguf"
    written = tensors()
    metadata = {key: value for key, value in METADATA.items() if key not in ("tokens", "empty")}
    write_gguf(path, metadata, written)
    reader = gguf.GGUFReader(path)
    assert {field for field in reader.fields if not field.startswith("GGUF.")} == set(metadata)
    assert reader.fields["wide"].types == [gguf.GGUFValueType.UINT64]
    assert reader.fields["types"].contents() == [1, 3]
    found = {tensor.name: tensor for tensor in reader.tensors}
    assert list(found["half"].shape) == [2, 2, 3]
    assert np.array_equal(np.asarray(found["norm"].data), written[0].data.numpy())
    assert np.asarray(found["q"].data).tobytes() == written[1].data.numpy().tobytes()


def test_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "out.gguf"
    path.write_bytes(b"old")
    with pytest.raises(FileError, match=r"short: F32 \[4\] takes 16 bytes, given 8"):
        write_gguf(path, {}, [NewTensor("short", (4,), "F32", bytes(8))])
    assert [entry.name for entry in tmp_path.iterdir()] == ["out.gguf"]
    assert path.read_bytes() == b"old"


def test_data_is_asked_for_one_tensor_at_a_time(tmp_path):
    order = []

    def data(name):
        return lambda: order.append((name, (tmp_path / "out.gguf.partial").stat().st_size > 0)) or bytes(4096 * 40)

    new = [NewTensor(name, (40, 1024), "F32", data(name)) for name in "ab"]
    write_gguf(tmp_path / "out.gguf", {}, new)
    assert [name for name, _ in order] == ["a", "b"]
    assert order[1][1]


def test_type_without_a_number_is_refused(tmp_path):
    with pytest.raises(UnsupportedError, match="GGUF has no type affine-4b-g64"):
        write_gguf(tmp_path / "out.gguf", {}, [NewTensor("w", (64,), "affine-4b-g64", b"")])


def test_number_that_does_not_fit_its_type_is_refused(tmp_path):
    with pytest.raises(FileError, match="key k: 300 is no u8"):
        write_gguf(tmp_path / "out.gguf", {"k": Typed("u8", 300)}, [])
