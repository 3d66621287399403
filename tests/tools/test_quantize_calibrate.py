"""Importances: mean squares of activations as transformers sees them, and what they do to a file."""

from __future__ import annotations

import pytest
import torch

from bytefloor.errors import NumericalError, RequestError
from bytefloor.files.checkpoint import open_checkpoint
from bytefloor.model.families import load_model
from bytefloor.quantize.calibrate import importances, mean_squares
from bytefloor.text.tokenizer import Tokenizer
from quantized import quantize
from tiny import build_tiny, prompt_ids
from tiny_gguf import set_weight

CPU = torch.device("cpu")
WINDOWS = [prompt_ids(20, seed) for seed in (1, 2)] + [prompt_ids(7, 3)]


def seen_by_transformers(model):
    """Mean squares of every linear module's input, over all positions of all windows."""
    found: dict[str, list[torch.Tensor]] = {}

    def hook(name):
        return lambda module, inputs: found.setdefault(name, []).append(inputs[0].reshape(-1, inputs[0].shape[-1]))

    modules = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    handles = [module.register_forward_pre_hook(hook(name)) for name, module in modules.items()]
    with torch.inference_mode():
        for ids in WINDOWS:
            model(input_ids=torch.tensor([ids]), use_cache=False)
    for handle in handles:
        handle.remove()
    return {name: torch.cat(rows).double().square().mean(dim=0) for name, rows in found.items()}


@pytest.mark.parametrize("name", ["llama", "gemma3", "gemma4-e"])
def test_importances_are_mean_squares_of_what_transformers_multiplies(name, tmp_path):
    model = build_tiny(name, tmp_path)
    found = mean_squares(load_model(open_checkpoint(model.directory)), WINDOWS, CPU)
    for module, squares in seen_by_transformers(model.reference).items():
        key = module.removeprefix("model.") + ".weight"
        key = key if key in found else "embed_tokens.weight"  # a tied head
        expected = (squares / squares.mean()).clamp(min=1e-4).float()
        torch.testing.assert_close(found[key], expected, rtol=1e-3, atol=1e-5)
        assert found[key].shape == (squares.shape[0],)
    n_matrices = sum(
        tensor.is_floating_point() and tensor.dim() == 2 for tensor in model.reference.state_dict().values()
    )
    assert len(found) >= n_matrices - 3  # tables of rows are no products


def test_importances_lower_the_error_of_what_they_weigh(tmp_path):
    model = build_tiny("llama-wide", tmp_path / "tiny")
    found = mean_squares(load_model(open_checkpoint(model.directory)), WINDOWS, CPU)
    named = {"blk.1.ffn_down.weight": found["layers.1.mlp.down_proj.weight"]}
    quantize(model.directory, tmp_path / "plain.gguf", "Q3_K", "*=Q3_K")
    quantize(model.directory, tmp_path / "weighted.gguf", "Q3_K", "*=Q3_K", importances=named)
    source = open_checkpoint(model.directory).tensors["layers.1.mlp.down_proj.weight"].decode()
    errors = []
    for path in ("plain.gguf", "weighted.gguf"):
        tensors = open_checkpoint(tmp_path / path).tensors
        difference = tensors["blk.1.ffn_down.weight"].decode() - source
        errors.append(float((difference.square() * named["blk.1.ffn_down.weight"]).sum()))
    assert errors[1] < 0.95 * errors[0]
    plain, weighted = (open_checkpoint(tmp_path / path).tensors for path in ("plain.gguf", "weighted.gguf"))
    same = [
        torch.equal(plain[key].read()["blocks"], weighted[key].read()["blocks"])
        for key in plain
        if "ffn" in key and "norm" not in key
    ]
    assert same.count(False) == 1  # the one that was weighed


def test_matrix_that_saw_only_zeros_counts_all_columns_alike(tmp_path):
    tiny = build_tiny("llama", tmp_path / "tiny")
    name = "model.layers.1.input_layernorm.weight"
    set_weight(tiny.reference, name, torch.zeros_like(tiny.reference.state_dict()[name]))
    tiny.reference.save_pretrained(tiny.directory)
    found = mean_squares(load_model(open_checkpoint(tiny.directory)), WINDOWS, CPU)
    assert torch.equal(found["layers.1.self_attn.q_proj.weight"], torch.ones(128))


def test_text_is_cut_into_windows_that_begin_with_bos(tmp_path, monkeypatch):
    model = load_model(open_checkpoint(build_tiny("llama", tmp_path).directory))
    seen = []
    monkeypatch.setattr("bytefloor.quantize.calibrate.WINDOW", 16)
    monkeypatch.setattr(
        "bytefloor.quantize.calibrate.mean_squares", lambda model, windows, *rest: seen.extend(windows) or {}
    )
    importances(model, "the quick brown fox jumps over the lazy dog", CPU)
    tokenizer = Tokenizer.from_directory(model.checkpoint.directory, model.checkpoint.metadata)
    ids = tokenizer.encode("the quick brown fox jumps over the lazy dog", add_bos=False)
    assert [window[0] for window in seen] == [tokenizer.bos_id] * len(seen)
    assert all(len(window) == 16 for window in seen[:-1])
    assert [id for window in seen for id in window[1:]] == ids


def test_empty_text_and_infinite_activations_are_refused(tmp_path):
    tiny = build_tiny("llama", tmp_path / "tiny")
    model = load_model(open_checkpoint(tiny.directory))
    with pytest.raises(RequestError, match="calibration text is empty"):
        importances(model, "", CPU)
    name = "model.layers.1.mlp.up_proj.weight"
    set_weight(tiny.reference, name, torch.full_like(tiny.reference.state_dict()[name], 3e38))
    tiny.reference.save_pretrained(tiny.directory)
    with pytest.raises(NumericalError, match=r"tensor layers.1.mlp.down_proj.weight: importances hold NaN or infinity"):
        mean_squares(load_model(open_checkpoint(tiny.directory)), WINDOWS, CPU)
