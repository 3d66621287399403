"""What ``verify`` says of one place in the list, and how it finds the op to blame.

A kernel does several plain ops, and only some of their values can be looked at. What is right clears the ops that it
was made by; the culprit is among those that all wrong values have in common.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from bytefloor.model.step import Buffer, OpCall, Step

LEAST = 2.0**-126
"""Below this float32 holds fewer digits, and zero may carry a parity bit."""
EQUAL, WRONG, SKIPPED, MEASURED = "equal", "WRONG", "not run", "measured"


@dataclass(frozen=True)
class Line:
    """One row of the report. ops: numbers in the plain list, ``first..last``. error, bound: of the value that is
    nearest to its bound or farthest beyond it, as shares of the root mean square of all that it stands among."""

    rung: str
    ops: str
    part: str
    name: str
    error: float | None
    bound: float | None
    verdict: str
    note: str = ""

    @property
    def is_wrong(self) -> bool:
        return self.verdict == WRONG

    def to_json(self) -> dict[str, Any]:
        """NaN and infinity, which JSON has no words for, as null."""
        found = asdict(self)
        return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in found.items()}


@dataclass(frozen=True)
class Seen:
    """Values [rows, ...] that could be looked at. makers: the calls they come from. idle: those of them that could do
    nothing wrong here: RoPE at position 0, a norm of zeros. probe: what was done to the inputs, empty for nothing.
    blames: names of ops that a probe is for.

    unproven: makers that may still be wrong where this is right: a window that is longer than what was there to see.
    others: how many values are not the bf16 nearest to what is expected, and how many may not be.
    """

    what: str
    makers: tuple[OpCall, ...]
    found: Tensor
    expected: Tensor
    allowed: Tensor
    positions: tuple[int, ...]
    idle: tuple[OpCall, ...] = ()
    unproven: tuple[OpCall, ...] = ()
    probe: str = ""
    blames: tuple[str, ...] = ()
    others: tuple[int, float] = (0, 1.0)

    def worst(self) -> tuple[float, float, float, tuple[int, ...]]:
        """(share of what is allowed, error, bound, where); errors and bounds are shares of the expected values."""
        difference = (self.found.double() - self.expected).abs()
        allowed = self.allowed.expand_as(difference) + LEAST
        ratio = torch.where(difference == 0, 0.0, difference / allowed).nan_to_num(nan=math.inf)
        flat = int(ratio.flatten().argmax())
        size = self.expected.square().mean().sqrt().item() or 1.0
        at = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), ratio.shape))
        return ratio[at].item(), difference[at].item() / size, allowed[at].item() / size, at

    @property
    def question(self) -> tuple[object, ...]:
        """What rows have in common that were asked alike."""
        return self.what, self.probe, tuple(map(id, self.makers)), tuple(map(id, (*self.idle, *self.unproven)))

    @property
    def is_right(self) -> bool:
        return self.worst()[0] <= 1 and self.others[0] <= self.others[1]


@dataclass
class Site:
    """A place where values can be looked at: the calls that happen there, and what was seen."""

    rung: str
    step: Step
    calls: Sequence[OpCall]
    part: str
    seen: list[Seen] = field(default_factory=list)

    def line(self) -> Line:
        """The verdict, with the op to blame where there is one."""
        worst = max(self.seen, key=lambda one: (not one.is_right, one.worst()[0]))
        _, error, bound, at = worst.worst()
        wrong = [one for one in self.seen if not one.is_right]
        suspects = self.suspects() if wrong else list(self.calls)
        numbers = numbers_of(self.step)
        ids = sorted(numbers[id(call)] for call in suspects)
        note = ""
        if wrong:
            probe = f", {worst.probe}" if worst.probe else ""
            note = f"{worst.what}: row at position {worst.positions[at[0]]}, value {list(at[1:])}{probe}"
            if worst.others[0] > worst.others[1]:
                note += f"; {worst.others[0]} values are not the nearest bf16, at most {worst.others[1]:.0f} may be"
        verdict = WRONG if wrong else EQUAL
        return Line(self.rung, span(ids), self.part, names(suspects), error, bound, verdict, note)

    def suspects(self) -> list[OpCall]:
        """The calls that can have made what is wrong, and nothing that is right, in the order of the list.

        Of several wrong values those that all have in common; where these are calls of one op, say RoPE of queries and
        of keys, all of them.
        """
        wrong = [one for one in self.seen if not one.is_right]
        plain = [one for one in wrong if not one.blames]
        cleared: set[int] = set()
        if plain:  # otherwise what the probes are for is to blame
            wrong = plain
            # One right row says little of a matrix; all rows that were asked alike say something.
            failed = {one.question for one in self.seen if not one.is_right}
            right = [one for one in self.seen if not one.blames and one.question not in failed]
            cleared = {id(call) for one in right for call in one.makers if not _is_in(call, (*one.idle, *one.unproven))}
        blamed = []
        for one in wrong:
            own = [call for call in self.calls if _is_to_blame(call, one)]
            # Where all are right with other inputs, it is what depends on their size: eps.
            norms = [call for call in own if call.op.name == "rms_norm"]
            blamed.append([call for call in own if id(call) not in cleared] or norms or own)
        common = [call for call in self.calls if all(_is_in(call, own) for own in blamed)]
        if common:
            return common
        ops = set.intersection(*({call.op.name for call in own} for own in blamed))
        anyone = [call for call in self.calls if any(_is_in(call, own) for own in blamed)]
        return [call for call in anyone if call.op.name in ops] or anyone or list(self.calls)


def _is_to_blame(call: OpCall, one: Seen) -> bool:
    is_maker = _is_in(call, one.makers) and not _is_in(call, one.idle)
    return is_maker and (not one.blames or call.op.name in one.blames)


def _is_in(call: OpCall, calls: Iterable[OpCall]) -> bool:
    """By identity: two calls of one kind may be equal."""
    return any(call is other for other in calls)


def makers(call: OpCall, calls: Sequence[OpCall], operand: str | None = None) -> tuple[OpCall, ...]:
    """The calls among these that a call's result comes from, itself included; through one operand where it is named."""
    by_buffer = {made.output.id: made for made in calls if made.output is not None}
    found: dict[int, OpCall] = {id(call): call}
    waiting = [call.operands[operand]] if operand is not None else list(call.operands.values())
    while waiting:
        source = waiting.pop()
        maker = by_buffer.get(source.id) if isinstance(source, Buffer) else None
        if maker is not None and id(maker) not in found:
            found[id(maker)] = maker
            waiting += maker.operands.values()
    return tuple(made for made in calls if id(made) in found)


def numbers_of(step: Step) -> Mapping[int, int]:
    """The place of each call in the plain list, by identity."""
    return {id(call): i for i, call in enumerate(step.calls)}


def span(numbers: Sequence[int]) -> str:
    """``12``, ``12..20``, or ``12,19`` where calls do not follow each other."""
    if not numbers:
        return ""
    if len(numbers) > 2 or numbers[-1] - numbers[0] == len(numbers) - 1:
        return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}..{numbers[-1]}"
    return ",".join(map(str, numbers))


def names(calls: Iterable[OpCall]) -> str:
    """The ops' names in order, a weight's role behind those that have one; views, which compute nothing, left out."""
    found: dict[str, None] = {}
    for call in calls:
        role = "".join(f" {weight.name.rpartition('.')[2]}" for weight in call.weights)
        if call.op.name not in ("view", "select"):
            found[call.op.name + role] = None
    return ", ".join(found) or "view"
