"""The shapes of published models, a few layers deep: the captured graph against the reference on the same card."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from bytefloor.engine.batch import Batch
from bytefloor.engine.cache import CachePlan, SequenceCache, make_pools
from bytefloor.engine.device import DeviceExecutor
from bytefloor.engine.loading import DEVICE_ROUNDING
from bytefloor.engine.reference import Precision, ReferenceExecutor
from bytefloor.engine.synthetic import SHAPES, checkpoint_of
from bytefloor.model.decoder import build_step
from bytefloor.model.families import load_model

LAYERS = {"gemma4-12b": 6, "gemma4-e4b": 12, "llama31-8b": 2, "qwen3-8b": 2, "smollm2-135m": 4, "gemma3-270m": 6}
"""As many as a kind of each layer takes."""
IDS = [(5 + 7 * i) % 200 for i in range(24)]
MOST = 2e-2
"""Keys and values at the border of two bf16 values take either, and layers carry it on; codes alone cost 1e-4."""


@pytest.mark.parametrize("name", list(LAYERS))
def test_logits_of_real_shapes_agree_with_the_reference(name: str) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    shape = replace(SHAPES[name], n_layers=LAYERS[name], n_shared_kv=min(SHAPES[name].n_shared_kv, 2))
    model = load_model(checkpoint_of(name, shape, "Q4_K_M", "cuda"))
    step, plan = build_step(model.config, model.weights, DEVICE_ROUNDING), CachePlan(256, 64)
    found = logits(DeviceExecutor(step, plan), 1)
    torch.cuda.empty_cache()
    expected = logits(ReferenceExecutor(step, plan, device="cuda", precision=Precision(rounds=True)), len(IDS))
    errors = (found - expected).norm(dim=1) / expected.norm(dim=1)
    assert errors[0].item() < MOST / 10, "one position: nothing to attend to"
    assert errors.max().item() < MOST


def logits(executor: DeviceExecutor | ReferenceExecutor, chunk: int) -> Tensor:
    cache = SequenceCache(executor.plan, executor.step.kinds, make_pools(executor.plan, executor.step.kinds))
    rows = []
    for start in range(0, len(IDS), chunk):
        ids, batch = IDS[start : start + chunk], Batch()
        cache.append_rows(batch, ids, range(len(ids)))
        rows.append(executor.run(batch).float().clone())
        cache.commit(len(ids))
    return torch.cat(rows)
