"""tests/gpu/test_eviction.py with a Python twin in place of every kernel: their wiring, and the tests themselves."""

from __future__ import annotations

from engine.test_cases_on_twins import card, make  # noqa: F401
from gpu.test_eviction import *  # noqa: F403
