"""Files that verbs write results to: nothing is lost to a mistyped name, nor to a disk that is full."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bytefloor.errors import FileError


def check_output(path: Path, start: bytes, what: str) -> None:
    """At once, so that a path that cannot be written costs no measurement.

    start: how a file of that kind begins. FileError where something else is, a model for example, which would be lost.
    """
    if path.is_file() and path.stat().st_size:
        with path.open("rb") as file:
            if file.read(len(start)) != start:
                raise FileError(f"{path}: there is something else than {what} already; it is not overwritten")
    if path.is_dir():
        raise FileError(f"{path}: cannot be written: it is a folder")
    if not path.parent.is_dir():
        raise FileError(f"{path}: cannot be written: there is no folder {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise FileError(f"{path}: cannot be written there")


def check_rows(path: Path) -> None:
    """As check_output, for a list of rows in JSON."""
    check_output(path, b"[", "rows")


def write_rows(path: Path, rows: Sequence[Any]) -> None:
    """All of them as a list. What was there before stays until the new list is whole.

    A device or a pipe is written to; it is not replaced by a file.
    """
    text = json.dumps(rows, indent=1) + "\n"
    try:
        if path.exists() and not path.is_file():
            path.write_text(text)
            return
        draft = draft_of(path)
        try:
            draft.write_text(text)
            draft.replace(path.resolve())
        finally:
            draft.unlink(missing_ok=True)
    except OSError as error:
        raise FileError(f"{path}: cannot be written: {error.strerror}") from None


def draft_of(path: Path) -> Path:
    """Where a file is written before it is moved to its place: beside it, under a name that nobody else takes."""
    path = path.resolve()
    return path.with_name(f".{path.name}.{os.getpid()}")
