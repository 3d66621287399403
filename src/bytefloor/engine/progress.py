"""What is told while a model gets ready: lines, and how far a stage has come."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Whoever shows it."""

    def note(self, line: str) -> None:
        """A line that stays."""

    def advance(self, stage: str, done: int, total: int) -> None:
        """``done`` of ``total``: kernels while ``compiling kernels``, bytes of the file while ``loading``."""


class Silent:
    """Shows nothing."""

    def note(self, line: str) -> None:
        """Nothing."""

    def advance(self, stage: str, done: int, total: int) -> None:
        """Nothing."""


COMPILING, LOADING = "compiling kernels", "loading"
