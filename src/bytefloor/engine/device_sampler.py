"""Sampling where the logits are: the stages of docs/sampling.md as torch operations that a CUDA graph can hold.

Which stages there are is decided when a sampler is built; the device never branches. What differs from token to token
(position, history, random numbers, mirostat's bound) is read from tensors. A few scalars are tensors too, since torch
divides by a number on a device by multiplying with its rounded inverse, and the host's sampler divides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bytefloor.engine.cache import ceil_div
from bytefloor.engine.device_cuts import (
    GROUP,
    cut_below,
    cut_surprising,
    cut_top_choices,
    cut_top_p,
    cut_typical,
    descending,
    highest,
)
from bytefloor.engine.device_highest import Highest
from bytefloor.engine.planner import DeviceMemory
from bytefloor.engine.sampler import Sampled, Sampler, uniforms
from bytefloor.engine.sampling_params import BAN_AT, SamplingParams

FORESEEN = 16
"""Positions whose random numbers the host computes and copies at once."""

BYTES_A_TOKEN = 192
"""Of buffers and of what a step makes on the way, at most, for each token of the vocabulary: 60 are kept; a sort of
probabilities has 64 beside them, and on a card once more what it sorts in."""
BYTES_A_POSITION = 24
"""Two random numbers and a token."""

_TINY = 1e-300
"""In place of a random number of 0: the first sum to reach it is that of the first candidate, and of none before it."""

_N_CHECKED = 5
"""Numbers at the start of a record: token, sum of exp(logit - shift), shift, the token's logit, mass drawn from."""


@dataclass(frozen=True)
class _Drawn:
    """token: int64 [1]. The rest float64 [1]: the token's bare logit and one about as high as any, the mass drawn from
    (not finite where nothing can be drawn), and, where it is asked for, the natural logarithm of the token's
    probability in it. tops: the best and their logarithms."""

    token: Tensor
    logit: Tensor
    shift: Tensor
    mass: Tensor
    log_p: Tensor
    tops: tuple[Tensor, ...] = ()


def sampler_bytes(n_vocabulary: int, capacity: int) -> int:
    """The most that a sampler takes on the device, whatever a request asks for."""
    return BYTES_A_TOKEN * n_vocabulary + BYTES_A_POSITION * (capacity + 1)


def supports(params: SamplingParams) -> bool:
    """DRY compares the whole history with its end: no work of fixed shape and small size. The host does it."""
    return params.dry_multiplier == 0


def repeats(params: SamplingParams) -> bool:
    """Whether a token that has been there counts for less, however often it has."""
    return params.penalty_window != 0 and params.repetition_penalty != 1


def counts(params: SamplingParams) -> bool:
    """Whether a token counts for less that has been there, or has been there often."""
    return params.penalty_window != 0 and (params.presence_penalty != 0 or params.frequency_penalty != 0)


def is_adjusted(params: SamplingParams) -> bool:
    """Whether anything but a ban changes a logit."""
    return repeats(params) or counts(params) or bool(params.logit_bias)


class DeviceSampler:
    """One request's sampler on the device of ``memory``, for logits that the step before has left there.

    params: all but the seed are fixed; ``load`` brings a request's seed, history and bound. banned_ids: ascending.
    takes_best: the token that the logits kernel chose is the answer. find_highest: by a kernel, where there is one.
    float64 throughout, as on the host; only bare logits, which change nothing by being widened, are compared as they
    are.
    """

    def __init__(
        self,
        params: SamplingParams,
        banned_ids: npt.NDArray[np.int64],
        memory: DeviceMemory,
        takes_best: bool = False,
        find_highest: Highest = highest,
    ) -> None:
        self.params, self._memory, self._takes_best, self._highest = params, memory, takes_best, find_highest
        self._device = memory.device
        self._n_vocabulary = memory.logits.shape[0]
        self._repeats, self._counts, self._is_adjusted = repeats(params), counts(params), is_adjusted(params)
        self._allocate(banned_ids)
        n_rows = memory.plan.capacity + 1
        self._uniforms = self._floats(n_rows, 2)
        self._host_uniforms = torch.zeros(n_rows, 2, dtype=torch.float64, pin_memory=self._device.type == "cuda")
        self._seed = self._n_foreseen = 0
        self.record = self._floats(self.n_record)

    @property
    def n_record(self) -> int:
        """Numbers that describe one token, float64."""
        return _N_CHECKED + 2 + 2 * self._n_tops

    @property
    def _n_tops(self) -> int:
        """Of a greedy token's own distribution there is nothing to list but the token."""
        is_alone = self.params.logprobs_after and self.params.is_greedy
        return 0 if is_alone else min(self.params.n_logprobs, self._n_vocabulary)

    # --- memory

    def _allocate(self, banned_ids: npt.NDArray[np.int64]) -> None:
        params, v = self.params, self._n_vocabulary
        dtype = torch.float64 if self._is_adjusted else torch.float32
        # Filled up to whole groups with candidates that have no chance.
        n = ceil_div(v, GROUP) * GROUP
        self._ids = torch.arange(n, device=self._device)
        self._scores = torch.full((n,), -torch.inf, dtype=dtype, device=self._device)
        self._bare = torch.full((n,), -torch.inf, device=self._device)
        offsets = torch.zeros(v, dtype=dtype)
        for token, bias in params.logit_bias.items():
            offsets[token] = -math.inf if bias <= BAN_AT else bias
        offsets[torch.from_numpy(banned_ids[banned_ids < v])] = -math.inf
        self._offsets = offsets.to(self._device)
        self._seen, self._written = self._floats(v), self._floats(v)
        self._tokens = torch.zeros(self._memory.plan.capacity + 1, dtype=torch.int64, device=self._device)
        self._n_prompt = torch.zeros(1, dtype=torch.int64, device=self._device)
        self._one, self._zero = self._scalar(1.0), self._scalar(0.0)
        self._ln_2, self._temperature = self._scalar(math.log(2)), self._scalar(params.temperature)
        self._repetition = self._scalar(params.repetition_penalty)
        self._mu = self._scalar(math.inf)

    def _floats(self, *shape: int) -> Tensor:
        return torch.zeros(*shape, dtype=torch.float64, device=self._device)

    def _scalar(self, value: float) -> Tensor:
        return torch.tensor([value], dtype=torch.float64, device=self._device)

    def load(self, sampler: Sampler, ids: Sequence[int], n_prompt: int) -> None:
        """A request's seed, its tokens so far, the first n_prompt of them its prompt, and mirostat's bound."""
        self._seed, self._n_foreseen = sampler.seed, 0
        self._mu.fill_(sampler.mu)
        if self._repeats or self._counts:
            self._n_prompt.fill_(n_prompt)
            self._tokens[: len(ids)].copy_(torch.tensor(ids))
            self._seen.copy_(self._count(ids))
            self._written.copy_(self._count(ids[n_prompt:]))

    def _count(self, ids: Sequence[int]) -> Tensor:
        window = self.params.penalty_window
        within = ids[-window:] if window > 0 else ids
        return torch.bincount(torch.tensor(within, dtype=torch.int64), minlength=self._n_vocabulary).double()

    def foresee(self, position: int) -> None:
        """Have the random numbers for this position on the device before the step that reads them."""
        # Kept where the step finds the position afterwards: the logits kernel has moved it on by one.
        place = position + 1
        if self.params.is_greedy or place < self._n_foreseen:
            return
        self._n_foreseen = end = min(place + FORESEEN, self._uniforms.shape[0])
        drawn = np.array([uniforms(self._seed, at - 1) for at in range(place, end)])
        drawn[:, 0] = np.maximum(drawn[:, 0], _TINY)
        self._host_uniforms.numpy()[place:end] = drawn
        self._uniforms[place:end].copy_(self._host_uniforms[place:end], non_blocking=True)

    # --- on the device

    def step(self) -> None:
        """Draw from the logits: the token becomes state[0] and joins the history; ``record`` tells the host the rest.

        Runs behind the logits kernel, which has put its own best token there and moved the position on.
        """
        if self._takes_best:
            drawn = self._best_of_kernel()
        else:
            place = self._memory.state[1:2].long()
            self._adjust()
            drawn = self._best() if self.params.is_greedy else self._draw(place)
            self._remember(drawn.token, place)
        # NaN, +inf or nothing but -inf in the row, on banned ids or not, leaves no finite sum.
        total = torch.sub(self._memory.logits, drawn.shift).exp_().sum(0, keepdim=True)
        tops = drawn.tops or self._bare_tops()
        checked = (drawn.token.double(), total, drawn.shift, drawn.logit, drawn.mass)
        torch.cat((*checked, drawn.log_p, self._mu, *tops), out=self.record)

    def _best_of_kernel(self) -> _Drawn:
        # The kernel's word for NaN is -1, which must not be looked up.
        token = self._memory.state[:1].clamp_(0, self._n_vocabulary - 1).long()
        logit = self._logit(token)
        return _Drawn(token, logit, logit, logit, self._zero)

    def _best(self) -> _Drawn:
        best, token = self._scores.max(0, keepdim=True)
        value = best.double()
        return _Drawn(token, self._logit(token), self._shift(value), value, self._zero)

    def _logit(self, token: Tensor) -> Tensor:
        return self._memory.logits.index_select(0, token).double()

    def _draw(self, place: Tensor) -> _Drawn:
        uniform = self._uniforms.index_select(0, place)[0]
        values, ids, shift = self._candidates(uniform[1:])
        return self._drawn(values, ids, shift, uniform[:1])

    def _adjust(self) -> None:
        """Bans, bias, penalties. Adding 0 also turns -0 into 0."""
        params, scores = self.params, self._scores[: self._n_vocabulary]
        torch.add(self._memory.logits, self._offsets, out=scores)
        if self._repeats:
            scaled = torch.where(scores > 0, scores / self._repetition, scores * self._repetition)
            scores.copy_(torch.where(self._seen > 0, scaled, scores))
        if self._counts:
            taken = (self._written * params.frequency_penalty).add_(params.presence_penalty)
            scores.sub_(taken.masked_fill_(self._written == 0, 0.0))

    def _shift(self, best: Tensor) -> Tensor:
        """A bare logit about as high as any; adjusted ones say nothing about it."""
        return self._memory.logits.amax(0, keepdim=True).double() if self._is_adjusted else best

    def _candidates(self, coin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Values that may be drawn, tempered, highest first, -inf where cut; their ids; a bare logit near the best."""
        params, values, ids = self.params, self._scores, self._ids
        is_mirostat, is_typical = params.mirostat_tau is not None, params.typical_p < 1
        n = min(params.top_k, self._n_vocabulary) if params.top_k and not is_mirostat else values.shape[0]
        if n < values.shape[0] or not is_typical:
            values, ids = self._highest(values, n)
        values = values.to(torch.float64, copy=True)
        # A number of its own where the first place may be cut.
        shift = self._shift(values.amax(0, keepdim=True) if is_typical or params.xtc_probability > 0 else values[:1])
        if params.temperature_first or is_mirostat:
            values = values / self._temperature
        if is_typical:
            values, ids = self._typical(values, ids)
        if is_mirostat:
            cut_surprising(values, self._mu, self._ln_2)
            return values, ids, shift
        if params.top_p < 1:
            cut_top_p(values, params.top_p)
        if params.min_p > 0:
            cut_below(values, math.log(params.min_p))
        if params.xtc_probability > 0:
            cut_top_choices(values, ids, params.xtc_threshold, coin < params.xtc_probability)
        return values if params.temperature_first else values / self._temperature, ids, shift

    def _typical(self, values: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Its ties go by id too, and equal distances from the entropy lie on both sides: so in the order of ids."""
        ids, order = ids.sort()
        values = values.index_select(0, order)
        cut_typical(values, self.params.typical_p)
        values, order = descending(values)
        return values, ids.index_select(0, order)

    def _drawn(self, values: Tensor, ids: Tensor, shift: Tensor, uniform: Tensor) -> _Drawn:
        params = self.params
        # XTC alone takes the first and leaves others.
        best = values.amax(0, keepdim=True) if params.xtc_probability > 0 else values[:1]
        distances = values - best
        running = distances.exp().cumsum(0)
        mass = running[-1:]
        at = (running[:-1] < mass * uniform).sum(0, keepdim=True)
        token, log_p = ids.index_select(0, at), self._zero
        if params.logprobs_after or params.mirostat_tau is not None:
            log_p = distances.index_select(0, at) - mass.log()
        if params.mirostat_tau is not None:
            self._mu.sub_((-log_p / self._ln_2 - params.mirostat_tau) * params.mirostat_eta)
        tops: tuple[Tensor, ...] = ()
        if params.logprobs_after and self._n_tops:
            # Logits that differ may have one log-probability; then the lower id comes first.
            ids, order = ids.sort()
            values, order = descending((distances - mass.log()).index_select(0, order))
            tops = self._filled(ids.index_select(0, order), values)
        return _Drawn(token, self._logit(token), shift, mass, log_p, tops)

    def _bare_tops(self) -> tuple[Tensor, ...]:
        """The model's own best, as logits."""
        if not self._n_tops:
            return ()
        torch.add(self._memory.logits, 0.0, out=self._bare[: self._n_vocabulary])
        values, ids = self._highest(self._bare, self._n_tops)
        return ids.double(), values.double()

    def _filled(self, ids: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """The n_logprobs first; fewer candidates leave places that say so by -inf."""
        missing = max(0, self._n_tops - ids.shape[0])
        pad = torch.nn.functional.pad
        ids, values = ids[: self._n_tops].double(), values[: self._n_tops]
        return (pad(ids, (0, missing)), pad(values, (0, missing), value=-torch.inf)) if missing else (ids, values)

    def _remember(self, token: Tensor, place: Tensor) -> None:
        state, window = self._memory.state, self.params.penalty_window
        state[:1].copy_(token)
        self._memory.history.index_copy_(0, place - 1, state[:1])
        if not (self._repeats or self._counts):
            return
        self._tokens.index_copy_(0, place, token)
        old = place - window
        forgotten = self._tokens.index_select(0, old.clamp(min=0))
        for counts, first in ((self._seen, 0), (self._written, self._n_prompt)):
            counts.index_add_(0, token, self._one)
            if window > 0:
                counts.index_add_(0, forgotten, (old >= first).double(), alpha=-1)

    # --- on the host

    def read(self, row: Sequence[float]) -> Sampled | None:
        """What a record says. None where logits are not what they should be or nothing was left to choose from."""
        if not all(map(math.isfinite, row[:_N_CHECKED])):
            return None
        token, total, shift, chosen = int(row[0]), row[1], row[2], row[3]
        log_total, log_p, is_after = math.log(total), row[_N_CHECKED], self.params.logprobs_after
        first = _N_CHECKED + 2
        pairs = zip(row[first : first + self._n_tops], row[first + self._n_tops :], strict=True)
        possible = [(int(id), value) for id, value in pairs if value > -math.inf]
        if is_after:
            alone = ((token, 0.0),) if self.params.is_greedy and self.params.n_logprobs else ()
            return Sampled(token, log_p, alone or tuple((id, min(value, 0.0)) for id, value in possible))
        tops = tuple((id, min((value - shift) - log_total, 0.0)) for id, value in possible)
        return Sampled(token, min((chosen - shift) - log_total, 0.0), tops)

    def bound(self, row: Sequence[float]) -> float:
        """Mirostat's bound after this token."""
        return row[_N_CHECKED + 1]
