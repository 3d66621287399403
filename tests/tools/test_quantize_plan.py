"""Recipes and plans: names, rules, substitutes, sizes, and what is refused before anything is written."""

from __future__ import annotations

import pytest
import torch

from bytefloor.errors import RequestError
from bytefloor.files.stored import StoredTensor, find_format
from bytefloor.quantize.outgoing import Outgoing, interleaved_order, split_order
from bytefloor.quantize.plan import make_plan
from bytefloor.quantize.target import Rule, make_target


def stored(name, *shape, format_name="BF16"):
    n_weights = torch.Size(shape).numel()
    record = find_format(format_name)
    n_bytes = int(n_weights * record.bits_per_weight) // 8
    return StoredTensor(name, shape, format_name, record, n_bytes, dict)


def tensors(columns=256, source="BF16"):
    names = ("token_embd.weight", "blk.0.attn_q.weight", "blk.0.attn_v.weight", "blk.0.ffn_down.weight")
    matrices = [Outgoing(name, stored(f"own.{name}", 64, columns, format_name=source)) for name in names]
    return [*matrices, Outgoing("blk.0.attn_norm.weight", stored("norm", columns))]


def formats(target, tensors):
    plan = make_plan(target, tensors, 4, True)
    return {planned.name: planned.format_name for planned in plan.tensors}


@pytest.mark.parametrize(
    ("name", "container", "format_name"),
    [
        ("Q4_K_M", "gguf", "Q4_K"),
        ("Q4_K", "gguf", "Q4_K"),
        ("MXFP4", "gguf", "MXFP4"),
        ("affine-4b", "mlx", "affine-4b-g64"),
        ("affine-3b-g32", "mlx", "affine-3b-g32"),
        ("FP4", "own", "FP4-E2M1-g128"),
        ("FP8", "compressed", "FP8-E4M3-row"),
    ],
)
def test_a_format_decides_the_container(name, container, format_name):
    target = make_target(name, [], None)
    assert (target.container, target.format_name) == (container, format_name)


def test_group_is_for_affine_formats_that_name_none():
    target = make_target("affine-4b", ["*.down*=affine-8b", "*up*=affine-8b-g128"], 32)
    assert target.format_name == "affine-4b-g32"
    assert target.rules == (Rule("*.down*", "affine-8b-g32"), Rule("*up*", "affine-8b-g128"))
    with pytest.raises(RequestError, match="--target-group-size 32: only affine"):
        make_target("Q4_K_M", [], 32)
    with pytest.raises(RequestError, match="format affine-4b-g48 cannot be written"):
        make_target("affine-4b", [], 48)


def test_fp8_beside_fp4_is_the_container_of_fp4():
    assert make_target("FP8", ["*down*=FP4"], None).container == "own"
    assert make_target("FP4", ["*down*=FP8"], None).container == "own"


@pytest.mark.parametrize(
    ("name", "matches", "words"),
    [
        ("Q9", [], "format Q9 cannot be written; known: Q4_0"),
        ("IQ4_XS", [], "format IQ4_XS cannot be written"),
        ("BF16", [], "--format BF16: expected a format that quantises"),
        ("Q4_0", ["down"], "--match down: expected PATTERN=FORMAT"),
        ("Q4_0", ["=Q8_0"], "--match =Q8_0: expected PATTERN=FORMAT"),
        ("Q4_0", ["*=affine-8b"], "a file of Q4_0 cannot hold it"),
        ("affine-4b", ["*=Q8_0"], "a file of affine-4b cannot hold it"),
        ("FP4", ["*=affine-8b"], "a file of FP4 cannot hold it"),
    ],
)
def test_recipes_that_make_no_sense_are_refused(name, matches, words):
    with pytest.raises(RequestError) as caught:
        make_target(name, matches, None)
    assert words in str(caught.value)


def test_first_rule_that_fits_counts_under_either_name():
    target = make_target("Q4_K", ["*ffn_down*=keep", "own.*.ffn_*=Q8_0", "*attn_q*=F16", "own.blk.*=Q5_K"], None)
    assert formats(target, tensors()) == {
        "token_embd.weight": "Q4_K",
        "blk.0.attn_q.weight": "F16",
        "blk.0.attn_v.weight": "Q5_K",
        "blk.0.ffn_down.weight": "BF16",
        "blk.0.attn_norm.weight": "F32",
    }


def test_rule_that_fits_nothing_is_refused():
    for pattern in ("*ffn_dwn*", "blk.0.attn_norm.weight"):
        with pytest.raises(RequestError, match=r"fits no matrix of this model; names look like token_embd.weight"):
            make_plan(make_target("Q4_K", [f"{pattern}=Q8_0"], None), tensors(), 4, True)


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        (576, {"Q2_K": "Q4_0", "Q3_K": "Q4_0", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0", "IQ4_NL": "IQ4_NL"}),
        (80, {"Q2_K": "F16", "Q6_K": "F16", "Q8_0": "F16", "MXFP4": "F16", "FP4": "FP8-E4M3-row"}),
        (192, {"affine-4b-g128": "affine-4b-g64", "FP4": "FP8-E4M3-row", "FP8": "FP8-E4M3-row"}),
        (96, {"affine-4b-g128": "affine-4b-g32", "affine-8b-g64": "affine-8b-g32"}),
        (80, {"affine-4b-g64": "BF16"}),
    ],
)
def test_substitutes_are_named(columns, expected):
    for name, found in expected.items():
        target = make_target(name, ["*=" + name] if name in ("Q2_K", "Q6_K", "Q8_0", "MXFP4", "IQ4_NL") else [], None)
        plan = make_plan(target, tensors(columns), 4, True)
        assert plan.tensors[1].format_name == found
        is_same = plan.tensors[1].wanted == found
        assert is_same == (plan.tensors[1] not in plan.substitutions)
        if not is_same:
            assert f"{columns} columns are no multiple of" in plan.tensors[1].why


def test_without_substitutes_the_tensor_is_named():
    target = make_target("Q4_K_M", [], None, has_substitutes=False)
    with pytest.raises(RequestError, match=r"tensor blk.0.attn_q.weight: 576 columns are no multiple of 256, as Q4_K"):
        make_plan(target, tensors(576), 4, True)


def test_bits_count_what_the_file_will_hold():
    plan = make_plan(make_target("Q4_K", [], None), tensors(), 4, True)
    assert plan.n_bytes == 4 * 64 * 144 + 256 * 4
    assert plan.bits_per_weight == pytest.approx(8 * plan.n_bytes / (4 * 64 * 256 + 256))
    fp8 = make_plan(make_target("FP8", [], None), tensors(), 4, True)  # names of GGUF: no table among them
    assert fp8.n_bytes == 4 * (64 * 256 + 64 * 4) + 256 * 2


def test_same_format_is_copied_unless_rows_move():
    same = tensors(source="Q4_K")[0]
    moved = Outgoing("blk.0.attn_q.weight", same.stored, interleaved_order(64, 2))
    plan = make_plan(make_target("Q4_K", [], None), [same, moved], 4, True)
    assert [planned.is_copied for planned in plan.tensors] == [True, False]


def test_kept_tensor_that_the_container_cannot_hold_is_a_substitution():
    plan = make_plan(make_target("affine-4b", ["*attn_q*=keep"], None), tensors(source="Q4_K"), 4, True)
    assert plan.tensors[1].format_name == "BF16"
    assert plan.tensors[1].why == "Q4_K cannot be kept in this container"


def test_orders_of_rows_are_inverse():
    order = interleaved_order(24, 3)
    assert order[:8].tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    assert torch.equal(order[split_order(24, 3)], torch.arange(24))
