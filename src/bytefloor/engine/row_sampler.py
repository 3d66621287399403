"""Sampling of several rows of logits on the device: those requests that need no more than the best few of a row.

Three kernels for all rows: maxima and masses (ops/row_mass.cu), the best few (ops/highest.cu), and the stages of
docs/sampling.md over these (ops/sample_rows.cu). Parameters are numbers in device memory, so that one CUDA graph serves
any requests. Penalties, biases, typical, mirostat, DRY and grammars are the host's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bytefloor.engine.cache import ceil_div
from bytefloor.engine.device_cuts import GROUP
from bytefloor.engine.device_highest import MOST, Launchable, highest_specs
from bytefloor.engine.device_sampler import is_adjusted
from bytefloor.engine.kernels import KernelSpec, spec
from bytefloor.engine.sampler import Sampled, Sampler
from bytefloor.engine.sampling_params import SamplingParams

WORDS = 12
"""64-bit words that describe what is asked of a row; see ops/sample_rows.cu."""
GREEDY, TEMPERATURE_FIRST = 1, 2
"""Flags among them."""
MOST_TOPS = 20
"""Log-probabilities that a request may ask for."""
MASS_BLOCKS, MASS_THREADS = 16, 256
"""Blocks a row of row_mass, and their threads."""
SAMPLE_THREADS = 64
_N_CHECKED = 5
"""Numbers at the start of a record: token, sum of exp(logit - shift), shift, the token's logit, mass drawn from."""


@dataclass(frozen=True)
class Draw:
    """What a request asks of each of its rows: the same words every time, but for the token's absolute position."""

    params: SamplingParams
    words: npt.NDArray[np.uint64]


@dataclass(frozen=True)
class RowLogits:
    """Rows of logits as a head leaves them: float32 [n_planes][rows][V], to be added and capped.

    whole: float32 [rows, V], where they are put; a single plane without a cap may be it.
    """

    planes: Tensor
    n_planes: int
    plane_stride: int
    cap: float
    whole: Tensor


def as_rows(logits: Tensor) -> RowLogits:
    """Contiguous logits [R, V] that need nothing."""
    return RowLogits(logits, 1, 0, 0.0, logits)


class RowSampler:
    """Samples up to ``most_rows`` rows of float32 logits [R, V] at once.

    banned: uint8 [V] on the device, the tokens that nobody may have. ``tokens`` int64 holds what was drawn last.
    """

    def __init__(self, banned: Tensor, most_rows: int, kernels: Mapping[KernelSpec, Launchable]) -> None:
        self._banned, self._device = banned, banned.device
        self.n_vocabulary = banned.shape[0]
        self.n_best, self.n_tops = _n_best(self.n_vocabulary), min(MOST_TOPS, _n_best(self.n_vocabulary))
        self._mass, self._highest, self._sample = (kernels[each] for each in row_sampler_specs(self.n_vocabulary))
        n_groups = ceil_div(self.n_vocabulary, GROUP)

        def room(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(most_rows, *shape, dtype=dtype, device=self._device)

        self._maxima, self._parts = room(n_groups), room(MASS_BLOCKS, 2, dtype=torch.float64)
        self._best, self._ids = room(self.n_best), room(self.n_best, dtype=torch.int64)
        self._asked = room(WORDS, dtype=torch.int64)
        self.tokens = room(dtype=torch.int64)
        self.records = room(_N_CHECKED + 2 * self.n_tops, dtype=torch.float64)

    def can_serve(self, params: SamplingParams) -> bool:
        """Whether the best few of a row are all that the request needs."""
        if is_adjusted(params) or params.dry_multiplier or params.typical_p < 1 or params.mirostat_tau is not None:
            return False
        has_few = params.is_greedy or 0 < params.top_k <= self.n_best
        return has_few and params.n_logprobs <= self.n_tops and not params.logprobs_after

    def ask(self, draws: Sequence[Draw], positions: Sequence[int]) -> None:
        """Bring what is asked of the first rows to the device. positions: of the tokens to be drawn."""
        words = np.stack([draw.words for draw in draws])
        words[:, 1] = positions
        # Pinned memory of torch is given to nobody else before the copy has read it.
        host = torch.from_numpy(words.view(np.int64))
        host = host.pin_memory() if self._device.type == "cuda" else host
        self._asked[: len(draws)].copy_(host, non_blocking=True)

    def start(self, rows: RowLogits) -> None:
        """Draw from all rows, on the current stream."""
        n = rows.whole.shape[0]
        stream = torch.cuda.current_stream(self._device).cuda_stream
        planes = (rows.planes, rows.n_planes, rows.plane_stride, rows.cap)
        self._mass.launch(stream, (MASS_BLOCKS, n), (*planes, rows.whole, self._maxima, self._parts))
        found = (rows.whole, self._maxima, self._best, self._ids, self.n_best, self.n_vocabulary)
        self._highest.launch(stream, (n, 1), found)
        rest = (self._best, self._ids, self._parts, self._banned, self._asked, self.tokens, self.records)
        self._sample.launch(stream, (1, n), rest)

    def read(self, params: SamplingParams, row: Sequence[float]) -> Sampled | None:
        """What a record says. None where logits are not what they should be, or the best few do not tell."""
        if not all(map(math.isfinite, row[:_N_CHECKED])):
            return None
        token, total, shift, logit, _ = row[:_N_CHECKED]
        log_total, n = math.log(total), params.n_logprobs
        logprob = min((logit - shift) - log_total, 0.0)
        if n == 0:
            return Sampled(int(token), logprob, ())
        ids, values = row[_N_CHECKED : _N_CHECKED + n], row[_N_CHECKED + self.n_tops : _N_CHECKED + self.n_tops + n]
        tops = tuple((int(i), min((v - shift) - log_total, 0.0)) for i, v in zip(ids, values, strict=True))
        return Sampled(int(token), logprob, tops)


def draw_of(sampler: Sampler) -> Draw:
    """What a request's sampler asks."""
    params = sampler.params
    flags = GREEDY * params.is_greedy + TEMPERATURE_FIRST * params.temperature_first
    numbers = (
        params.temperature,
        params.top_p,
        math.log(params.min_p) if params.min_p > 0 else -math.inf,
        params.xtc_probability,
        params.xtc_threshold,
    )
    whole = np.array([sampler.seed, 0, 1 if params.is_greedy else params.top_k, flags], np.uint64)
    free = np.zeros(WORDS - len(whole) - len(numbers), np.uint64)
    return Draw(params, np.concatenate((whole, np.array(numbers, np.float64).view(np.uint64), free)))


def _n_best(n_vocabulary: int) -> int:
    return min(MOST, ceil_div(n_vocabulary, GROUP))


def row_sampler_specs(n_vocabulary: int) -> tuple[KernelSpec, KernelSpec, KernelSpec]:
    """Of row_mass, highest and sample_rows."""
    n, n_best = ceil_div(n_vocabulary, GROUP) * GROUP, _n_best(n_vocabulary)
    return (
        spec("row_mass", MASS_THREADS, V=n_vocabulary, N=n, BLOCKS=MASS_BLOCKS, THREADS=MASS_THREADS),
        highest_specs(n_vocabulary)[torch.float32],
        spec("sample_rows", SAMPLE_THREADS, BLOCKS=MASS_BLOCKS, MOST=n_best, TOPS=min(MOST_TOPS, n_best)),
    )


def row_sampler_bytes(n_vocabulary: int, most_rows: int) -> int:
    """What a RowSampler takes on the device."""
    n_groups, n_best = ceil_div(n_vocabulary, GROUP), _n_best(n_vocabulary)
    a_row = 4 * n_groups + 16 * MASS_BLOCKS + 12 * n_best + 8 * (WORDS + 1 + _N_CHECKED + 2 * min(MOST_TOPS, n_best))
    return most_rows * a_row
