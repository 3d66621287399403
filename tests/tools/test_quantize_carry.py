"""A model carried from one container to the other without any rounding is the same model, to us and to transformers."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from bytefloor.errors import FileError, RequestError, UnsupportedError
from bytefloor.files.checkpoint import open_checkpoint
from bytefloor.model.families import load_model
from bytefloor.quantize import gguf_keys, hf_config
from bytefloor.quantize.job import prepare
from bytefloor.quantize.target import make_target
from parity import assert_close, logits_of
from quantized import quantize
from tiny import build_tiny, own_tensors, prompt_ids, reference_logits, stored_name, write_json
from tiny_gguf import write_tiny_gguf
from tiny_mlx import write_tiny_mlx

VARIANTS = (
    "llama",
    "llama3-rope-type",
    "smollm2",
    "qwen3-untied",
    "gemma3-linear",
    "gemma3-nested-sparse",
    "gemma4-unified-nested",
    "gemma4-31b",
    "gemma4-e-unused-kv",
)
IDS = prompt_ids(24)
FLOAT = "*=F32"


@pytest.mark.parametrize("name", VARIANTS)
def test_directory_to_gguf_and_back_is_the_same_model(name, tmp_path):
    model = build_tiny(name, tmp_path / "tiny")
    expected = reference_logits(model, IDS)
    quantize(model.directory, tmp_path / "there.gguf", "Q8_0", FLOAT)
    assert_close(logits_of(tmp_path / "there.gguf", IDS, 24), expected)
    quantize(tmp_path / "there.gguf", tmp_path / "back", "affine-4b", FLOAT)
    assert_close(logits_of(tmp_path / "back", IDS, 24), expected)
    config = json.loads((tmp_path / "back/config.json").read_text())
    del config["quantization"]  # nothing is quantised, and transformers knows nothing of MLX
    write_json(tmp_path / "back/config.json", config)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype=torch.float32, attn_implementation="eager")
    assert_close(reference_logits(loaded.eval(), IDS), expected)


@pytest.mark.parametrize("name", ["llama", "gemma3", "gemma4-unified", "gemma4-e"])
def test_gguf_has_the_keys_and_values_of_llama_cpps_converter(name, tmp_path):
    """What tests/tiny_gguf.py writes from what the converter does; keys that only say a default may be more."""
    model = build_tiny(name, tmp_path / "tiny")
    wanted = open_checkpoint(write_tiny_gguf(model, tmp_path / "wanted.gguf"))
    quantize(model.directory, tmp_path / "found.gguf", "Q8_0", FLOAT)
    found = open_checkpoint(tmp_path / "found.gguf")
    assert found.tensors.keys() == wanted.tensors.keys()
    for key, tensor in wanted.tensors.items():
        torch.testing.assert_close(found.tensors[key].decode(), tensor.decode(), rtol=1e-6, atol=0)
    own = {key: value for key, value in wanted.metadata.items() if not key.startswith(("general.", "tokenizer."))}
    for key, value in own.items():
        if key != "gemma4.attention.sliding_window_pattern":
            assert found.metadata[key] == pytest.approx(value, rel=1e-6), key
    for key in ("tokens", "merges", "bos_token_id", "eos_token_id", "padding_token_id", "unknown_token_id"):
        assert found.metadata[f"tokenizer.ggml.{key}"] == wanted.metadata.get(
            f"tokenizer.ggml.{key}", found.metadata[f"tokenizer.ggml.{key}"]
        )


@pytest.mark.parametrize("name", ["gemma3-nested", "gemma4-e-nested"])
def test_directory_to_directory_keeps_every_name_and_file(name, tmp_path):
    model = build_tiny(name, tmp_path / "tiny")
    (model.directory / "LICENSE").write_text("free")
    (model.directory / "chat_template.jinja").write_text("{{ messages }}")
    quantize(model.directory, tmp_path / "out", "affine-8b", FLOAT)
    names = {stored_name(key, model.prefix) for key in own_tensors(model.reference)}
    from safetensors.torch import load_file

    before, after = (load_file(folder / "model.safetensors") for folder in (model.directory, tmp_path / "out"))
    assert names <= after.keys()
    assert after.keys() == before.keys()  # towers of other senses included
    assert all(torch.equal(after[key], before[key]) for key in before)
    kept = {path.name for path in model.directory.iterdir()}
    assert {path.name for path in (tmp_path / "out").iterdir()} == kept
    for file in ("LICENSE", "chat_template.jinja", "tokenizer.json"):
        assert (tmp_path / "out" / file).read_bytes() == (model.directory / file).read_bytes()
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config.pop("quantization")["mode"] == "affine"
    assert config == json.loads((model.directory / "config.json").read_text())


def test_a_lone_file_takes_only_what_belongs_to_it_along(tmp_path):
    model = build_tiny("llama", tmp_path / "tiny")
    for stranger in ("diary.txt", "other.json", "photo.png"):
        (model.directory / stranger).write_text("{}")
    quantize(model.directory / "model.safetensors", tmp_path / "out", "affine-4b")
    kept = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == kept


def test_shards_of_gguf_become_one_file(tmp_path):
    """The keys of the first shard, less those that speak of shards."""
    from bytefloor.files.gguf_writer import NewTensor, Typed, write_gguf

    model = build_tiny("llama", tmp_path / "tiny")
    whole = open_checkpoint(write_tiny_gguf(model, tmp_path / "whole.gguf"))
    names = list(whole.tensors)
    for number, part in enumerate((names[:5], names[5:])):
        split = {"split.no": Typed("u16", number), "split.count": Typed("u16", 2), "split.tensors.count": len(names)}
        tensors = [
            NewTensor(name, whole.tensors[name].shape, "F32", whole.tensors[name].decode().contiguous())
            for name in part
        ]
        own = {key: Typed("u32", []) if value == [] else value for key, value in whole.metadata.items()}
        write_gguf(tmp_path / f"x-{number + 1:05d}-of-00002.gguf", {**(own if number == 0 else {}), **split}, tensors)
    quantize(tmp_path / "x-00002-of-00002.gguf", tmp_path / "out.gguf", "Q8_0", FLOAT)
    found = open_checkpoint(tmp_path / "out.gguf")
    assert found.tensors.keys() == whole.tensors.keys()
    assert not [key for key in found.metadata if key.startswith("split.")]
    assert_close(logits_of(tmp_path / "out.gguf", IDS, 24), reference_logits(model, IDS))


def test_gguf_keys_keep_their_types(tmp_path):
    import gguf

    model = build_tiny("llama", tmp_path / "tiny")
    source = tmp_path / "source.gguf"
    extra = {"general.alignment": 64, "my.text": "ü", "my.list": [1, 2, 3], "my.flag": True, "my.real": 0.5}
    write_tiny_gguf(model, source, extra=extra)
    quantize(source, tmp_path / "out.gguf", "Q8_0")
    before, after = gguf.GGUFReader(source), gguf.GGUFReader(tmp_path / "out.gguf")
    for key, field in before.fields.items():
        if not key.startswith("GGUF.") and key != "general.file_type":
            assert after.fields[key].types == field.types, key
            assert after.fields[key].contents() == field.contents(), key
    assert after.fields["general.file_type"].contents() == 7
    assert {tensor.tensor_type.name for tensor in after.tensors} == {"F32", "Q8_0"}


def test_what_no_key_can_say_is_refused_before_writing(tmp_path):
    model = build_tiny("gemma3-scaled", tmp_path / "tiny")
    with pytest.raises(UnsupportedError, match="gemma3 cannot be carried over whole: attention_scale of layer 0"):
        prepare(model.directory, make_target("Q8_0", [], None))


def test_families_without_a_reader_in_the_other_container_are_refused(tmp_path):
    config = load_model(open_checkpoint(build_tiny("llama", tmp_path / "tiny").directory)).config
    with pytest.raises(UnsupportedError, match="GGUF files of smollm3 are not read here, so none is written"):
        gguf_keys.keys_of(replace(config, family="smollm3"), ())
    with pytest.raises(UnsupportedError, match=r"a config.json for smollm3 is not written here"):
        hf_config.config_of(replace(config, family="smollm3"), True, ())


def test_tokenizer_that_no_gguf_kind_spells_is_refused(tmp_path):
    model = build_tiny("llama", tmp_path / "tiny")
    path = model.directory / "tokenizer.json"
    spec = json.loads(path.read_text())
    split = {"type": "Split", "pattern": {"Regex": "[aeiou]"}, "behavior": "Isolated", "invert": False}
    letters = {**spec["pre_tokenizer"], "use_regex": False}
    spec["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, letters]}
    write_json(path, spec)
    with pytest.raises(
        UnsupportedError, match=r"cannot become a GGUF tokenizer: default: .* would become other tokens"
    ):
        prepare(model.directory, make_target("Q8_0", [], None))
    prepare(model.directory, make_target("affine-4b", [], None))  # a directory keeps its own


@pytest.mark.parametrize(
    ("name", "out", "words"),
    [("Q8_0", "out", "expected a name that ends in .gguf"), ("FP8", "out.gguf", "expected the name of a directory")],
)
def test_name_of_the_other_container_is_refused(name, out, words, tmp_path):
    model = build_tiny("llama", tmp_path / "tiny")
    with pytest.raises(RequestError, match=words):
        quantize(model.directory, tmp_path / out, name)
    assert not (tmp_path / out).exists()


def test_nothing_is_overwritten_and_a_failure_leaves_nothing(tmp_path):
    model = build_tiny("llama", tmp_path / "tiny")
    with pytest.raises(FileError, match="there is something already"):
        quantize(model.directory, model.directory, "affine-4b")
    broken = write_tiny_mlx(model, tmp_path / "broken")
    file = broken.directory / "model.safetensors"
    from safetensors.torch import load_file, save_file

    tensors = load_file(file)
    tensors["model.layers.1.mlp.up_proj.scales"][0, 0] = float("nan")
    save_file(tensors, file)
    with pytest.raises(FileError, match=r"layers.1.mlp.up_proj.weight"):
        quantize(broken.directory, tmp_path / "out", "affine-8b")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken", "tiny"]
