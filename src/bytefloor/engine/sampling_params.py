"""What a request may ask of the sampler, checked when it is asked. docs/sampling.md has each formula and the order."""

import math
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from bytefloor.errors import RequestError

GREEDY_BELOW = 1e-6
"""A temperature under this takes the best token: dividing by it would only overflow."""

BAN_AT = -100.0
"""OpenAI's convention: a bias of -100 bans. Here it does so exactly."""

_COUNT_MAX = 2**31 - 1
RANGES: dict[str, tuple[type, float, float]] = {
    "temperature": (float, 0, 100),
    "top_k": (int, 0, _COUNT_MAX),
    "top_p": (float, 0, 1),
    "min_p": (float, 0, 1),
    "typical_p": (float, 0, 1),
    "repetition_penalty": (float, 0.01, 100),
    "presence_penalty": (float, -2, 2),
    "frequency_penalty": (float, -2, 2),
    "penalty_window": (int, -1, _COUNT_MAX),
    "dry_multiplier": (float, 0, 100),
    "dry_base": (float, 1, 100),
    "dry_allowed_length": (int, 1, _COUNT_MAX),
    "dry_window": (int, -1, _COUNT_MAX),
    "xtc_probability": (float, 0, 1),
    "xtc_threshold": (float, 0, 1),
    "mirostat_tau": (float, 0, 100),
    "mirostat_eta": (float, 0, 1),
    "seed": (int, 0, 2**64 - 1),
    "n_logprobs": (int, 0, 20),
}
_MAY_BE_NONE = ("mirostat_tau", "seed")


@dataclass(frozen=True)
class SamplingParams:
    """One request's sampling parameters; the defaults are llama.cpp's.

    The two windows count tokens back from the end of the history: 0 counts none, -1 all.
    `dry_breakers` are token sequences that a DRY match never reaches across; the sampler knows no text.
    A `seed` of None is drawn when the sampler is built, which reports it; 0 is a seed like any other.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    penalty_window: int = 64
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_window: int = -1
    dry_breakers: tuple[tuple[int, ...], ...] = ()
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    mirostat_tau: float | None = None
    mirostat_eta: float = 0.1
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    seed: int | None = None
    temperature_first: bool = False
    n_logprobs: int = 0
    logprobs_after: bool = False

    def __post_init__(self) -> None:
        for name, (kind, low, high) in RANGES.items():
            value = getattr(self, name)
            if not (value is None and name in _MAY_BE_NONE):
                check_number(name, value, kind, low, high)
        for name in ("temperature_first", "logprobs_after"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} = {getattr(self, name)!r}: expected true or false")
        # Copies, so that a caller who changes a list or dict later changes nothing here.
        object.__setattr__(self, "logit_bias", _checked_bias(self.logit_bias))
        object.__setattr__(self, "dry_breakers", _checked_breakers(self.dry_breakers))
        self._refuse_what_mirostat_would_ignore()

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    def _refuse_what_mirostat_would_ignore(self) -> None:
        # top_k, top_p and min_p are on by default, so being set there says nothing about what the caller wants.
        for name, is_set in (("typical_p", self.typical_p < 1), ("xtc_probability", self.xtc_probability > 0)):
            if self.mirostat_tau is not None and is_set:
                raise RequestError(
                    f"{name} = {getattr(self, name)!r}: mirostat_tau = {self.mirostat_tau!r} replaces the cuts, "
                    f"so it would be ignored; set one of them"
                )


def make_seed() -> int:
    """A seed for a request that brought none. 53 bits, so that a JSON client can echo it without rounding it."""
    return secrets.randbits(53)


def _is_number(value: object, kind: type) -> bool:
    # bool is an int to Python; top_k = true is still a mistake.
    return isinstance(value, (int, kind)) and not isinstance(value, bool)


def check_number(name: str, value: float, kind: type, low: float, high: float) -> None:
    """RequestError unless value is of the kind (``int``, or ``float``, of which int is one) and within the bounds."""
    # NaN compares false with everything, so the chained comparison refuses it.
    if not _is_number(value, kind) or not low <= value <= high:
        word = "an integer" if kind is int else "a number"
        raise RequestError(f"{name} = {value!r}: expected {word} from {low} to {high}")


def _checked_bias(bias: Mapping[int, float]) -> dict[int, float]:
    if not isinstance(bias, Mapping):
        raise RequestError(f"logit_bias = {bias!r}: expected a mapping from token id to number")
    for token, value in bias.items():
        check_number("logit_bias token id", token, int, 0, _COUNT_MAX)
        check_number(f"logit_bias[{token}]", value, float, -math.inf, 100)
    return dict(bias)


def _checked_breakers(breakers: Iterable[Iterable[int]]) -> tuple[tuple[int, ...], ...]:
    try:
        sequences = tuple(tuple(sequence) for sequence in breakers)
    except TypeError:
        raise RequestError(f"dry_breakers = {breakers!r}: expected sequences of token ids") from None
    for sequence in sequences:
        if not sequence:
            raise RequestError("dry_breakers: found an empty sequence, expected at least one token id in each")
        for token in sequence:
            check_number("dry_breakers token id", token, int, 0, _COUNT_MAX)
    return sequences
