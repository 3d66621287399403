"""From one row of logits to one token. docs/sampling.md is the contract; the order of the stages is `Sampler.sample`.

Candidates are kept as two arrays, ids ascending and their float64 logits; a cut returns the places that stay,
ascending. So a tie goes to the lower place, hence the lower id, and no stage sorts more than it must.
"""

import math
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from bytefloor.engine.penalties import Floats, Ids, Penalties
from bytefloor.engine.sampling_params import BAN_AT, SamplingParams, make_seed
from bytefloor.errors import NumericalError, RequestError, ShapeError
from bytefloor.text.tokenizer import Tokenizer

Cut = Callable[[Floats], Ids]

_PART = 16_384


# Not frozen: there is one for every token, and frozen ones take three times as long to make.
@dataclass(slots=True)
class Sampled:
    """A token, its natural log-probability, and the `n_logprobs` best tokens with theirs, descending.

    The log-probabilities are the model's own (before bans, penalties, temperature) unless `logprobs_after`.
    """

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def never_sampled(tokenizer: Tokenizer, vocabulary_size: int) -> frozenset[int]:
    """Suppressed tokens, and rows of the table beyond the last token, which nobody could read."""
    return tokenizer.suppressed_ids | frozenset(range(tokenizer.n_tokens, vocabulary_size))


class Sampler:
    """One request's sampler: its seed, the tokens so far, mirostat's running bound ``mu``.

    Speculation needs no undo: sample the rows one after another and stop at the first that differs from the draft.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        banned_ids: AbstractSet[int] | npt.NDArray[np.bool_] = frozenset(),
    ) -> None:
        self.params = params
        self.seed = make_seed() if params.seed is None else params.seed
        self.banned_ids = _as_ids(banned_ids)
        self._bias_ids = np.fromiter(params.logit_bias.keys(), np.int64, len(params.logit_bias))
        bias = np.fromiter(params.logit_bias.values(), np.float64, len(params.logit_bias))
        self._bias = np.where(bias <= BAN_AT, -np.inf, bias)
        self._penalties = Penalties(params, prompt_ids)
        self._largest_prompt_id = max(prompt_ids, default=-1)
        self._n_vocabulary: int | None = None
        self._cuts = _cuts(params)
        self.mu = 2 * params.mirostat_tau if params.mirostat_tau is not None else math.inf

    def sample(
        self, logits: npt.NDArray[np.floating], position: int, allowed: npt.NDArray[np.bool_] | None = None
    ) -> Sampled:
        """The token for absolute `position`, which is also accepted. A refusal changes nothing.

        allowed: [n] bool, the tokens that a grammar lets through; rows from n on are nobody's and never taken.
        """
        self._check(logits, position)
        scores = logits.astype(np.float64)
        self._adjust(scores)
        if allowed is not None:
            _keep(scores, allowed)
        u_token, u_xtc = uniforms(self.seed, position)
        ids, tempered = self._candidates(scores, u_xtc)
        log_p = _log_softmax(tempered)
        place = int(smallest_set(tempered, np.exp(log_p), u_token)[-1])
        self._learn(float(log_p[place]))
        token = int(ids[place])
        self.accept(token)
        if self.params.logprobs_after:
            return Sampled(token, float(log_p[place]), _best(ids, log_p, (0.0, 0.0), self.params.n_logprobs))
        return self._own(logits, token)

    def force(self, logits: npt.NDArray[np.floating], position: int, id: int) -> Sampled:
        """As `sample` where only this token is left to choose, bans and penalties or not; mirostat's bound stays."""
        self._check(logits, position)
        self.accept(id)
        if self.params.logprobs_after:
            return Sampled(id, 0.0, ((id, 0.0),) if self.params.n_logprobs else ())
        return self._own(logits, id)

    def _own(self, logits: npt.NDArray[np.floating], token: int) -> Sampled:
        """With the model's own log-probabilities."""
        shift, log_total = _normaliser(logits)
        logprob = min(0.0, (float(logits[token]) - shift) - log_total)
        return Sampled(token, logprob, _best(None, logits, (shift, log_total), self.params.n_logprobs))

    def accept(self, id: int) -> None:
        """Appends a token chosen elsewhere (teacher forcing, a draft) to the history; mirostat's bound stays."""
        if id < 0 or (self._n_vocabulary is not None and id >= self._n_vocabulary):
            raise RequestError(f"token id {id}: expected 0 to {(self._n_vocabulary or 2**31) - 1}")
        self._penalties.add(id)
        if self._n_vocabulary is None:
            self._largest_prompt_id = max(self._largest_prompt_id, id)

    def _check(self, logits: npt.NDArray[np.floating], position: int) -> None:
        if logits.ndim != 1 or logits.size == 0 or logits.dtype not in (np.float32, np.float64):
            raise ShapeError(f"logits: expected [V] float32, found {list(logits.shape)} {logits.dtype}")
        if not 0 <= position < 2**64:
            raise RequestError(f"position = {position}: expected 0 to 2**64 - 1")
        self._check_vocabulary(logits.size)
        # One pass finds all three: a NaN or an infinity anywhere is the maximum.
        best = float(logits.max())
        if math.isnan(best):
            n_nan = int(np.isnan(logits).sum())
            raise NumericalError(f"logits at position {position}: {n_nan} of {logits.size} are NaN")
        if best == math.inf:
            n_inf = int(np.isposinf(logits).sum())
            raise NumericalError(f"logits at position {position}: {n_inf} of {logits.size} are +inf")
        if best == -math.inf:
            raise NumericalError(f"logits at position {position}: all {logits.size} are -inf")

    def _check_vocabulary(self, n_vocabulary: int) -> None:
        if n_vocabulary == self._n_vocabulary:
            return
        if self._n_vocabulary is not None:
            raise ShapeError(f"logits: axis V was {self._n_vocabulary} for this request, found {n_vocabulary}")
        largest_biased = int(self._bias_ids.max(initial=-1))
        for what, largest in (("logit_bias", largest_biased), ("the prompt", self._largest_prompt_id)):
            if largest >= n_vocabulary:
                raise RequestError(f"{what} names token id {largest}: expected 0 to {n_vocabulary - 1}")
        self._n_vocabulary = n_vocabulary
        # Banning what the model has no row for is no mistake: tokenizer and embedding often differ in size.
        self.banned_ids = self.banned_ids[self.banned_ids < n_vocabulary]

    def _adjust(self, scores: Floats) -> None:
        """Bans, bias, penalties, in place."""
        scores[self.banned_ids] = -np.inf
        scores[self._bias_ids] += self._bias
        self._penalties.apply(scores)

    def _candidates(self, scores: Floats, u_xtc: float) -> tuple[Ids, Floats]:
        """The ids that may be drawn, ascending, and their logits divided by the temperature; -inf has no chance."""
        params = self.params
        if scores.max() == -np.inf:
            raise RequestError("banned ids, logit_bias and grammar leave no token to choose from")
        if params.is_greedy:
            # No cut may change this: typical and XTC would remove the best token.
            best = np.array([scores.argmax()])
            return best, scores[best]
        if params.temperature_first or params.mirostat_tau is not None:
            scores = scores / params.temperature
        ids: Ids | None = None
        for cut in self._cuts_now(u_xtc):
            kept = cut(scores)
            ids, scores = kept if ids is None else ids[kept], scores[kept]
        if not params.temperature_first and params.mirostat_tau is None:
            scores = scores / params.temperature
        return np.arange(len(scores)) if ids is None else ids, scores

    def _cuts_now(self, u_xtc: float) -> list[Cut]:
        params = self.params
        if params.mirostat_tau is not None:
            return [partial(keep_unsurprising, bits=self.mu)]
        if u_xtc < params.xtc_probability:
            return [*self._cuts, partial(drop_top_choices, threshold=params.xtc_threshold)]
        return self._cuts

    def _learn(self, log_p: float) -> None:
        """Mirostat 2: moves the bound against the error in surprise, in bits."""
        params = self.params
        if params.mirostat_tau is not None and not params.is_greedy:
            self.mu -= params.mirostat_eta * (-log_p / math.log(2) - params.mirostat_tau)


def _keep(scores: Floats, allowed: npt.NDArray[np.bool_]) -> None:
    """Everything else to -inf, in place."""
    n = min(len(allowed), len(scores))
    np.putmask(scores[:n], ~allowed[:n], -np.inf)
    scores[n:] = -np.inf


def uniforms(seed: int, position: int) -> tuple[float, float]:
    """Two numbers in [0, 1), for the token and for XTC's coin, from (seed, position) alone.

    One block of Philox4x64-10 with key (seed, 0) and counter (1, position, 0, 0), low word first. numpy counts up
    before the first block, hence the 1. Output words 0 and 1 are used, 2 and 3 are free; u = (word >> 11) * 2^-53.
    """
    words = np.random.Philox(key=seed, counter=int(position) << 64).random_raw(2)
    token, coin = ((int(word) >> 11) * 2.0**-53 for word in words)
    return token, coin


def keep_top_k(logits: Floats, k: int) -> Ids:
    """The k largest."""
    return np.sort(highest(logits, k))


def keep_typical(logits: Floats, mass: float) -> Ids:
    """The smallest set of mass `mass` whose surprise is nearest to the entropy."""
    log_p = _log_softmax(logits)
    p = np.exp(log_p)
    is_possible = p > 0
    entropy = -float(np.dot(p[is_possible], log_p[is_possible]))
    return np.sort(smallest_set(-np.abs(-log_p - entropy), p, mass))


def keep_top_p(logits: Floats, mass: float) -> Ids:
    """The smallest set of mass `mass`, largest first."""
    return np.sort(smallest_set(logits, np.exp(_log_softmax(logits)), mass))


def keep_min_p(logits: Floats, share: float) -> Ids:
    """All with at least `share` of the largest probability; a ratio of probabilities needs no normaliser."""
    return np.flatnonzero(logits >= logits.max() + math.log(share))


def drop_top_choices(logits: Floats, threshold: float) -> Ids:
    """XTC: of those with probability `threshold` or more, only the least probable stays, the lowest id among equals."""
    p = np.exp(_log_softmax(logits))
    # A threshold of 0 must not count the banned among the choices, or a banned one would be all that stays.
    is_top = (p >= threshold) & (p > 0)
    top = np.flatnonzero(is_top)
    if len(top) > 1:
        is_top[top[np.argmin(p[top])]] = False
        return np.flatnonzero(~is_top)
    return np.arange(len(p))


def keep_unsurprising(logits: Floats, bits: float) -> Ids:
    """Mirostat 2: all whose surprise -log2 p is at most `bits`, and the best one whatever it is."""
    log2_p = _log_softmax(logits) / math.log(2)
    kept = log2_p >= -bits
    kept[logits.argmax()] = True
    return np.flatnonzero(kept)


def smallest_set(score: Floats, weight: Floats, mass: float) -> Ids:
    """Places by descending score, ties by place, up to the one whose running weight first reaches `mass`; at least one.

    If rounding keeps the total under `mass`, it ends at the last place that added to the total.
    """
    n = 64
    while True:
        order = highest(score, n)
        running = np.cumsum(weight[order])
        if len(order) < n or n >= score.size:
            mass = min(mass, float(running[-1]))
        if running[-1] >= mass:
            return order[: int(np.searchsorted(running, mass)) + 1]
        # Growing by 16 and starting over gives the very sums of one full sort, and is rarely needed twice.
        n *= 16


def highest(score: npt.NDArray[np.floating], n: int) -> Ids:
    """The places of the n highest scores above -inf, descending, ties by place; fewer if there are no more."""
    bound = _lower_bound(score, n) if n < score.size else -math.inf
    near = np.flatnonzero(score >= bound if bound > -math.inf else score > bound)
    return near[_descending(score[near])][:n]


def _lower_bound(score: npt.NDArray[np.floating], n: int) -> float:
    """A number that at least n scores reach, close to the n-th highest.

    Each of `n_columns` groups reaches its maximum, so the n-th highest maximum will do. That is one pass with next to
    no memory: a new array of 262,144 numbers costs more in page faults than the arithmetic on it.
    """
    n_columns = score.size // 64
    if n > n_columns // 4:
        return float(np.partition(score, score.size - n)[score.size - n])
    maxima = score[: 64 * n_columns].reshape(64, n_columns).max(axis=0)
    return float(np.partition(maxima, n_columns - n)[n_columns - n])


def _descending(score: npt.NDArray[np.floating]) -> Ids:
    """A stable descending argsort; for many scores five times as fast, by numpy's vectorised unstable one."""
    if len(score) <= 256:
        return np.argsort(-score, kind="stable")
    order = np.argsort(-score)
    ranked = score[order]
    is_same = ranked[1:] == ranked[:-1]
    if is_same.any():
        run = np.cumsum(np.concatenate([[False], ~is_same]))
        tied = np.flatnonzero(np.concatenate([is_same, [False]]) | np.concatenate([[False], is_same]))
        order[tied] = order[tied][np.lexsort((order[tied], run[tied]))]
    return order


def _cuts(params: SamplingParams) -> list[Cut]:
    """Those that are switched on, in the documented order."""
    cuts: list[Cut] = []
    if params.top_k > 0:
        cuts.append(partial(keep_top_k, k=params.top_k))
    if params.typical_p < 1:
        cuts.append(partial(keep_typical, mass=params.typical_p))
    if params.top_p < 1:
        cuts.append(partial(keep_top_p, mass=params.top_p))
    if params.min_p > 0:
        cuts.append(partial(keep_min_p, share=params.min_p))
    return cuts


def _best(
    ids: Ids | None, scores: npt.NDArray[np.floating], normaliser: tuple[float, float], n: int
) -> tuple[tuple[int, float], ...]:
    """The n highest of `scores` and their log-probabilities, descending; a place is its own id without `ids`."""
    if n == 0:
        return ()
    order = highest(scores, n)
    named = order if ids is None else ids[order]
    logprobs = np.minimum((scores[order].astype(np.float64) - normaliser[0]) - normaliser[1], 0.0)
    return tuple(zip(named.tolist(), logprobs.tolist(), strict=True))


def _normaliser(logits: npt.NDArray[np.floating]) -> tuple[float, float]:
    """(a, b) such that log p = (logit - a) - b, in float64 whatever the input. a + b would round b away at 1e30.

    In parts that stay in the cache, see `_lower_bound`.
    """
    best = float(logits.max())
    parts = (logits[start : start + _PART] for start in range(0, len(logits), _PART))
    total = sum(float(np.exp(np.subtract(part, best, dtype=np.float64)).sum()) for part in parts)
    return best, math.log(total)


def _log_softmax(logits: Floats) -> Floats:
    best, log_total = _normaliser(logits)
    return (logits - best) - log_total


def _as_ids(banned: AbstractSet[int] | npt.NDArray[np.bool_]) -> Ids:
    if isinstance(banned, np.ndarray):
        if banned.dtype != np.bool_ or banned.ndim != 1:
            raise ShapeError(f"banned_ids: expected a mask [V] bool, found {list(banned.shape)} {banned.dtype}")
        return np.flatnonzero(banned)
    ids = np.array(sorted(banned), np.int64)
    if ids.size and ids[0] < 0:
        raise RequestError(f"banned_ids: found token id {ids[0]}, expected 0 or more")
    return ids
