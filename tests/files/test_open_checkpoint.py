"""One call opens a model or says what is in its place."""

import container_bytes as make
import pytest
import torch

from bytefloor.errors import FileError, UnsupportedError
from bytefloor.files.checkpoint import open_checkpoint


def test_missing_path_suggests_near_names(tmp_path):
    (tmp_path / "gemma-3-270m-Q4_K_M.gguf").write_bytes(make.two_tensors())
    with pytest.raises(FileError, match=r"no such file.*did you mean .*gemma-3-270m-Q4_K_M\.gguf"):
        open_checkpoint(tmp_path / "gemma-3-270m-Q4_K_S.gguf")
    with pytest.raises(FileError, match=r"no such file or directory$"):
        open_checkpoint(tmp_path / "nothing" / "like" / "it")


STRANGERS = {
    "empty": (b"", FileError, "the file is empty"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n", FileError, "git-lfs pointer"),
    "html": (b"\n <!DOCTYPE html><html>Log in", FileError, "web page"),
    "zip": (b"PK\x03\x04" + bytes(60), UnsupportedError, "convert them to safetensors"),
    "pickle": (b"\x80\x02}q\0." + bytes(60), UnsupportedError, "convert them to safetensors"),
    "ggjt": (b"tjgg\3\0\0\0" + bytes(60), UnsupportedError, "before GGUF"),
    "text": (b"Dear reader, this is no model", FileError, "neither GGUF nor safetensors"),
    "one byte": (b"G", FileError, "neither GGUF nor safetensors"),
    "gguf magic alone": (b"GGUF", FileError, "needs 24 bytes"),
}


@pytest.mark.parametrize("what", STRANGERS)
@pytest.mark.parametrize("suffix", [".gguf", ".safetensors"])
def test_stranger_is_named(tmp_path, what, suffix):
    raw, kind, message = STRANGERS[what]
    path = tmp_path / f"model{suffix}"
    path.write_bytes(raw)
    with pytest.raises(kind, match=message):
        open_checkpoint(str(path))


def test_content_decides_not_the_name(tmp_path):
    (tmp_path / "a.bin").write_bytes(make.two_tensors())
    (tmp_path / "b.gguf").write_bytes(make.safetensors_of({"w": torch.ones(2)}))
    assert open_checkpoint(tmp_path / "a.bin").container == "gguf"
    assert open_checkpoint(tmp_path / "b.gguf").container == "safetensors"


def test_directory_with_one_gguf_opens_it_beside_a_projector(tmp_path):
    (tmp_path / "model.gguf").write_bytes(make.two_tensors())
    (tmp_path / "mmproj-model.gguf").write_bytes(make.gguf_bytes([make.string("general.architecture", "clip")]))
    checkpoint = open_checkpoint(tmp_path)
    assert (checkpoint.path.name, checkpoint.directory) == ("model.gguf", None)


def test_directory_with_several_ggufs_lists_them(tmp_path):
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(make.two_tensors())
    with pytest.raises(FileError, match=r"2 GGUF models; name one: a\.gguf, b\.gguf"):
        open_checkpoint(tmp_path)


def test_directory_of_pickles_is_refused_with_advice(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK\x03\x04")
    with pytest.raises(UnsupportedError, match=r"only pytorch_model\.bin; .*convert them to safetensors"):
        open_checkpoint(tmp_path)


def test_directory_with_nothing_usable_is_refused(tmp_path):
    (tmp_path / "README.md").write_text("hello")
    with pytest.raises(FileError, match="no model in it"):
        open_checkpoint(tmp_path)


def test_reference_models_open(shared_dir):
    for name in ("gemma4-tiny", "gemma4-tiny-e"):
        checkpoint = open_checkpoint(shared_dir / "models" / name)
        assert checkpoint.metadata["model_type"].startswith("gemma4")
        assert checkpoint.tensors["embed_tokens.weight"].shape[0] == 8192
        assert all(tensor.format_name == "BF16" for tensor in checkpoint.tensors.values())
