"""safetensors files and directories: what opens, what is refused."""

import json
import time
import tracemalloc
import warnings

import container_bytes as make
import pytest
import torch
from safetensors.torch import save_file

from bytefloor.errors import FileError, UnsupportedError
from bytefloor.files.checkpoint import open_checkpoint
from bytefloor.files.safetensors import read_safetensors

W = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}


def w(**changes):
    return {**W, **changes}


@pytest.mark.parametrize(
    ("dtype", "seen"),
    [(torch.uint32, torch.int32), *((t, t) for t in (
        torch.float32, torch.float16, torch.bfloat16, torch.uint8, torch.float8_e4m3fn, torch.float8_e8m0fnu))],
)  # fmt: skip
@pytest.mark.parametrize("n_spaces", [0, 1])
def test_arrays_come_back_bit_for_bit(tmp_path, dtype, seen, n_spaces):
    """Also where the header's length misaligns the data."""
    raw = torch.arange(1, 25, dtype=torch.uint8).repeat(2)
    tensor = raw.view(dtype).reshape(2, -1)
    content = make.safetensors_of({"w": tensor})
    length = int.from_bytes(content[:8], "little") + n_spaces
    path = tmp_path / "m.safetensors"
    path.write_bytes(
        length.to_bytes(8, "little")
        + content[8 : 8 + length - n_spaces]
        + b" " * n_spaces
        + content[8 + length - n_spaces :]
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = read_safetensors(path).tensors["w"].read()
    assert (found.dtype, found.shape) == (seen, tensor.shape)
    assert torch.equal(found.view(torch.uint8).reshape(-1), raw)


def test_a_file_of_the_safetensors_package_is_read_with_its_metadata(tmp_path):
    path = tmp_path / "m.safetensors"
    tensors = {"a": torch.randn(3, 4), "b": torch.ones(2, dtype=torch.bfloat16)}
    save_file(tensors, path, {"k": "v"})
    file = read_safetensors(path)
    assert file.metadata == {"k": "v"}
    assert all(torch.equal(file.tensors[name].read(), value) for name, value in tensors.items())


BAD_FILES = {
    "seven bytes": (b"\x02\0\0\0\0\0\0", "not a model file|too few"),
    "header of an exabyte": (make.safetensors_bytes({"w": W}, bytes(24), length=1 << 60), "not a model file|announces"),
    "header past the end": (make.safetensors_bytes({"w": W}, bytes(24), length=4000), "announces 4000 bytes"),
    "header cut in JSON": (make.safetensors_bytes({"w": W}, bytes(24), length=30), "not valid JSON"),
    "header not UTF-8": (make.safetensors_bytes(b'{"\xff": 1}'), "not valid JSON"),
    "header nested absurdly": (make.safetensors_bytes(b'{"a":' + b"[" * 100_000), "nested too deeply"),
    "header with a number of 5000 digits": (make.safetensors_bytes(b'{"a":' + b"1" * 5000 + b"}"), "not valid JSON"),
    "duplicate name": (make.safetensors_bytes(b'{"w": {}, "w": {}}'), "key w occurs twice"),
    "entry not an object": (make.safetensors_bytes({"w": 3}), "w: its header entry is not an object"),
    "metadata not strings": (make.safetensors_bytes({"__metadata__": {"a": 1}}), "__metadata__"),
    "dtype missing": (make.safetensors_bytes({"w": w(dtype=None)}, bytes(24)), "dtype is None"),
    "shape negative": (make.safetensors_bytes({"w": w(shape=[-2, -3])}, bytes(24)), "shape is"),
    "shape not a list": (make.safetensors_bytes({"w": w(shape={"a": 1})}, bytes(24)), "shape is"),
    "shape of booleans": (make.safetensors_bytes({"w": w(shape=[True, 6])}, bytes(24)), "shape is"),
    "shape of a thousand": (make.safetensors_bytes({"w": w(shape=[1] * 1000)}, bytes(24)), "shape is"),
    "shape overflows": (make.safetensors_bytes({"w": w(shape=[1 << 40, 1 << 40])}, bytes(24)), "data_offsets span 24"),
    "shape against size": (make.safetensors_bytes({"w": w(shape=[2, 2])}, bytes(24)), r"F32 \[2, 2\] needs 16 bytes"),
    "offsets missing": (make.safetensors_bytes({"w": w(data_offsets=[0])}, bytes(24)), "data_offsets is"),
    "offsets backwards": (make.safetensors_bytes({"w": w(data_offsets=[24, 0])}, bytes(24)), "before it begins"),
    "offsets beyond the file": (
        make.safetensors_bytes({"w": w(data_offsets=[1 << 40, (1 << 40) + 24])}, bytes(24)), "bytes short"),
    "overlap": (make.safetensors_bytes({"a": W, "b": w(data_offsets=[20, 44])}, bytes(48)), "a and b overlap"),
    "data cut": (make.safetensors_bytes({"w": W}, bytes(17)), r"file is 7 bytes short: has \d+ of \d+ \(tensor w\)"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD_FILES)
def test_bad_file_is_refused_cheaply(tmp_path, what):
    raw, message = BAD_FILES[what]
    path = tmp_path / "model.safetensors"
    path.write_bytes(raw)
    tracemalloc.start()
    start = time.process_time()
    with pytest.raises(FileError, match=message) as caught:
        open_checkpoint(path)
    seconds = time.process_time() - start
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert str(path) in str(caught.value)
    assert peak < 16 << 20
    assert seconds < 0.5


PREFIXES = ["", "model.", "language_model.model.", "model.language_model."]


@pytest.mark.parametrize("prefix", PREFIXES)
def test_four_prefixes_give_one_spelling(tmp_path, prefix):
    tensors = {
        f"{prefix}{name}": torch.ones(2, 2) for name in ("embed_tokens.weight", "layers.0.self_attn.q_proj.weight")
    }
    head = "language_model.lm_head.weight" if "language_model" in prefix else "lm_head.weight"
    checkpoint = open_checkpoint(make.model_directory(tmp_path / "m", {**tensors, head: torch.ones(2, 2)}))
    assert set(checkpoint.tensors) == {"embed_tokens.weight", "layers.0.self_attn.q_proj.weight", "lm_head.weight"}
    assert (checkpoint.container, checkpoint.directory) == ("safetensors", tmp_path / "m")


def test_two_spellings_of_one_tensor_are_refused(tmp_path):
    tensors = {"model.norm.weight": torch.ones(2), "norm.weight": torch.ones(2)}
    with pytest.raises(FileError, match=r"model\.norm\.weight and norm\.weight are both norm\.weight"):
        open_checkpoint(make.model_directory(tmp_path / "m", tensors))


def test_towers_are_skipped_and_unknown_names_kept(tmp_path):
    towers = ["model.vision_tower.a", "vision_tower.b", "model.embed_vision.w", "audio_tower.c", "visual.d", "mm.e",
              "multi_modal_projector.f", "language_model.model.embed_audio.g"]  # fmt: skip
    tensors = {name: torch.ones(2) for name in [*towers, "model.norm.weight", "model.layers.0.strange"]}
    tensors["model.layers.0.self_attn.q_proj.input_scale"] = torch.ones(1)
    checkpoint = open_checkpoint(make.model_directory(tmp_path / "m", tensors))
    assert set(checkpoint.tensors) == {"norm.weight", "layers.0.strange"}
    assert checkpoint.notices == ("8 tensors of vision or audio towers skipped", "1 activation or cache scales ignored")


def test_files_that_are_not_read_are_named(tmp_path):
    directory = make.model_directory(tmp_path / "m", {"model.norm.weight": torch.ones(2)})
    (directory / "other.safetensors").write_bytes(make.safetensors_of({"model.extra": torch.ones(2)}))
    (directory / "small.gguf").write_bytes(b"GGUF")
    checkpoint = open_checkpoint(directory)
    assert set(checkpoint.tensors) == {"norm.weight"}
    assert checkpoint.notices == (
        "other.safetensors left out: model.safetensors is the whole model where there is no index",
        "small.gguf left out: the directory's safetensors are read",
    )


def sharded(path, weight_map=None):
    path.mkdir()
    for number, name in enumerate(["model.a.weight", "model.b.weight"], 1):
        raw = make.safetensors_of({name: torch.full((2, 2), float(number))})
        (path / f"model-0000{number}-of-00002.safetensors").write_bytes(raw)
    default = {
        "model.a.weight": "model-00001-of-00002.safetensors",
        "model.b.weight": "model-00002-of-00002.safetensors",
    }
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map or default}))
    return path


@pytest.mark.parametrize("given", ["", "model-00002-of-00002.safetensors"])
def test_indexed_shards_open_from_the_directory_or_any_of_them(tmp_path, given):
    checkpoint = open_checkpoint(sharded(tmp_path / "m") / given)
    assert {name: tensor.decode()[0, 0].item() for name, tensor in checkpoint.tensors.items()} == {
        "a.weight": 1,
        "b.weight": 2,
    }


def test_missing_shard_is_named(tmp_path):
    directory = sharded(tmp_path / "m")
    (directory / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(FileError, match=r"model-00002-of-00002\.safetensors: missing"):
        open_checkpoint(directory)


def test_tensor_that_the_index_promises_must_be_there(tmp_path):
    weight_map = {"model.a.weight": "model-00001-of-00002.safetensors", "gone": "model-00002-of-00002.safetensors"}
    with pytest.raises(FileError, match=r"model-00002-of-00002\.safetensors: tensor gone is missing"):
        open_checkpoint(sharded(tmp_path / "m", weight_map))


@pytest.mark.parametrize("shard", ["../x.safetensors", "/etc/passwd", "", ".."])
def test_index_cannot_name_files_elsewhere(tmp_path, shard):
    with pytest.raises(FileError, match="not a plain file name"):
        open_checkpoint(sharded(tmp_path / "m", {"a": shard}))


def test_shards_without_an_index_are_merged_and_repeats_refused(tmp_path):
    directory = sharded(tmp_path / "m")
    (directory / "model.safetensors.index.json").unlink()
    assert set(open_checkpoint(directory).tensors) == {"a.weight", "b.weight"}
    (directory / "again.safetensors").write_bytes(make.safetensors_of({"model.a.weight": torch.ones(2)}))
    with pytest.raises(FileError, match=r"model\.a\.weight is in again\.safetensors too"):
        open_checkpoint(directory)


def test_unreadable_config_is_refused(tmp_path):
    directory = make.model_directory(tmp_path / "m", {"a.weight": torch.ones(2)})
    (directory / "config.json").write_text('{"a": 1, "a": 2}')
    with pytest.raises(FileError, match=r"config\.json: not valid JSON: key a occurs twice"):
        open_checkpoint(directory)


def test_tensor_of_an_unknown_type_is_listed_not_decoded(tmp_path):
    path = tmp_path / "m.safetensors"
    path.write_bytes(
        make.safetensors_bytes({"w": w(dtype="F6_E2M3"), "i": w(dtype="I32")}, bytes(24))
        .replace(b"[0, 24]}}", b"[0, 0]}} ")
        .replace(b'"I32", "shape": [2, 3]', b'"I32", "shape": [0, 3]')
    )
    checkpoint = open_checkpoint(path)
    for tensor in checkpoint.tensors.values():
        with pytest.raises(UnsupportedError, match="cannot be decoded"):
            tensor.decode()
