"""Models split over several GGUF files."""

import struct

import container_bytes as make
import pytest

from bytefloor.errors import FileError
from bytefloor.files.checkpoint import open_checkpoint


def shard(number, count, names, first=0.0, total=None):
    pairs = [make.u16("split.no", number), make.u16("split.count", count)]
    if number == 0:
        pairs.append(make.string("general.architecture", "llama"))
    if total is not None:
        pairs.append(make.pair("split.tensors.count", make.I32, struct.pack("<i", total)))
    entries = [make.entry(name, (8,), make.TYPE_F32, 32 * i) for i, name in enumerate(names)]
    return make.gguf_bytes(
        pairs, entries, struct.pack(f"<{8 * len(names)}f", *[first + i for i in range(8 * len(names))])
    )


@pytest.fixture
def shards(tmp_path):
    """Three shards, the first with metadata only."""
    contents = [shard(0, 3, [], total=3), shard(1, 3, ["a", "b"], 100, total=3), shard(2, 3, ["c"], 200, total=3)]
    paths = [tmp_path / f"model-0000{i + 1}-of-00003.gguf" for i in range(3)]
    for path, raw in zip(paths, contents, strict=True):
        path.write_bytes(raw)
    return paths


@pytest.mark.parametrize("given", [0, 1, 2])
def test_any_shard_opens_all_of_them(shards, given):
    """G11: also where the first shard has no tensors."""
    checkpoint = open_checkpoint(shards[given])
    assert checkpoint.path == shards[0]
    assert checkpoint.metadata["general.architecture"] == "llama"
    firsts = {name: tensor.decode()[0].item() for name, tensor in checkpoint.tensors.items()}
    assert firsts == {"a": 100, "b": 108, "c": 200}


def test_directory_with_one_split_model_opens(shards):
    assert len(open_checkpoint(shards[0].parent).tensors) == 3


def test_missing_shard_is_named(shards):
    """G10: the path that is not there."""
    shards[1].unlink()
    with pytest.raises(FileError, match=r"model-00002-of-00003\.gguf: missing; shard 2 of 3"):
        open_checkpoint(shards[2])


@pytest.mark.parametrize("padding", [0, 20])
@pytest.mark.parametrize("name", ["model.gguf", "model-00001-of-00003.gguf"])
def test_shards_joined_with_cat_are_explained(shards, padding, name):
    """G10: whatever the joined file is called."""
    joined = shards[0].with_name(name)
    joined.write_bytes(bytes(padding).join(path.read_bytes() for path in shards))
    with pytest.raises(FileError, match="joined with cat"):
        open_checkpoint(joined)


def test_one_of_one_is_a_whole_file(tmp_path):
    """G12: with and without its split keys."""
    path = tmp_path / "model-00001-of-00001.gguf"
    for raw in (shard(0, 1, ["a"]), make.two_tensors()):
        path.write_bytes(raw)
        assert open_checkpoint(path).tensors


def test_renamed_shard_is_refused(shards):
    renamed = shards[0].rename(shards[0].with_name("first.gguf"))
    with pytest.raises(FileError, match=r"one of 3 shards, but not named \.\.\.-00001-of-00003"):
        open_checkpoint(renamed)


def test_whole_file_named_as_a_shard_is_refused(tmp_path):
    path = tmp_path / "model-00001-of-00002.gguf"
    path.write_bytes(make.two_tensors())
    with pytest.raises(FileError, match=r"no split\.count"):
        open_checkpoint(path)


def test_shards_in_each_others_place_are_refused(shards):
    second, third = shards[1].read_bytes(), shards[2].read_bytes()
    shards[1].write_bytes(third)
    shards[2].write_bytes(second)
    with pytest.raises(FileError, match="says it is shard 3 of 3, its name says 2 of 3"):
        open_checkpoint(shards[0])


def test_tensor_in_two_shards_is_refused(shards):
    shards[2].write_bytes(shard(2, 3, ["a"]))
    with pytest.raises(FileError, match="tensor a occurs in an earlier shard"):
        open_checkpoint(shards[0])


def test_shards_with_too_few_tensors_are_refused(shards):
    shards[0].write_bytes(shard(0, 3, [], total=4))
    with pytest.raises(FileError, match="hold 3 tensors, expected 4"):
        open_checkpoint(shards[0])


@pytest.mark.parametrize("raw", [make.string("split.count", "3"), make.pair("split.count", make.I32, b"\xff" * 4)])
def test_split_count_that_is_no_count_is_refused(tmp_path, raw):
    path = tmp_path / "model.gguf"
    path.write_bytes(make.gguf_bytes([raw]))
    with pytest.raises(FileError, match=r"split\.count is .* expected a count"):
        open_checkpoint(path)
