"""A sampler of rows on a device beside the host's: what tests of both kinds of device share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from bytefloor.engine.kernels import KernelSpec
from bytefloor.engine.row_sampler import RowSampler, as_rows, draw_of
from bytefloor.engine.sampler import Sampled, Sampler
from bytefloor.engine.sampling_params import SamplingParams

ASKED = {
    "defaults": {},
    "greedy": {"temperature": 0.0},
    "temperature first": {"temperature_first": True, "temperature": 1.6, "top_p": 0.9},
    "top_k 1": {"top_k": 1},
    "top_k 60": {"top_k": 60, "temperature": 1.5, "top_p": 1.0, "min_p": 0.0},
    "top_p 0": {"top_p": 0.0},
    "min_p": {"top_p": 1.0, "min_p": 0.2},
    "xtc": {"xtc_probability": 0.5, "xtc_threshold": 0.04, "temperature": 1.2},
    "xtc of all": {"xtc_probability": 1.0, "xtc_threshold": 0.0},
    "log-probabilities": {"n_logprobs": 20, "temperature": 0.7},
}


class Rows:
    """Requests that decode together, each with its sampler on the host."""

    def __init__(
        self, params: Sequence[SamplingParams], n_vocabulary: int, banned: Sequence[int],
        kernels: Mapping[KernelSpec, object], device: str = "cpu",
    ) -> None:  # fmt: skip
        mask = torch.zeros(n_vocabulary, dtype=torch.uint8)
        mask[list(banned)] = 1
        self.sampler = RowSampler(mask.to(device), len(params), kernels)
        self.host = [Sampler(each, [1], frozenset(banned)) for each in params]
        self.device = device

    def by_device(self, logits: np.ndarray, positions: Sequence[int]) -> list[Sampled | None]:
        self.sampler.ask([draw_of(each) for each in self.host], positions)
        self.sampler.start(as_rows(torch.from_numpy(logits).to(self.device)))
        assert self.sampler.tokens.tolist() == self.sampler.records[:, 0].long().tolist()
        records = self.sampler.records.tolist()
        return [self.sampler.read(each.params, row) for each, row in zip(self.host, records, strict=True)]

    def by_host(self, logits: np.ndarray, positions: Sequence[int]) -> list[Sampled]:
        return [each.sample(row, at) for each, row, at in zip(self.host, logits, positions, strict=True)]
