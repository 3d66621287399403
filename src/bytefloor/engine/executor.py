"""Whoever computes, as the engine sees it."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from bytefloor.engine.batch import Batch
from bytefloor.engine.batch_loop import BatchLoop
from bytefloor.engine.cache import CachePlan
from bytefloor.engine.decode_loop import DecodeLoop
from bytefloor.model.step import Step


class Executor(Protocol):
    """What the engine needs of whoever computes."""

    step: Step
    plan: CachePlan
    device: torch.device

    @property
    def most_draft_rows(self) -> int:
        """Rows that a step may have of a sequence that decodes, drafts among them, all wanted; 1 for no drafts."""
        ...

    def run(self, batch: Batch) -> Tensor: ...

    def sum_hidden(self, batch: Batch) -> Tensor:
        """Float64 [B, D]: of each sequence the sum over its rows of what the model's head gets."""
        ...

    def make_loop(self) -> DecodeLoop | None:
        """What decodes one sequence without the host in between; None where nothing can."""
        ...

    def make_batch_loop(self) -> BatchLoop | None:
        """The same of several."""
        ...
