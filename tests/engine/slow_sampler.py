"""A slow, obvious sampler in pure Python, written from docs/sampling.md: what the sampler is tested against.

A vocabulary of 20 or fewer and `logprobs_after` show the whole final distribution through the public interface.
"""

import math
from collections import Counter
from itertools import pairwise

import numpy as np

from bytefloor.engine.sampler import Sampler
from bytefloor.engine.sampling_params import SamplingParams

NEUTRAL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0}


def row(*logits):
    return np.array(logits, np.float32)


def params(**changes):
    return SamplingParams(**(NEUTRAL | changes))


def final(logits, prompt=(), written=(), banned=frozenset(), position=0, **changes):
    """The distribution the token was drawn from, as {id: probability}, and the token."""
    sampler = Sampler(params(n_logprobs=20, logprobs_after=True, **changes), prompt, banned)
    for token in written:
        sampler.accept(token)
    sampled = sampler.sample(np.asarray(logits, np.float32), position)
    return {token: math.exp(logprob) for token, logprob in sampled.top}, sampled.id


def kept(logits, **changes):
    return set(final(logits, **changes)[0])


class Borderline(Exception):
    """A comparison so close that rounding decides it: neither answer is wrong."""


def is_less(a, b):
    if a != b and abs(a - b) < 1e-9 * max(1.0, abs(a), abs(b)):
        raise Borderline
    return a < b


def soft(scores):
    """{id: logit} -> {id: probability}."""
    best = max(scores.values())
    total = sum(math.exp(value - best) for value in scores.values())
    return {token: math.exp(value - best) / total for token, value in scores.items()}


def slow_mass(order, p, mass):
    chosen, total = set(), 0.0
    for token in order:
        chosen.add(token)
        total += p[token]
        if abs(total - mass) < 1e-9:
            raise Borderline
        if total >= mass:
            break
    return chosen


def slow_top_k(scores, k):
    return set(sorted(scores, key=lambda token: (-scores[token], token))[:k])


def slow_typical(scores, mass):
    p = soft(scores)
    entropy = -sum(q * math.log(q) for q in p.values() if q > 0)
    distance = {token: abs(-math.log(q) - entropy) if q > 0 else math.inf for token, q in p.items()}
    ranked = sorted(distance.items(), key=lambda pair: (pair[1], pair[0]))
    for (token, a), (other, b) in pairwise(ranked):
        if scores[token] != scores[other] and a != math.inf and abs(a - b) < 1e-9:
            raise Borderline
    return slow_mass([token for token, _ in ranked], p, mass)


def slow_top_p(scores, mass):
    return slow_mass(sorted(scores, key=lambda token: (-scores[token], token)), soft(scores), mass)


def slow_min_p(scores, share):
    p = soft(scores)
    floor = share * max(p.values())
    return {token for token in scores if not is_less(p[token], floor)}


def slow_xtc(scores, threshold):
    p = soft(scores)
    top = [token for token in scores if p[token] > 0 and not is_less(p[token], threshold)]
    if len(top) < 2:
        return set(scores)
    stays = min(top, key=lambda token: (p[token], token))
    return {token for token in scores if token not in top or token == stays}


def slow_dry(history, window, breakers, multiplier, base, allowed):
    """{id: penalty}: every earlier place, compared backwards with the end, one token at a time."""
    start = 0
    for end in range(1, len(history) + 1):
        if any(end >= len(b) and tuple(history[end - len(b) : end]) == tuple(b) for b in breakers):
            start = end
    if window >= 0:
        cut = max(0, len(history) - window)
        history, start = history[cut:], max(0, start - cut)
    n = len(history)
    longest = {}
    for place in range(1, n):
        length = 0
        while length < min(place, n - start) and history[place - 1 - length] == history[n - 1 - length]:
            length += 1
        if length >= allowed:
            longest[history[place]] = max(length, longest.get(history[place], 0))
    return {token: multiplier * base ** (length - allowed) for token, length in longest.items()}


def last(tokens, window):
    if window < 0:
        return list(tokens)
    return list(tokens)[max(0, len(tokens) - window) :] if window else []


def slow_scores(logits, prompt, written, banned, p):
    scores = {token: float(value) for token, value in enumerate(logits)}
    for token in banned:
        scores.pop(token, None)
    for token, bias in p.logit_bias.items():
        if token in scores:
            scores[token] += bias
            if bias <= -100:
                del scores[token]
    for token in set(last([*prompt, *written], p.penalty_window)):
        if token in scores:
            r = p.repetition_penalty
            scores[token] = scores[token] / r if scores[token] > 0 else scores[token] * r
    for token, count in Counter(last(written, p.penalty_window)).items():
        if token in scores:
            scores[token] -= p.presence_penalty + p.frequency_penalty * count
    if p.dry_multiplier > 0:
        history = [*prompt, *written]
        dry = slow_dry(history, p.dry_window, p.dry_breakers, p.dry_multiplier, p.dry_base, p.dry_allowed_length)
        for token, penalty in dry.items():
            if token in scores:
                scores[token] -= penalty
    return {token: value for token, value in scores.items() if value > -math.inf}


def slow_distribution(logits, prompt, written, banned, p, position):
    scores = slow_scores(logits, prompt, written, banned, p)
    if p.temperature < 1e-6:
        return {min(scores, key=lambda token: (-scores[token], token)): 1.0}

    def temper(scores):
        return {token: value / p.temperature for token, value in scores.items()}

    def cut(scores, chosen):
        return {token: scores[token] for token in scores if token in chosen}

    if p.mirostat_tau is not None:
        scores = temper(scores)
        q = soft(scores)
        best = min(scores, key=lambda token: (-scores[token], token))
        bound = 2 * p.mirostat_tau
        chosen = {token for token in q if q[token] > 0 and not is_less(bound, -math.log2(q[token]))} | {best}
        return soft(cut(scores, chosen))
    if p.temperature_first:
        scores = temper(scores)
    if p.top_k > 0:
        scores = cut(scores, slow_top_k(scores, p.top_k))
    if p.typical_p < 1:
        scores = cut(scores, slow_typical(scores, p.typical_p))
    if p.top_p < 1:
        scores = cut(scores, slow_top_p(scores, p.top_p))
    if p.min_p > 0:
        scores = cut(scores, slow_min_p(scores, p.min_p))
    if slow_uniforms(p.seed, position)[1] < p.xtc_probability:
        scores = cut(scores, slow_xtc(scores, p.xtc_threshold))
    if not p.temperature_first:
        scores = temper(scores)
    return soft(scores)


def slow_draw(distribution, u):
    total = 0.0
    order = sorted(distribution, key=lambda token: (-distribution[token], token))
    for token in order:
        total += distribution[token]
        if abs(total - u) < 1e-9:
            raise Borderline
        if total >= u:
            return token
    return order[-1]


def philox(counter, key):
    """Philox4x64-10 as in the Random123 paper: what a GPU kernel has to compute."""
    c, k, mask = list(counter), list(key), 2**64 - 1
    for _ in range(10):
        a, b = 0xD2E7470EE14C6C93 * c[0], 0xCA5A826395121157 * c[2]
        c = [(b >> 64) ^ c[1] ^ k[0], b & mask, (a >> 64) ^ c[3] ^ k[1], a & mask]
        k = [(k[0] + 0x9E3779B97F4A7C15) & mask, (k[1] + 0xBB67AE8584CAA73B) & mask]
    return c


def slow_uniforms(seed, position):
    return [(word >> 11) / 2**53 for word in philox((1, position, 0, 0), (seed, 0))][:2]
