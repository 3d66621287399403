"""How far one model's predictions are from another's, token by token, with standard errors.

P is the base, Q the model that is measured; both see the same tokens. All in float64. A standard error is that of a
mean over tokens that are taken for independent, and what follows from means has theirs by linear propagation: the
formulas are in docs/perplexity.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Values = npt.NDArray[np.float64]
PERCENTS = (50.0, 90.0, 95.0, 99.0, 99.9)


@dataclass(frozen=True)
class Estimate:
    """error: the standard error; None where a single token cannot tell."""

    value: float
    error: float | None


@dataclass(frozen=True)
class Rows:
    """Of n predictions. divergence: sum of p (ln p - ln q), nats. is_same: whether both find the same token best.

    base_nll, nll: negative log-probabilities of the right token, nats.
    """

    nll: Values
    base_nll: Values
    divergence: Values
    is_same: npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Divergence:
    """kl: mean, nats; percentiles by percent, and the largest. same_best: share of predictions. p_difference: of the
    right token, q - p, its mean and its root mean square. base_perplexity; ratio: of perplexities, the model's to the
    base's; log_ratio: its logarithm; correlation: of the two log-probabilities, None where either never varies."""

    kl: Estimate
    kl_percentiles: dict[str, float]
    kl_largest: float
    same_best: Estimate
    p_difference: Estimate
    p_difference_rms: Estimate
    base_perplexity: Estimate
    ratio: Estimate
    log_ratio: Estimate
    correlation: float | None


def divergence_of(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(P || Q) of each row, nats: [n] of two [n, V] of natural log-probabilities."""
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def mean_of(values: npt.ArrayLike) -> Estimate:
    """Mean, and the root of the variance / (n - 1)."""
    found = np.asarray(values, np.float64)
    return Estimate(float(found.mean()), math.sqrt(_covariance(found, found)) if len(found) > 1 else None)


def perplexity_of(nll: Values) -> Estimate:
    """exp of the mean; its error is that of the mean times itself."""
    mean = mean_of(nll)
    value = math.exp(mean.value)
    return Estimate(value, None if mean.error is None else value * mean.error)


def summarise(rows: Rows) -> Divergence:
    """Of at least one prediction."""
    p, q = np.exp(-rows.base_nll), np.exp(-rows.nll)
    percentiles = np.percentile(rows.divergence, PERCENTS)
    log_ratio = mean_of(rows.nll - rows.base_nll)
    ratio = math.exp(log_ratio.value)
    return Divergence(
        kl=mean_of(rows.divergence),
        kl_percentiles={f"{percent:g}": float(x) for percent, x in zip(PERCENTS, percentiles, strict=True)},
        kl_largest=float(rows.divergence.max()),
        same_best=mean_of(rows.is_same),
        p_difference=mean_of(q - p),
        p_difference_rms=_root_mean_square(q - p),
        base_perplexity=perplexity_of(rows.base_nll),
        ratio=Estimate(ratio, None if log_ratio.error is None else ratio * log_ratio.error),
        log_ratio=log_ratio,
        correlation=_correlation(rows.nll, rows.base_nll),
    )


def _covariance(a: Values, b: Values) -> float:
    """Of the two means."""
    return float(((a - a.mean()) * (b - b.mean())).mean() / (len(a) - 1))


def _correlation(a: Values, b: Values) -> float | None:
    if len(a) < 2:
        return None
    size = math.sqrt(_covariance(a, a)) * math.sqrt(_covariance(b, b))
    return _covariance(a, b) / size if size > 0 else None


def _root_mean_square(values: Values) -> Estimate:
    """The root's error is half the mean's, relative."""
    squares = mean_of(values**2)
    root = math.sqrt(squares.value)
    if squares.error is None:
        return Estimate(root, None)
    return Estimate(root, squares.error / (2 * root) if root > 0 else 0.0)


def compared(log_p: Tensor, best_p: Tensor, base_nll: Tensor, log_q: Tensor, targets: Tensor) -> Rows:
    """Rows of predictions. log_p, log_q: [n, V]. best_p, base_nll, targets: [n]."""
    nll = -log_q.gather(1, targets[:, None])[:, 0]
    return Rows(
        _values(nll),
        _values(base_nll),
        _values(divergence_of(log_p, log_q)),
        (best_p == log_q.argmax(-1)).cpu().numpy(),
    )


def joined(parts: list[Rows]) -> Rows:
    """All of them, one after another."""
    return Rows(
        np.concatenate([part.nll for part in parts]),
        np.concatenate([part.base_nll for part in parts]),
        np.concatenate([part.divergence for part in parts]),
        np.concatenate([part.is_same for part in parts]),
    )


def _values(x: Tensor) -> Values:
    return x.to(torch.float64).cpu().numpy()
