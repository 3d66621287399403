"""Rows that bench measures: where they come from, and how they are shown, each as soon as it is known."""

from __future__ import annotations

import csv
import datetime
import gc
import io
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from bytefloor.engine.stream_limit import StreamLimit, measure_stream_limit
from bytefloor.engine.tensor_peak import measure_tensor_peak
from bytefloor.tools.outputs import check_rows, write_rows

PERCENTAGES = ("share", "share_of_peak", "attention_share", "tok_s_spread", "us_spread")
"""Fields that a table for people shows so."""


@dataclass(frozen=True)
class Measured:
    """A row. None stands for what was not measured. COLUMNS: the fields that a table for people shows."""

    COLUMNS: ClassVar[tuple[str, ...]] = ()

    def cells(self) -> tuple[str, ...]:
        """What the table shows in each column."""
        return tuple(_cell(name, getattr(self, name)) for name in self.COLUMNS)


@dataclass(frozen=True)
class Row(Measured):
    """One measurement of a model. Rates are medians; spread is (largest - smallest) / median. None: not measured.

    batch: sequences that decode together, of all of which tok_s is. sampling: greedy, or sampled with the default
    parameters of ``run``; None for prompts, which give no token. kv: what the cache keeps.
    tflops: of a prompt, 10^12 multiplications and additions a second of products and attention; share_of_peak: of
    peak_tflops, which cuBLAS reached with bf16 in this run. attention_share: what part of a prompt's time the kernels
    of attention take.
    file_bytes: a token's weights and live cache as the file encodes them; moved_bytes: what the device's own layout
    makes of them. host_us: the host's time to start one token. host_memory_gb: of the weights, what kernels read from
    pinned host memory. load_s: from opening the file to ready, kernels in the cache; first_start_s: the same where
    kernels had to be compiled first. executor: kernels, or reference. notes: what the user was told of the model and
    the stream limit.
    """

    COLUMNS: ClassVar = (
        "model", "format", "sampling", "n_prompt", "n_gen", "depth", "batch", "kv", "tok_s", "tok_s_spread", "share",
        "tflops", "share_of_peak", "attention_share", "load_s", "first_start_s", "checksum",
    )  # fmt: skip
    verb: str
    model: str
    format: str
    sampling: str | None
    n_prompt: int
    n_gen: int
    depth: int
    batch: int
    kv: str
    tok_s: float
    tok_s_spread: float | None
    share: float | None
    tflops: float | None
    peak_tflops: float | None
    share_of_peak: float | None
    attention_share: float | None
    file_bytes: int
    moved_bytes: int
    stream_gb_s: float
    host_us: float | None
    load_s: float
    first_start_s: float | None
    capacity: int
    device_memory_gb: float | None
    host_memory_gb: float | None
    checksum: str | None
    executor: str
    notes: tuple[str, ...]
    card: str
    clock_mhz: int | None
    commit: str | None
    date: str


class RowWriter:
    """Prints a row as it comes (JSON, which is one list, at the end) and keeps the file of all rows up to date.

    output: md, json, csv or none. save: a file for all rows as JSON, which the first row replaces.
    """

    def __init__(self, output: str, save: Path | None) -> None:
        self._output, self._save = output, save
        self._rows: list[dict[str, Any]] = []
        if save is not None:
            check_rows(save)

    def add(self, row: Measured) -> None:
        """Show and keep a row."""
        fields = asdict(row)
        self._rows.append(fields)
        if self._save is not None:
            write_rows(self._save, self._rows)
        if self._output == "csv":
            self._print_csv(fields)
        elif self._output == "md":
            if len(self._rows) == 1:
                print("| " + " | ".join(row.COLUMNS) + " |\n|" + "---|" * len(row.COLUMNS))
            print("| " + " | ".join(row.cells()) + " |", flush=True)

    def _print_csv(self, fields: dict[str, Any]) -> None:
        text = io.StringIO()
        lines = csv.writer(text, lineterminator="\n")
        if len(self._rows) == 1:
            lines.writerow(fields)
        lines.writerow(fields.values())
        print(text.getvalue(), end="", flush=True)

    def finish(self) -> None:
        """What can only be printed when all rows are known."""
        if self._output == "json" and self._rows:
            print(json.dumps(self._rows, indent=1))


def _cell(name: str, value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.1%}" if name in PERCENTAGES else str(value)


def say(notices: Sequence[str | None]) -> None:
    """Notes on standard error, which the tables are not on."""
    for notice in notices:
        if notice:
            print(f"note: {notice}", file=sys.stderr)


def measure_limit(device: torch.device) -> StreamLimit:
    """The stream limit, its notice said; the memory it took is free again and does not count as anybody's peak."""
    limit = measure_stream_limit(device)
    say([limit.notice])
    free_memory(device)
    return limit


def measure_peak(device: torch.device) -> float | None:
    """The peak of the tensor cores, 10^12 operations a second; None on a CPU. Its memory is free again too."""
    peak = measure_tensor_peak(device)
    if peak is not None:
        torch._C._cuda_clearCublasWorkspaces()
    free_memory(device)
    return peak


def free_memory(device: torch.device) -> None:
    """Give back what the last model held: the next one is asked whether it fits, and has its own peak."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def spread(values: Sequence[float]) -> float | None:
    """(largest - smallest) / median; None of a single value."""
    return round((max(values) - min(values)) / statistics.median(values), 4) if len(values) > 1 else None


def origin(device: torch.device) -> dict[str, Any]:
    """The fields card, clock_mhz, commit and date."""
    is_cuda = device.type == "cuda"
    return {
        "card": torch.cuda.get_device_name(device) if is_cuda else "cpu",
        "clock_mhz": _clock_mhz(device) if is_cuda else None,
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
    }


def _clock_mhz(device: torch.device) -> int | None:
    """Of the multiprocessors, now; None where it cannot be read."""
    try:
        return int(torch.cuda.clock_rate(device))
    except (RuntimeError, ModuleNotFoundError):
        return None


def _commit() -> str | None:
    """Of the checkout that runs, with a plus where it has changes; None outside one."""
    folder = str(Path(__file__).parent)
    try:
        commit = _git(folder, "rev-parse", "--short", "HEAD")
        return commit + ("+" if _git(folder, "status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(folder: str, *words: str) -> str:
    done = subprocess.run(("git", "-C", folder, *words), capture_output=True, text=True, check=True)
    return done.stdout.strip()


def peak_memory_gb(device: torch.device) -> float | None:
    """The most that tensors took at once, since the model was opened."""
    return round(torch.cuda.max_memory_allocated(device) / 1e9, 3) if device.type == "cuda" else None
