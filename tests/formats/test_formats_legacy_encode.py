"""Encoders of the GGUF types with one scale a block, byte for byte against the gguf package."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from formats_reference import random_floats

from bytefloor import formats
from bytefloor.errors import NumericalError, ShapeError
from bytefloor.formats import legacy

NAMES = [record.name for record in legacy.FORMATS]


def weights_sample() -> torch.Tensor:
    """Many magnitudes, zero blocks, equal blocks, ties of magnitude with both signs, and ties of rounding."""
    weights = random_floats(11, 96, 256) * torch.logspace(-6, 4, 96)[:, None]
    weights[0] = 0
    weights[1] = 0.375
    weights[2] = -3.0
    weights[3, 5], weights[3, 9] = 7.5, -7.5
    weights[4, 9], weights[4, 5] = 7.5, -7.5
    weights[5] = (torch.arange(256) % 32 - 16).float()
    weights[6] = (torch.arange(256) % 32 - 16).float() * 0.5
    weights[7] = torch.arange(256) % 32 - 15.5
    weights[7, ::32] = 127  # a Q8_0 scale of exactly 1, so that every other value is a tie
    weights[8, ::2] = 0
    return weights


@pytest.mark.parametrize("name", NAMES)
def test_encode_is_byte_equal_to_the_gguf_package(name):
    """K16: and so is the round trip."""
    gguf = pytest.importorskip("gguf")
    kind = gguf.GGMLQuantizationType[name]
    weights = weights_sample()
    blocks = formats.get(name).encode(weights)["blocks"]
    expected = gguf.quants.quantize(weights.numpy(), kind)
    np.testing.assert_array_equal(blocks.numpy(), expected)
    decoded = formats.get(name).decode({"blocks": blocks}).numpy()
    np.testing.assert_array_equal(decoded.view(np.uint32), gguf.quants.dequantize(expected, kind).view(np.uint32))


@pytest.mark.parametrize(("name", "n_levels"), [("Q4_0", 16), ("Q4_1", 16), ("Q5_0", 32), ("Q5_1", 32), ("Q8_0", 255)])
def test_round_trip_is_within_a_step(name, n_levels):
    weights = random_floats(12, 8, 64)
    record = formats.get(name)
    decoded = record.decode(record.encode(weights))
    span = 2 * weights.view(8, 2, 32).abs().amax(dim=2, keepdim=True)
    assert ((decoded - weights).view(8, 2, 32).abs() <= 1.02 * span / (n_levels - 1)).all()


@pytest.mark.parametrize("name", NAMES)
def test_encode_refuses_scales_beyond_fp16_and_what_is_not_finite(name):
    weights = random_floats(13, 3, 64)
    weights[1, 40] = -1e8
    with pytest.raises(NumericalError, match=rf"{name}: a scale as fp16 .*row 1"):
        formats.get(name).encode(weights)
    weights[1, 40] = float("nan")
    with pytest.raises(NumericalError, match=rf"{name}: weights .*row 1"):
        formats.get(name).encode(weights)


@pytest.mark.parametrize("name", NAMES)
def test_encode_refuses_columns_that_do_not_fill_blocks(name):
    with pytest.raises(ShapeError, match=rf"{name}: part weights: .*multiple of 32, found 48"):
        formats.get(name).encode(torch.zeros(2, 48))


@pytest.mark.parametrize("name", NAMES)
def test_weights_too_small_for_a_scale_become_zero(name):
    weights = torch.full((1, 32), 1e-42)
    weights[0, 3] = -3e-42
    record = formats.get(name)
    assert not record.decode(record.encode(weights)).any()
