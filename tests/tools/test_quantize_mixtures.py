"""llama.cpp's rules: counts of published files of Llama's shape, and a published file tensor by tensor."""

from __future__ import annotations

from collections import Counter

import pytest

from bytefloor.quantize.job import prepare
from bytefloor.quantize.mixtures import MIXTURES, Shape, choose, layer_of
from bytefloor.quantize.target import make_target

PARTS = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
LLAMA_31_8B = {
    "Q2_K": {"Q2_K": 129, "Q3_K": 64, "Q4_K": 32, "Q6_K": 1},
    "Q2_K_S": {"Q2_K": 189, "Q4_K": 36, "Q6_K": 1},
    "Q3_K_S": {"Q3_K": 225, "Q6_K": 1},
    "Q3_K_M": {"Q3_K": 129, "Q4_K": 92, "Q5_K": 4, "Q6_K": 1},
    "Q3_K_L": {"Q3_K": 129, "Q5_K": 96, "Q6_K": 1},
    "Q4_K_S": {"Q4_K": 217, "Q5_K": 8, "Q6_K": 1},
    "Q4_K_M": {"Q4_K": 193, "Q6_K": 33},
    "Q5_K_S": {"Q5_K": 225, "Q6_K": 1},
    "Q5_K_M": {"Q5_K": 193, "Q6_K": 33},
    "Q6_K": {"Q6_K": 226},
    "Q4_0": {"Q4_0": 225, "Q6_K": 1},
    "Q4_1": {"Q4_1": 225, "Q6_K": 1},
    "Q5_0": {"Q5_0": 225, "Q6_K": 1},
    "Q5_1": {"Q5_1": 225, "Q6_K": 1},
    "Q8_0": {"Q8_0": 226},
    "IQ4_NL": {"IQ4_NL": 189, "Q5_K": 36, "Q6_K": 1},
    "MXFP4": {"MXFP4": 225, "Q8_0": 1},
}
"""Matrices by type in files of 32 layers with four query heads a value and a head of their own."""


def shape_of(n_layers, n_gqa=4, has_head=True, has_importances=False):
    values = tuple(f"blk.{i}.attn_v.weight" for i in range(n_layers))
    return Shape(n_layers, n_gqa, True, has_head, values, has_importances)


def types(mixture, shape):
    names = [f"blk.{i}.{part}.weight" for i in range(shape.n_layers) for part in PARTS]
    outer = ["token_embd.weight", "output.weight"] if shape.has_head else ["token_embd.weight"]
    return {name: choose(mixture, name, 4096, shape) for name in (*outer, *names)}


@pytest.mark.parametrize("mixture", MIXTURES)
def test_counts_of_a_published_shape(mixture):
    assert Counter(types(mixture, shape_of(32)).values()) == LLAMA_31_8B[mixture]


def test_tied_embedding_gets_what_a_head_gets():
    found = types("Q4_K_M", shape_of(32, has_head=False))
    assert found["token_embd.weight"] == "Q6_K"
    assert types("Q4_K_M", shape_of(32))["token_embd.weight"] == "Q4_K"


def test_head_whose_rows_do_not_fit_its_blocks_is_q8_0():
    assert choose("Q4_K_M", "output.weight", 576, shape_of(32)) == "Q8_0"
    assert choose("Q4_0", "output.weight", 576, shape_of(32)) == "Q6_K"  # and Q8_0 then, as a substitute


def test_few_query_heads_a_value_are_worth_fewer_bits():
    assert Counter(types("Q2_K", shape_of(32, n_gqa=1)).values()) == {"Q2_K": 129, "Q3_K": 96, "Q6_K": 1}


def test_values_of_a_70b_model_get_more():
    found = types("Q3_K_M", shape_of(80, n_gqa=8))
    assert {found[f"blk.{i}.attn_v.weight"] for i in range(80)} == {"Q5_K"}


def test_importances_guard_the_first_down_projections():
    found = types("Q4_0", shape_of(32, has_importances=True))
    early = [name for name, kind in found.items() if kind == "Q4_1"]
    assert sorted(early, key=layer_of) == [f"blk.{i}.ffn_down.weight" for i in range(4)]


def test_plan_of_a_published_file_is_that_file(gemma3_270m_path):
    """All 236 types, those of rows that 256 does not divide included."""
    job = prepare(gemma3_270m_path, make_target("Q4_K_M", [], None))
    assert len(job.plan.tensors) == 236
    assert [p.format_name for p in job.plan.tensors] == [p.tensor.stored.format_name for p in job.plan.tensors]
    assert all(planned.is_copied for planned in job.plan.tensors)
