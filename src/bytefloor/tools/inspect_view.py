"""How ``inspect`` looks: tables for people, JSON for programs."""

from __future__ import annotations

import json
import sys

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bytefloor.tools.inspect import Report, shorten

PIPE_WIDTH = 200


def print_json(report: Report, gb_s: float) -> None:
    """The whole report on standard output. Bytes that are no UTF-8 become escapes."""
    print(json.dumps(report.to_json(gb_s), indent=2, default=str))


def print_report(report: Report, gb_s: float, lists_tensors: bool) -> None:
    """Metadata, formats and the floor; every tensor where asked for."""
    # Into a pipe nothing is folded: whoever reads it there wants whole lines.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_WIDTH)
    console.print(f"[bold]{escape(report.path)}[/bold] ({report.container})")
    for notice in report.notices:
        console.print(f"note: {escape(notice)}")
    if report.refusal:
        console.print(f"[bold]cannot be run:[/bold] {escape(report.refusal)}")
    _print_pairs(console, "model", report.architecture.items())
    _print_pairs(console, "metadata", ((key, shorten(value)) for key, value in report.metadata.items()))
    _print_formats(console, report)
    if lists_tensors:
        _print_tensors(console, report)
    if report.token_bytes is not None:
        _print_floor(console, report, gb_s)


def _print_pairs(console: Console, title: str, pairs: object) -> None:
    table = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 2))
    for key, value in pairs:  # type: ignore[attr-defined]
        printable = str(value).encode("utf-8", errors="backslashreplace").decode()
        table.add_row(str(key), escape(printable))
    if table.row_count:
        console.print(table)


def _print_formats(console: Console, report: Report) -> None:
    table = Table(title="formats", title_justify="left", box=None, padding=(0, 2))
    for heading in ("format", "tensors", "weights", "bytes", "bits per weight"):
        table.add_column(heading, justify="left" if heading == "format" else "right")
    for row in report.formats:
        table.add_row(
            row.name, f"{row.n_tensors}", f"{row.n_weights:,}", f"{row.n_bytes:,}", f"{row.bits_per_weight:.3f}"
        )
    n_bits = 8 * report.n_bytes / max(1, report.n_weights)
    table.add_row("all", str(len(report.tensors)), f"{report.n_weights:,}", f"{report.n_bytes:,}", f"{n_bits:.3f}")
    console.print(table)


def _print_tensors(console: Console, report: Report) -> None:
    table = Table(title="tensors", title_justify="left", box=None, padding=(0, 2))
    for heading in ("name", "shape", "format", "bytes"):
        table.add_column(heading, justify="right" if heading == "bytes" else "left")
    for tensor in report.tensors:
        shape = " x ".join(map(str, tensor.shape)) or "scalar"
        table.add_row(escape(tensor.name), shape, tensor.format_name, f"{tensor.n_bytes:,}")
    console.print(table)


def _print_floor(console: Console, report: Report, gb_s: float) -> None:
    assert report.token_bytes is not None
    needed, gb = report.weight_bytes + report.cache_bytes, 1e9
    milliseconds = report.token_bytes / gb_s / 1e6
    pairs = [
        ("at a context of", f"{report.context:,} positions"),
        ("a token must read", f"{report.token_bytes:,} bytes (weights as stored, cache {report.kv})"),
        (f"floor at {gb_s:,.0f} GB/s", f"{milliseconds:.3f} ms, {report.floor_tok_s(gb_s):,.1f} tok/s"),
        (
            "memory needed",
            f"{needed / gb:.2f} GB ({report.weight_bytes / gb:.2f} weights as stored, "
            f"{report.cache_bytes / gb:.2f} cache {report.kv})",
        ),
        ("without kernels", f"{report.reference_bytes / gb:.2f} GB (weights and cache as float32)"),
    ]
    if report.per_layer_bytes:
        where = "in pinned host memory where the device has no room for them"
        pairs.append(("per-layer embeddings", f"{report.per_layer_bytes / gb:.2f} GB of the weights, {where}"))
    _print_pairs(console, "the floor", pairs)
