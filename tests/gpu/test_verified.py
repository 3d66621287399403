"""verify on a card: every launch of small models of all families, and whole runs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bytefloor.engine.device import DeviceExecutor
from bytefloor.engine.loading import DEVICE_ROUNDING
from bytefloor.engine.synthetic import checkpoint_of
from bytefloor.tools.verify import climb, kernel_rungs, plan_of
from bytefloor.tools.verify_report import EQUAL
from bytefloor.tools.verify_runs import check_device_runs
from device_prompts import ids_of
from device_rows import step_of
from engine.test_device_wiring import SHAPES


@pytest.mark.parametrize("kv", ["bf16", "int8", "fp8"])
@pytest.mark.parametrize("family", list(SHAPES))
def test_the_ladder_holds(card: torch.device, family: str, kv: str) -> None:
    step = step_of(checkpoint_of(family, SHAPES[family], "Q4_K_M", card), replace(DEVICE_ROUNDING, cache=kv))
    ids = ids_of(150, below=270)
    executor = DeviceExecutor(step, plan_of(ids, 8), device=card, draft_rows=8)
    lines = list(climb([*kernel_rungs(executor, ids), *check_device_runs(executor, ids)]))
    assert [line for line in lines if line.verdict != EQUAL] == []
