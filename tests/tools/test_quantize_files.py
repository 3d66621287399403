"""Written models: what is in them, what they lost, that they run, and that they never were in memory as a whole."""

from __future__ import annotations

import gc
import json
import threading
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from bytefloor.errors import FileError, NumericalError
from bytefloor.files.checkpoint import open_checkpoint
from bytefloor.files.safetensors_writer import NewArray, stream_safetensors
from bytefloor.formats import FORMATS
from bytefloor.quantize.target import GGUF_TYPES
from parity import logits_of
from quantized import quantize
from tiny import build_tiny, prompt_ids, reference_logits
from tiny_gguf import write_tiny_gguf, write_tiny_quant_gguf
from tiny_mlx import write_tiny_mlx

IDS = prompt_ids(24)
AFFINE = {"q_proj": "affine-2b", "k_proj": "affine-3b", "v_proj": "affine-5b", "o_proj": "affine-6b"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return build_tiny("llama-wide", tmp_path_factory.mktemp("tiny"), torch.bfloat16)


def runs(path, model, most):
    """Root mean square of the logits' difference, as a share of their own; logits that have nothing to do with each
    other differ by 1.4. Models of random weights exaggerate every error."""
    expected = reference_logits(model, IDS)
    found = logits_of(path, IDS, 24)
    assert torch.isfinite(found).all()
    share = float((found - expected).norm() / expected.norm())
    assert share < most, share


@pytest.mark.parametrize("name", GGUF_TYPES)
def test_every_gguf_type_runs_and_its_reported_loss_is_true(name, model, tmp_path):
    job, losses = quantize(model.directory, tmp_path / "out.gguf", name, f"*={name}")
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "out.gguf").tensors}
    assert sum(tensor.n_bytes for tensor in found.values()) == job.plan.n_bytes
    for planned in job.plan.tensors:
        source = planned.tensor.rows(0, planned.tensor.n_rows).double()
        tensor = found[planned.name]
        decoded = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        difference = torch.from_numpy(np.array(decoded, np.float64)).view_as(source) - source
        loss = losses[planned.name]
        assert loss.error == pytest.approx(float(difference.norm() / source.norm()), rel=1e-6, abs=1e-12)
        assert loss.largest == pytest.approx(float(difference.abs().max()), rel=1e-6, abs=1e-12)
        assert loss.error == 0 if not planned.tensor.is_matrix else 0 < loss.error < 0.4
    runs(tmp_path / "out.gguf", model, {"Q2_K": 1.1, "Q3_K": 0.7, "Q8_0": 0.05}.get(name, 0.5))


def test_mixed_affine_modules_run_and_config_says_what_they_are(model, tmp_path):
    """Down at 8 bits and up in groups of 32 inside one MLP, all widths in attention, the head left as it is."""
    matches = [f"*.{part}.*={name}" for part, name in AFFINE.items()]
    matches += ["*.down_proj.*=affine-8b", "*.up_proj.*=affine-4b-g32", "lm_head.weight=keep"]
    job, _ = quantize(model.directory, tmp_path / "out", "affine-4b", *matches, group=128)
    arrays = load_file(tmp_path / "out/model.safetensors")
    config = json.loads((tmp_path / "out/config.json").read_text())["quantization"]
    assert {key: config[key] for key in ("group_size", "bits", "mode")} == {
        "group_size": 128,
        "bits": 4,
        "mode": "affine",
    }
    assert config["model.layers.0.mlp.up_proj"] == {"group_size": 32, "bits": 4}
    assert config["model.layers.0.mlp.down_proj"] == {"group_size": 128, "bits": 8}
    assert config["lm_head"] is False
    assert "model.layers.0.mlp.gate_proj" not in config
    assert arrays["model.layers.0.mlp.down_proj.weight"].dtype == torch.uint32
    assert sum(array.nbytes for array in arrays.values()) == job.plan.n_bytes
    runs(tmp_path / "out", model, 1.1)  # queries of 2 bits


def test_affine_triples_are_consistent(model, tmp_path):
    """Decoding and encoding again gives the same triple: codes were chosen against what is stored."""
    quantize(model.directory, tmp_path / "out", "affine-4b")
    for tensor in open_checkpoint(tmp_path / "out").tensors.values():
        if tensor.format_name == "affine-4b-g64":
            parts, decoded = tensor.read(), tensor.decode()
            scales, biases = (parts[part].float().repeat_interleave(64, 1) for part in ("scales", "biases"))
            codes = ((decoded - biases) / scales).round()
            assert ((codes >= 0) & (codes <= 15)).all()
            torch.testing.assert_close(codes * scales + biases, decoded, rtol=1e-6, atol=1e-7)


def test_mixed_mlx_file_becomes_uniform_and_what_fits_is_copied(model, tmp_path):
    source = write_tiny_mlx(model, tmp_path / "mixed", {"bits": 4}, {"layers.*.mlp.*": {"bits": 8, "group_size": 64}})
    job, losses = quantize(source.directory, tmp_path / "out", "affine-4b")
    before, after = (load_file(folder / "model.safetensors") for folder in (source.directory, tmp_path / "out"))
    for key in before:
        if ".mlp." not in key:
            assert torch.equal(after[key].view(before[key].dtype), before[key]), key
    assert {p.format_name for p in job.plan.tensors if p.tensor.is_matrix} == {"affine-4b-g64"}
    assert not any(value for key, value in losses.items() if ".mlp." not in key and value.error)
    assert losses["model.layers.0.mlp.up_proj.weight"].error > 0.01
    runs(tmp_path / "out", source, 0.5)


@pytest.mark.parametrize(
    ("name", "matches", "method"),
    [
        ("FP8", [], "compressed-tensors"),
        ("FP8", ["*.embed_tokens.*=FP8", "*.gate_proj.*=keep"], "bytefloor"),
        ("FP4", [], "bytefloor"),
        ("FP4", ["*.down_proj.*=FP8", "*.embed_tokens.*=keep"], "bytefloor"),
    ],
)
def test_fp4_and_fp8_directories_are_read_back_as_planned(name, matches, method, model, tmp_path):
    job, _ = quantize(model.directory, tmp_path / "out", name, *matches)
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["quantization_config"]["quant_method"] == method
    tensors = open_checkpoint(tmp_path / "out").tensors
    assert {tensor.format_name for tensor in tensors.values()} == {p.format_name for p in job.plan.tensors}
    is_plain = tensors["embed_tokens.weight"].format_name == "BF16"
    assert is_plain == (method == "compressed-tensors" or "*.embed_tokens.*=keep" in matches)
    runs(tmp_path / "out", model, 0.2 if name == "FP8" else 0.9)
    # And from there on: both are sources themselves.
    quantize(tmp_path / "out", tmp_path / "again.gguf", "Q8_0")
    runs(tmp_path / "again.gguf", model, 0.2 if name == "FP8" else 0.9)


def test_substitutes_are_written_and_run(tmp_path):
    """Rows of 128 and 192: K-quants fit none, groups of 128 not all. Of 172 (G17): no block fits."""
    small = build_tiny("qwen3", tmp_path / "tiny")
    job, _ = quantize(small.directory, tmp_path / "out.gguf", "Q4_K_M")
    found = {tensor.format_name for tensor in open_checkpoint(tmp_path / "out.gguf").tensors.values()}
    assert found == {"F32", "Q5_0", "Q8_0"}
    assert len(job.plan.substitutions) > 10
    runs(tmp_path / "out.gguf", small, 0.3)
    job, _ = quantize(small.directory, tmp_path / "out", "affine-8b", group=128)
    assert {planned.format_name for planned in job.plan.substitutions} == {"affine-8b-g64"}
    runs(tmp_path / "out", small, 0.1)
    odd = build_tiny("llama-172", tmp_path / "tiny")
    quantize(odd.directory, tmp_path / "odd.gguf", "Q4_K_M")
    kinds = {name: t.format_name for name, t in open_checkpoint(tmp_path / "odd.gguf").tensors.items()}
    assert kinds["blk.0.ffn_down.weight"] == kinds["token_embd.weight"] == "F16"
    # o has heads of 32 for columns.
    assert kinds["blk.0.attn_output.weight"] == "Q5_0"
    runs(tmp_path / "odd.gguf", odd, 0.1)


def test_every_gguf_type_can_be_a_source(model, tmp_path):
    kinds = ("Q4_K", "Q6_K", "IQ4_XS", "MXFP4", "NVFP4", "Q5_1", "BF16")
    types = dict(
        zip(("*attn_q*", "*attn_k*", "*attn_v*", "*attn_output*", "*gate*", "*up*", "*down*"), kinds, strict=True)
    )
    wide = build_tiny("qwen3-wide", tmp_path / "tiny")
    source = write_tiny_quant_gguf(
        wide, tmp_path / "source.gguf", {key: gguf.GGMLQuantizationType[kind] for key, kind in types.items()}
    )
    quantize(tmp_path / "source.gguf", tmp_path / "out.gguf", "Q8_0")
    runs(tmp_path / "out.gguf", source, 0.03)
    quantize(tmp_path / "source.gguf", tmp_path / "out", "affine-8b")
    runs(tmp_path / "out", source, 0.03)


def test_tensor_that_is_not_finite_is_named_and_nothing_is_left(model, tmp_path):
    folder = tmp_path / "source"
    folder.mkdir()
    for path in model.directory.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    arrays = load_file(folder / "model.safetensors")
    arrays["model.layers.1.mlp.up_proj.weight"][7, 3] = float("inf")
    save_file(arrays, folder / "model.safetensors")
    for name, out in (("Q4_K_M", "out.gguf"), ("affine-4b", "out"), ("Q4_K_M", "other.gguf")):
        matches = ["*up*=keep"] if out == "other.gguf" else []
        with pytest.raises(NumericalError, match=r"tensor .*(ffn_up|up_proj).weight: .*"):
            quantize(folder, tmp_path / out, name, *matches)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_file_that_would_be_read_otherwise_than_planned_is_told(model, tmp_path, monkeypatch):
    """Without its entry a module of 4 bits in groups of 32 looks like one of 2 bits in groups of 64."""
    plain = ("quantization", {"group_size": 64, "bits": 4, "mode": "affine"})
    monkeypatch.setattr("bytefloor.quantize.job.settings", lambda plan: plain)
    with pytest.raises(FileError, match=r"up_proj.weight axis 1 is 512.*what was planned"):
        quantize(model.directory, tmp_path / "out", "affine-4b", "*.up_proj.*=affine-4b-g32")
    monkeypatch.undo()
    monkeypatch.setattr("bytefloor.quantize.job.save_gguf", lambda path, *rest: write_tiny_gguf(model, path))
    with pytest.raises(FileError, match=r"token_embd.weight is read back as F32 .*expected Q8_0"):
        quantize(model.directory, tmp_path / "out.gguf", "Q8_0", "*=Q8_0")
    assert not list(tmp_path.iterdir())


def anonymous_bytes():
    """Memory that is really this process's own: pages of the mapped source do not count, the kernel may drop them."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon")


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's account of memory")
@pytest.mark.parametrize(("name", "out"), [("Q8_0", "out.gguf"), ("FP8", "out")])
def test_a_tensor_larger_than_the_memory_allowed_passes_through(name, out, model, tmp_path):
    """Two matrices of 67 MB in float32, of which an encoder wants several copies, and their output, within 60 MB."""
    folder = tmp_path / "source"
    folder.mkdir()
    n_rows, allowed = 1 << 16, 60 << 20
    config = json.loads((model.directory / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": n_rows}))
    for path in model.directory.glob("token*"):
        (folder / path.name).write_bytes(path.read_bytes())
    arrays = load_file(model.directory / "model.safetensors")
    for key in ("model.embed_tokens.weight", "lm_head.weight"):
        arrays[key] = torch.ones(n_rows, 256, dtype=torch.bfloat16)
    save_file(arrays, folder / "model.safetensors")
    del arrays
    gc.collect()
    start, peak, is_done = anonymous_bytes(), 0, threading.Event()

    def watch():
        nonlocal peak
        while not is_done.wait(0.002):
            peak = max(peak, anonymous_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    quantize(folder, tmp_path / out, name)
    is_done.set()
    watcher.join()
    assert 0 < peak - start < allowed, f"{(peak - start) >> 20} MB"


def test_streamed_arrays_are_those_of_the_library(tmp_path):
    torch.manual_seed(1)
    arrays = {
        "a": torch.randn(7, 5),
        "b": torch.randn(3, 2).bfloat16(),
        "c": torch.randint(0, 255, (4,), dtype=torch.uint8),
        "d": torch.tensor([[1, -2]], dtype=torch.int32),
        "e": torch.randn(2, 2).to(torch.float8_e4m3fn),
    }
    planned = {name: NewArray(array.dtype, tuple(array.shape)) for name, array in arrays.items()}
    stretches = [("a", 4, arrays["a"][4:]), *((name, 0, array) for name, array in arrays.items() if name != "a")]
    stream_safetensors(tmp_path / "x", planned, [*stretches, ("a", 0, arrays["a"][:4])], {"format": "pt"})
    found = load_file(tmp_path / "x")
    assert all(torch.equal(found[name].view(torch.uint8), array.view(torch.uint8)) for name, array in arrays.items())


@pytest.mark.parametrize(
    ("stretches", "words"),
    [
        ([("a", 0, torch.zeros(2, 3))], "array a: 12 of its 36 bytes were not given"),
        ([("a", 2, torch.zeros(2, 3))], "array a: rows from 2 on run over its"),
        ([("a", 0, torch.zeros(3, 3)), ("a", 1, torch.zeros(1, 3))], "array a: rows from 1 on run over"),
        ([("a", 0, torch.zeros(3, 3).half())], "array a: given torch.float16, expected torch.float32"),
    ],
)
def test_arrays_that_are_not_filled_exactly_leave_no_file(stretches, words, tmp_path):
    with pytest.raises(FileError, match=words):
        stream_safetensors(tmp_path / "x", {"a": NewArray(torch.float32, (3, 3))}, stretches, {})
    assert not list(tmp_path.iterdir())


def test_every_format_that_is_offered_has_an_encoder():
    assert all(FORMATS[name].encode is not None for name in GGUF_TYPES)
