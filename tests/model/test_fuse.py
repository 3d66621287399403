"""The one-row list computes the same buffers as the plain one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bytefloor.engine.cache import CachePlan
from bytefloor.engine.reference import ReferenceExecutor
from bytefloor.engine.score import score_chunks
from bytefloor.errors import UnsupportedError
from bytefloor.files.checkpoint import open_checkpoint
from bytefloor.model.config import Rounding
from bytefloor.model.decoder import build_step
from bytefloor.model.families import load_model
from bytefloor.model.fuse import FusedAttention, FusedProduct, fuse_one_row, unfused
from bytefloor.model.step import Step
from tiny import build_tiny, prompt_ids

NAMES = ("llama", "qwen3-untied", "gemma3", "gemma4-unified", "gemma4-31b")
ROUNDING = Rounding(activations="int8_g32", cache="bf16")


def step_of(name: str, root: Path) -> Step:
    model = load_model(open_checkpoint(build_tiny(name, root).directory))
    return build_step(model.config, model.weights, ROUNDING)


@pytest.mark.parametrize("name", [*NAMES, "gemma4-e", "gemma4-e4b"])
def test_replaced_calls_in_fused_order_give_the_same_bits(name: str, tmp_path: Path) -> None:
    step = step_of(name, tmp_path)
    fused = fuse_one_row(step)
    reordered = unfused(step, fused)
    assert sorted(map(id, reordered.calls)) == sorted(map(id, step.calls))
    plan, ids = CachePlan(64, 8, page_size=4), prompt_ids(20)
    found = torch.cat(list(score_chunks(ReferenceExecutor(reordered, plan), ids, 8)))
    expected = torch.cat(list(score_chunks(ReferenceExecutor(step, plan), ids, 8)))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("name", NAMES)
def test_a_layer_is_five_calls(name: str, tmp_path: Path) -> None:
    step = step_of(name, tmp_path)
    fused = fuse_one_row(step)
    n_layers = sum(isinstance(call, FusedAttention) for call in fused)
    assert len(fused) == 5 * n_layers + 3
    assert sum(isinstance(call, FusedProduct) for call in fused) == 4 * n_layers + 1


def test_per_layer_inputs_take_two_calls_and_two_more_a_layer(tmp_path: Path) -> None:
    fused = fuse_one_row(step_of("gemma4-e", tmp_path))
    n_layers = sum(isinstance(call, FusedAttention) for call in fused)
    assert len(fused) == 7 * n_layers + 5
    gates = [call for call in fused if isinstance(call, FusedProduct) and call.factor is not None]
    assert [gate.factor.attributes["index"] for gate in gates if gate.factor] == list(range(n_layers))
    assert all(gate.has_delta and gate.norm is None and gate.glu for gate in gates)


def test_what_has_no_place_in_the_list_is_named(tmp_path: Path) -> None:
    step = step_of("llama", tmp_path)
    odd = replace(step, calls=tuple(call for call in step.calls if call.op.name != "add"))
    with pytest.raises(UnsupportedError, match="where the one-row list expects add"):
        fuse_one_row(odd)
