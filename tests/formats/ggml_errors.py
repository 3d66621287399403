"""Matrices that any machine makes alike, and the error that ggml's own quantiser leaves on them.

Recorded once with ``ggml_quantize_chunk`` of ggml 0.25.3, compiled from the source package of llama-cpp-python 0.3.36
and called through ctypes; its blocks were decoded with the gguf package. Errors are root mean squares: plain for
blocks made without importances, weighted by them for blocks made with them.
"""

from __future__ import annotations

import numpy as np

MATRICES = ("normal", "heavy", "uneven", "positive")
"""Trained weights look like the first; tails, groups of different sizes and weights of one sign are harder."""


def matrix(kind: str) -> np.ndarray:
    """float32 [64, 1024]. RandomState, unlike newer generators, promises its numbers for good."""
    rng = np.random.RandomState(MATRICES.index(kind))
    shape = (64, 1024)
    if kind == "heavy":
        return (0.02 * rng.standard_t(4, shape)).astype(np.float32)
    values = rng.standard_normal(shape)
    if kind == "uneven":
        values *= np.exp(rng.standard_normal((64, 64))).repeat(16, axis=1)
    if kind == "positive":
        values = np.abs(values) + 0.5
    return (0.02 * values).astype(np.float32)


def importances() -> np.ndarray:
    """float32 [1024], spread as mean squares of activations are."""
    return np.exp(1.5 * np.random.RandomState(9).standard_normal(1024)).astype(np.float32)


def rms(found: np.ndarray, wanted: np.ndarray, weights: np.ndarray | float = 1.0) -> float:
    return float(np.sqrt(((found - wanted).astype(np.float64) ** 2 * weights).mean()))


# format -> matrix -> (without importances, with them)
ERRORS: dict[str, dict[str, tuple[float, float]]] = {
    "Q2_K": {
        "normal": (5.9334e-03, 7.2760e-03),
        "heavy": (9.7364e-03, 1.1803e-02),
        "uneven": (1.7400e-02, 2.2855e-02),
        "positive": (4.2794e-03, 5.8240e-03),
    },
    "Q3_K": {
        "normal": (3.0066e-03, 4.3508e-03),
        "heavy": (5.1890e-03, 7.7275e-03),
        "uneven": (8.4998e-03, 1.2921e-02),
        "positive": (3.3889e-03, 4.5696e-03),
    },
    "Q4_K": {
        "normal": (1.4212e-03, 2.0534e-03),
        "heavy": (2.4341e-03, 3.5989e-03),
        "uneven": (4.6291e-03, 7.0609e-03),
        "positive": (9.9687e-04, 1.4681e-03),
    },
    "Q5_K": {
        "normal": (7.2079e-04, 1.0706e-03),
        "heavy": (1.2335e-03, 1.9165e-03),
        "uneven": (2.3417e-03, 3.6039e-03),
        "positive": (4.9347e-04, 7.2548e-04),
    },
    "Q6_K": {
        "normal": (3.5605e-04, 5.3423e-04),
        "heavy": (6.4082e-04, 1.0067e-03),
        "uneven": (1.0216e-03, 1.6194e-03),
        "positive": (4.2400e-04, 6.0281e-04),
    },
    "IQ4_NL": {
        "normal": (1.5212e-03, 2.3019e-03),
        "heavy": (2.6344e-03, 4.0207e-03),
        "uneven": (4.6106e-03, 7.1943e-03),
        "positive": (1.9475e-03, 2.9531e-03),
    },
}
