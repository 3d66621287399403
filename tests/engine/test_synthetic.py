"""Synthetic checkpoints: real shapes, the mixtures that files have, and one value for every read."""

from __future__ import annotations

import pytest
import torch

from bytefloor.engine.synthetic import SHAPES, Shape, checkpoint_of, make_checkpoint
from bytefloor.errors import RequestError
from bytefloor.model.config import Rounding
from bytefloor.model.decoder import build_step
from bytefloor.model.families import load_model
from bytefloor.tools.bench import token_bytes

SMALL = Shape("gemma4", 256, 512, 2, 4, 2, 64, 288, 4096, True, {"attention.sliding_window": 40}, 2, 1, 128)


@pytest.mark.parametrize(
    ("name", "gb"), [("gemma4-12b", 7.36), ("llama31-8b", 4.62), ("qwen3-8b", 4.67)], ids=lambda value: str(value)
)
def test_a_token_of_a_q4_k_m_reads_what_it_reads_of_the_published_files(name: str, gb: float) -> None:
    model = load_model(make_checkpoint(f"synthetic:{name}/Q4_K_M", "cpu"))
    weights, _ = token_bytes(build_step(model.config, model.weights, Rounding()), 0)
    assert weights / 1e9 == pytest.approx(gb, abs=0.006)


@pytest.mark.parametrize("name", list(SHAPES))
@pytest.mark.parametrize("mixture", ["Q4_K_M", "Q8_0", "BF16"])
def test_every_model_and_mixture_is_understood(name: str, mixture: str) -> None:
    model = load_model(make_checkpoint(f"synthetic:{name}/{mixture}", "cpu"))
    assert len(model.config.layers) == SHAPES[name].n_layers


@pytest.mark.parametrize("mixture", ["Q4_K_M", "Q8_0", "BF16"])
def test_reads_agree_and_values_are_finite_with_the_spread_of_trained_ones(mixture: str) -> None:
    checkpoint = checkpoint_of("small", SMALL, mixture, "cpu")
    for name, tensor in checkpoint.tensors.items():
        first = tensor.decode()
        assert torch.equal(first, tensor.decode())
        if len(tensor.shape) == 2:
            assert bool(torch.isfinite(first).all())
            assert 0.3 < first.std().item() * tensor.shape[1] ** 0.5 < 3, name


def test_unknown_names_are_answered_with_the_known_ones() -> None:
    with pytest.raises(RequestError, match=r"expected synthetic:MODEL/MIXTURE of gemma4-12b, .*Q4_K_M"):
        make_checkpoint("synthetic:gpt-5/Q4_K_M", "cpu")
