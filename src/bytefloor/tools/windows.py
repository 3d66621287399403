"""The windows that a text is scored in: what a model is shown, and which tokens of it count.

Chunks follow each other, and the second half of each counts; strided windows overlap, and the last tokens of each
count. Both as llama.cpp cuts a text, so that numbers compare.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from bytefloor.errors import RequestError

LEAST_CONTEXT = 4


@dataclass(frozen=True)
class Window:
    """ids: what the model is shown, from an empty cache. targets: positions whose tokens it has to predict, ascending,
    none of them 0. name: for people."""

    ids: Sequence[int]
    targets: Sequence[int]
    name: str


class Windows(Protocol):
    """All that a model is asked, in order; can be gone through again."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Window]: ...


@dataclass(frozen=True)
class TextWindows:
    """Windows of equal length over one text, made as they are asked for.

    starts: where each begins. targets: the same in all. bos_id: stands in place of each one's first token, if not None.
    """

    ids: Sequence[int]
    starts: range
    context: int
    targets: range
    bos_id: int | None

    def __len__(self) -> int:
        return len(self.starts)

    def __iter__(self) -> Iterator[Window]:
        for number, start in enumerate(self.starts, 1):
            ids = list(self.ids[start : start + self.context])
            if self.bos_id is not None:
                ids[0] = self.bos_id
            yield Window(ids, self.targets, f"window {number}, from token {start} of the text on")


def cut_in_chunks(ids: Sequence[int], context: int, bos_id: int | None) -> TextWindows:
    """Whole chunks, one after another; the rest of the text is left out. Positions from context // 2 + 1 on count.

    RequestError for a text that is shorter than a chunk, or a context in which nothing counts.
    """
    _check_context(context)
    _check_length(ids, context)
    starts = range(0, len(ids) // context * context, context)
    return TextWindows(ids, starts, context, range(context // 2 + 1, context), bos_id)


def cut_with_stride(ids: Sequence[int], context: int, stride: int, bos_id: int | None) -> TextWindows:
    """A window every ``stride`` tokens, as long as one more token follows it; its last ``stride`` positions count.

    RequestError for a text without a window, or a stride that no window has room for.
    """
    _check_context(context)
    if not 1 <= stride < context:
        raise RequestError(f"--stride {stride}: expected 1 to {context - 1}, less than the context")
    _check_length(ids, context + 1)
    starts = range(0, len(ids) - context, stride)
    return TextWindows(ids, starts, context, range(context - stride, context), bos_id)


def _check_context(context: int) -> None:
    if context < LEAST_CONTEXT:
        raise RequestError(f"-c {context}: expected at least {LEAST_CONTEXT}")


def _check_length(ids: Sequence[int], n_needed: int) -> None:
    if len(ids) < n_needed:
        raise RequestError(
            f"the text has {len(ids)} tokens, expected at least {n_needed}: a longer text, or a shorter context (-c)"
        )


def first_windows(windows: TextWindows, n: int | None) -> TextWindows:
    """No more than n of them; None for all."""
    if n is None:
        return windows
    if n < 1:
        raise RequestError(f"--chunks {n}: expected at least 1")
    return TextWindows(windows.ids, windows.starts[:n], windows.context, windows.targets, windows.bos_id)


def digest(windows: Windows) -> str:
    """SHA-256 of all tokens and of which count: equal where the same question is asked."""
    found = hashlib.sha256()
    for window in windows:
        for numbers in (window.ids, window.targets):
            found.update(len(numbers).to_bytes(8, "little"))
            found.update(np.asarray(numbers, "<i4").tobytes())
    return found.hexdigest()
