"""Quantising in tests: from a path and a recipe to a written model, and what it lost."""

from __future__ import annotations

from pathlib import Path

import torch

from bytefloor.quantize.job import Job, carry_out, prepare
from bytefloor.quantize.target import make_target
from bytefloor.quantize.write import Loss


def quantize(
    source: Path,
    out: Path,
    name: str,
    *matches: str,
    group: int | None = None,
    importances: dict[str, torch.Tensor] | None = None,
) -> tuple[Job, dict[str, Loss]]:
    job = prepare(source, make_target(name, list(matches), group), importances is not None)
    losses: dict[str, Loss] = {}

    def told(loss: Loss, number: int, count: int) -> None:
        losses[loss.name] = loss
        assert (number, count) == (len(losses), len(job.plan.tensors))

    carry_out(job, out, importances or {}, torch.device("cpu"), told)
    return job, losses
