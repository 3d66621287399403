"""How much each column of each matrix counts: the mean square of what it is multiplied with, over a text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from bytefloor.engine.cache import CachePlan
from bytefloor.engine.loading import open_tokenizer
from bytefloor.engine.reference import ReferenceExecutor
from bytefloor.engine.score import score_chunks
from bytefloor.errors import NumericalError, RequestError
from bytefloor.model.config import Rounding
from bytefloor.model.decoder import build_step
from bytefloor.model.families import Model
from bytefloor.model.step import Buffer, OpCall

WINDOW = 512
"""Tokens that see each other; every window begins anew, with BOS where the model wants one."""
_FLOOR = 1e-4
"""Of the mean: a column that this text never used may be used by another one."""
Told = Callable[[int, int], None]


def importances(model: Model, text: str, device: torch.device, told: Told | None = None) -> dict[str, Tensor]:
    """float32 [K] for each matrix by its name in the source, with mean 1.

    The model runs as it is stored, in float32, through the reference executor. told: windows done, and how many.
    NumericalError names a matrix whose activations are not finite; CapacityError where the model does not fit.
    """
    tokenizer = open_tokenizer(model.checkpoint)
    ids = tokenizer.encode(text, add_bos=False)
    first = [tokenizer.bos_id] if tokenizer.add_bos and tokenizer.bos_id is not None else []
    size = min(WINDOW, model.config.context_length) - len(first)
    windows = [first + ids[start : start + size] for start in range(0, len(ids), size)]
    if not ids:
        raise RequestError("the calibration text is empty, expected text like what the model will read")
    return mean_squares(model, windows, device, told)


def mean_squares(
    model: Model, windows: Sequence[list[int]], device: torch.device, told: Told | None = None
) -> dict[str, Tensor]:
    """As importances, of token ids."""
    step = build_step(model.config, model.weights, Rounding())
    longest = max(map(len, windows))
    executor = ReferenceExecutor(step, CachePlan(capacity=longest, chunk=longest), device=device)
    inputs = {call.weights[0].stored.name: _input_of(call) for call in step.calls if call.op.name == "linear"}
    sums: dict[int, Tensor] = {}
    counts = dict.fromkeys(inputs.values(), 0)

    def observe(call: OpCall, result: Tensor) -> None:
        if call.output is not None and call.output.id in counts:
            rows = result.reshape(-1, result.shape[-1])
            found = rows.double().square().sum(dim=0)
            sums[call.output.id] = found + sums.get(call.output.id, 0.0)
            counts[call.output.id] += len(rows)

    for number, window in enumerate(windows, 1):
        for _ in score_chunks(executor, window, len(window), observe):
            pass
        if told is not None:
            told(number, len(windows))
    return {name: _settled(name, sums[buffer] / counts[buffer]) for name, buffer in inputs.items()}


def _input_of(call: OpCall) -> int:
    """The id of the buffer that a product multiplies its matrix with."""
    (buffer,) = (operand for operand in call.operands.values() if isinstance(operand, Buffer))
    return buffer.id


def _settled(name: str, squares: Tensor) -> Tensor:
    mean = float(squares.mean())
    if not bool(torch.isfinite(squares).all()):
        raise NumericalError(f"tensor {name}: importances hold NaN or infinity")
    if mean == 0.0:
        return torch.ones_like(squares, dtype=torch.float32).cpu()
    return (squares / mean).clamp_(min=_FLOOR).float().cpu()
