"""``quantize``: one model file out of another, with a plan to look at first and the loss of each tensor after."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from bytefloor.engine.loading import choose_device
from bytefloor.errors import RequestError
from bytefloor.quantize.calibrate import importances
from bytefloor.quantize.job import Job, carry_out, prepare, refuse_taken
from bytefloor.quantize.plan import Plan, Planned
from bytefloor.quantize.recipes import substitutes_of
from bytefloor.quantize.target import PLAIN, make_target
from bytefloor.quantize.write import Loss
from bytefloor.tools.models import find_model

PIPE_WIDTH = 200


@dataclass(frozen=True)
class QuantizeOptions:
    """format_name: a format or a mixture. matches: PATTERN=FORMAT, the first that fits counts. group: of affine formats
    that name none. calibration: a text file. has_substitutes: whether a tensor may get another format than asked."""

    format_name: str
    matches: tuple[str, ...] = ()
    group: int | None = None
    calibration: Path | None = None
    has_substitutes: bool = True
    is_dry: bool = False
    json_output: bool = False
    device: str = "auto"


def quantize(source: str | None, out: Path | None, options: QuantizeOptions) -> None:
    """Plan, and unless dry: calibrate, write, check, report. What is refused is refused before anything is written.

    out: may be None for a plan; one that is given is looked at, too.
    """
    if out is None and not options.is_dry:
        raise RequestError("what to write is missing: expected FILE.gguf or a directory's name, or --dry-run")
    target = make_target(options.format_name, list(options.matches), options.group, options.has_substitutes)
    device = choose_device(options.device)
    text = _read_text(options.calibration)
    job = prepare(find_model(source), target, options.calibration is not None)
    if out is not None:
        refuse_taken(job, out)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_WIDTH)
    if not options.json_output:
        _print_plan(console, job, options)
    losses: list[Loss] = []
    if out is not None and not options.is_dry:
        counts = _importances(job, text, device)

        def told(loss: Loss, number: int, count: int) -> None:
            losses.append(loss)
            say_progress(f"{number} of {count}: {loss.name}", is_last=number == count)

        carry_out(job, out, counts, device, told)
    if options.json_output:
        print(json.dumps(report(job, out, losses), indent=2))
    elif out is not None and losses:
        _print_losses(console, job, out, losses)


def _read_text(calibration: Path | None) -> str | None:
    try:
        return None if calibration is None else calibration.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise RequestError(f"--calibrate {calibration}: expected a text in UTF-8") from None


def _importances(job: Job, text: str | None, device: torch.device) -> dict[str, Tensor]:
    """By names in the target; none without a text."""
    if text is None:
        return {}
    found = importances(
        job.model,
        text,
        device,
        lambda done, count: say_progress(f"calibrating: {done} of {count} windows", done == count),
    )
    return {p.name: found[p.tensor.stored.name] for p in job.plan.tensors if p.tensor.stored.name in found}


def say_progress(line: str, is_last: bool) -> None:
    """One line that replaces the one before it, on a terminal only."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{line[:100]}" + ("\r\x1b[K" if is_last else ""))
        sys.stderr.flush()


def report(job: Job, out: Path | None, losses: list[Loss]) -> dict[str, Any]:
    """The plan and, by tensor, the loss, JSON-ready."""
    by_name = {loss.name: loss for loss in losses}
    plan = job.plan
    return {
        "source": str(job.model.checkpoint.path),
        "out": None if out is None else str(out),
        "format": plan.target.mixture or plan.target.format_name,
        "n_bytes": plan.n_bytes,
        "n_weights": plan.n_weights,
        "bits_per_weight": plan.bits_per_weight,
        "notices": list(job.model.checkpoint.notices),
        "substitutions": [
            {"name": p.name, "wanted": p.wanted, "format": p.format_name, "why": p.why} for p in plan.substitutions
        ],
        "error": total_error(plan, losses),
        "tensors": [_tensor_row(planned, by_name.get(planned.name)) for planned in plan.tensors],
    }


def _tensor_row(planned: Planned, loss: Loss | None) -> dict[str, Any]:
    stored = planned.tensor.stored
    row = {
        "name": planned.name,
        "source": stored.name,
        "shape": list(stored.shape),
        "from": stored.format_name,
        "format": planned.format_name,
        "n_bytes": planned.n_bytes,
        "is_copied": planned.is_copied,
    }
    return row if loss is None else row | {"error": loss.error, "largest": loss.largest}


def total_error(plan: Plan, losses: list[Loss]) -> float | None:
    """Of all matrices together, as Loss.error of one; None before anything is written.

    Copied ones count with what they hold; norms do not, whose large values would hide the loss.
    """
    if not losses:
        return None
    together, matrices = Loss("all", ""), {planned.name for planned in plan.tensors if planned.tensor.is_matrix}
    for loss in losses:
        if loss.name in matrices:
            together.difference += loss.difference
            together.square += loss.square
    return together.error


def _print_plan(console: Console, job: Job, options: QuantizeOptions) -> None:
    for notice in job.model.checkpoint.notices:
        console.print(f"note: {escape(notice)}")
    for note in _notes_of(job):
        console.print(f"note: {escape(note)}")
    table = _table("plan", ("name", "shape", "from", "to", "bytes"))
    for planned in job.plan.tensors:
        if planned.tensor.is_matrix and (options.is_dry or planned.why):
            shape = " x ".join(map(str, planned.tensor.shape))
            table.add_row(
                escape(planned.name),
                shape,
                planned.tensor.stored.format_name,
                planned.format_name,
                f"{planned.n_bytes:,}",
            )
    if table.row_count and options.is_dry:
        console.print(table)
    _print_formats(console, job.plan)
    if options.is_dry:
        for planned in job.plan.substitutions:
            words = f"{planned.format_name} for {planned.wanted}: {planned.why}"
            console.print(f"substituted: {escape(planned.name)}: {words}")
    else:
        for line in substitutes_of(job.plan):
            console.print(f"substituted: {escape(line)}")


def _notes_of(job: Job) -> list[str]:
    """What a plan does not show: that a source has lost something already, and that nothing becomes smaller."""
    tensors = [planned.tensor for planned in job.plan.tensors]
    formats = dict.fromkeys(tensor.stored.format_name for tensor in tensors if tensor.is_matrix)
    coded = [name for name in formats if name not in PLAIN]
    notes = []
    if coded:
        notes.append(f"the source is quantised itself ({', '.join(coded)}): losses are against it, not the original")
    n_source = sum(stored.n_bytes for stored in {tensor.stored.name: tensor.stored for tensor in tensors}.values())
    if job.plan.n_bytes >= n_source:
        notes.append(
            f"what is written is no smaller: {job.plan.n_bytes:,} bytes of tensors, the source has {n_source:,}"
        )
    return notes


def _print_formats(console: Console, plan: Plan) -> None:
    table = _table("formats", ("format", "tensors", "weights", "bytes", "bits per weight"))
    for name in dict.fromkeys(planned.format_name for planned in plan.tensors):
        own = [planned for planned in plan.tensors if planned.format_name == name]
        n_weights, n_bytes = sum(p.tensor.n_weights for p in own), sum(p.n_bytes for p in own)
        table.add_row(name, str(len(own)), f"{n_weights:,}", f"{n_bytes:,}", f"{8 * n_bytes / n_weights:.3f}")
    table.add_row(
        "all", str(len(plan.tensors)), f"{plan.n_weights:,}", f"{plan.n_bytes:,}", f"{plan.bits_per_weight:.3f}"
    )
    console.print(table)


def _print_losses(console: Console, job: Job, out: Path, losses: list[Loss]) -> None:
    planned = {p.name: p for p in job.plan.tensors}
    table = _table("loss against the source", ("name", "format", "relative error", "largest difference"))
    for loss in losses:
        if planned[loss.name].tensor.is_matrix:
            what = ("copied", "") if planned[loss.name].is_copied else (f"{loss.error:.5f}", f"{loss.largest:.3g}")
            table.add_row(escape(loss.name), loss.format_name, *what)
    error = total_error(job.plan, losses)
    table.add_row("all", "", f"{error:.5f}", "")
    console.print(table)
    console.print(
        f"written: {escape(str(out))}, {job.plan.n_bytes:,} bytes of tensors, "
        f"{job.plan.bits_per_weight:.3f} bits a weight"
    )


def _table(title: str, headings: tuple[str, ...]) -> Table:
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2))
    for heading in headings:
        is_text = heading in ("name", "format", "shape", "from", "to")
        table.add_column(heading, justify="left" if is_text else "right")
    return table
