"""How ``verify`` looks: a line a rung as it ends, every wrong op, and all of them where asked for; JSON in a file."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from bytefloor.tools.outputs import write_rows
from bytefloor.tools.verify_report import EQUAL, MEASURED, SKIPPED, Line

ROW = "{:<44} {:>10}  {:<22} {:>9} {:>9}  {:<8}{}"


def show(lines: Iterable[Line], lists_all: bool, save: Path | None) -> int:
    """Prints lines as they come; 1 where any is wrong or none was compared, otherwise 0.

    What came before an error or Ctrl-C is saved.
    """
    kept: list[Line] = []
    try:
        for line in lines:
            if not kept:
                print(ROW.format("rung", "ops", "part", "error", "bound", "verdict", "name").rstrip())
            if kept and kept[-1].rung != line.rung:
                _sum_up(kept)
            kept.append(line)
            if lists_all or line.verdict != EQUAL:
                _print(line, line.rung)
        if kept:
            _sum_up(kept)
    finally:
        if save is not None and kept:
            write_rows(save, [line.to_json() for line in kept])
    wrong = [line for line in kept if line.is_wrong]
    print()
    if wrong:
        first = wrong[0]
        number = f"op {first.ops}, " if first.ops else ""
        print(f"WRONG: {number}{first.part}: {first.name} ({first.rung}); {first.note or 'see the error above'}")
        return 1
    n = sum(line.verdict == EQUAL for line in kept)
    print(f"all agree: {n} comparisons{_skipped(kept)}" if n else f"nothing was compared{_skipped(kept)}")
    return 0 if n else 1


def _print(line: Line, name: str) -> None:
    error, bound = ("" if x is None else f"{x:.2e}" for x in (line.error, line.bound))
    told = f"{line.name}{'; ' if line.name and line.note else ''}{line.note}"
    print(ROW.format(name, line.ops, line.part, error, bound, line.verdict, told).rstrip(), flush=True)


def _sum_up(lines: list[Line]) -> None:
    """Of the last rung, what came nearest to its bound."""
    rung = [line for line in lines if line.rung == lines[-1].rung and line.verdict not in (SKIPPED, MEASURED)]
    if not rung:
        return
    nearest = max(rung, key=lambda line: (line.is_wrong, (line.error or 0) / (line.bound or 1)))
    n_wrong = sum(line.is_wrong for line in rung)
    verdict = f"{n_wrong} of {len(rung)} wrong" if n_wrong else f"{len(rung)} equal"
    error, bound = ("" if x is None else f"{x:.2e}" for x in (nearest.error, nearest.bound))
    told = ROW.format(
        nearest.rung, nearest.ops, nearest.part, error, bound, "", f"nearest to its bound: {nearest.name}"
    )
    print(f"{told.rstrip()}; {verdict}", flush=True)


def _skipped(lines: list[Line]) -> str:
    reasons = [f"{line.rung}: {line.note}" for line in lines if line.verdict == SKIPPED]
    return f"; not run: {'; '.join(reasons)}" if reasons else ""
