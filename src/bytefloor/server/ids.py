"""Names that no two requests share."""

from __future__ import annotations

import random
import secrets

_SOURCE = random.Random(secrets.randbits(256))
"""They are no secrets: to ask the system for each takes longer than what a request is otherwise told apart by."""


def new_id(n_bytes: int) -> str:
    """So many random bytes, in hexadecimal."""
    return f"{_SOURCE.getrandbits(8 * n_bytes):0{2 * n_bytes}x}"
