"""Encoders that search for their scales: against ggml's errors, and what they refuse."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from formats_reference import random_floats
from ggml_errors import ERRORS, MATRICES, importances, matrix, rms

from bytefloor import formats
from bytefloor.errors import NumericalError, ShapeError

SEARCHED = (*ERRORS, "Q4_0", "Q4_1", "Q5_0", "Q5_1")
LEGACY = SEARCHED[len(ERRORS) :]


def decoded_by_gguf(name, blocks):
    return gguf.quants.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[name])


@pytest.mark.parametrize("kind", MATRICES)
@pytest.mark.parametrize("name", ERRORS)
def test_error_is_within_two_percent_of_ggml(name, kind):
    """Decoded by the gguf package, so that the layout is no matter of opinion."""
    weights = matrix(kind)
    found = decoded_by_gguf(name, formats.get(name).encode(torch.from_numpy(weights))["blocks"])
    assert rms(found, weights) <= 1.02 * ERRORS[name][kind][0]


@pytest.mark.parametrize("kind", MATRICES)
@pytest.mark.parametrize("name", [name for name in ERRORS if name != "IQ4_NL"])
def test_error_weighted_by_importance_is_within_two_percent_of_ggml(name, kind):
    weights, counts = matrix(kind), importances()
    blocks = formats.get(name).encode_weighted(torch.from_numpy(weights), torch.from_numpy(counts))["blocks"]
    assert rms(decoded_by_gguf(name, blocks), weights, counts) <= 1.02 * ERRORS[name][kind][1]


@pytest.mark.parametrize("name", [name for name in SEARCHED if name != "Q6_K"])
def test_importance_moves_the_error_away_from_what_counts(name):
    weights, counts = matrix("normal"), importances()
    record, w = formats.get(name), torch.from_numpy(weights)
    plain = decoded_by_gguf(name, record.encode(w)["blocks"])
    weighted = decoded_by_gguf(name, record.encode_weighted(w, torch.from_numpy(counts))["blocks"])
    assert rms(weighted, weights, counts) < 0.95 * rms(plain, weights, counts)


@pytest.mark.parametrize("name", SEARCHED)
def test_zeros_equal_values_and_both_signs_survive(name):
    weights = torch.zeros(6, 256)
    weights[1], weights[2] = 0.375, -3.0
    weights[3, ::2] = 1.0
    weights[4, 40], weights[5, 40] = 5.0, -5.0
    record = formats.get(name)
    for blocks in (record.encode(weights), record.encode_weighted(weights, torch.ones(256))):
        found = record.decode(blocks)
        assert not found[0].any()
        # Scales are rounded, to 4 bits in Q2_K; the table of IQ4_NL holds 1 and -10, but no zero.
        bound = weights.abs().amax(dim=1, keepdim=True) * (0.04 if name in ("Q2_K", "IQ4_NL") else 0.002)
        assert ((found - weights).abs() <= bound + 0.008 * weights.abs()).all()


@pytest.mark.parametrize("name", SEARCHED)
def test_rows_do_not_depend_on_their_neighbours(name):
    """A tensor is encoded in pieces of rows: where it is cut must not show."""
    weights = random_floats(3, 700, 512) * 0.02
    record = formats.get(name)
    whole = record.encode_weighted(weights, torch.arange(512.0))["blocks"]
    cut = [record.encode_weighted(part, torch.arange(512.0))["blocks"] for part in weights.split(123)]
    assert torch.equal(whole, torch.cat(cut))


def test_threads_change_nothing():
    weights = random_floats(4, 512, 1024) * 0.02
    record, before = formats.get("Q4_K"), torch.get_num_threads()
    try:
        found = []
        for n_threads in (1, 3):
            torch.set_num_threads(n_threads)
            found.append(record.encode(weights)["blocks"])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*found)


@pytest.mark.parametrize("name", [*ERRORS])
def test_what_cannot_be_stored_is_refused(name):
    record = formats.get(name)
    block = record.block
    with pytest.raises(ShapeError, match=rf"{name}: part weights: .*multiple of {block}, found {block + 16}"):
        record.encode(torch.zeros(2, block + 16))
    with pytest.raises(ShapeError, match=rf"{name}: part importance: expected shape \[{block}\]"):
        record.encode_weighted(torch.zeros(2, block), torch.ones(block - 1))
    weights = random_floats(13, 3, block)
    weights[1, 20] = float("nan")
    with pytest.raises(NumericalError, match=rf"{name}: weights .*row 1"):
        record.encode(weights)
    for too_large in (-1e12, 5e8):  # the second overflows in the search's result, the first already in its sums
        weights[1, 20] = too_large
        with pytest.raises(NumericalError, match=rf"{name}: a scale as fp16 .*row 1"):
            record.encode(weights)


@pytest.mark.parametrize("name", SEARCHED)
def test_weights_too_small_for_a_scale_become_zero(name):
    weights = torch.full((1, 256), 1e-42)
    weights[0, 3] = -3e-42
    record = formats.get(name)
    assert not record.decode(record.encode(weights)).any()
    assert not record.decode(record.encode_weighted(weights, torch.ones(256))).any()


def test_mxfp4_is_byte_equal_to_the_gguf_package():
    weights = random_floats(11, 96, 256) * torch.logspace(-6, 4, 96)[:, None]
    weights[0] = 0
    weights[1] = torch.arange(256) % 32 / 4 - 4  # ties between magnitudes, zeros of both signs
    weights[2] = -weights[1]
    weights[3] = 2.0 ** (torch.arange(256) % 8 - 4).float()
    found = formats.get("MXFP4").encode(weights)["blocks"].numpy()
    np.testing.assert_array_equal(found, gguf.quants.quantize(weights.numpy(), gguf.GGMLQuantizationType.MXFP4))


def test_mxfp4_reaches_the_ends_of_its_scale():
    weights = torch.zeros(2, 32)
    weights[0, 0], weights[1, 0] = 3e38, 1e-44
    decoded = formats.get("MXFP4").decode(formats.get("MXFP4").encode(weights))
    assert decoded[0, 0] == pytest.approx(3e38, rel=0.2)
    assert not decoded[1].any()
