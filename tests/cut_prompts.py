"""A prompt that is cut to a budget, once more and without a cache: all rows at once, and a mask for each head of what
the prompt keeps. Attention and the choice are plain loops in float64; all other ops are the references of the list."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from bytefloor.model.step import Buffer, CacheLayer, OpCall, Step
from bytefloor.ops.round_to import round_to

N_CHOOSING = 32


def plain_votes(q: np.ndarray, keys: np.ndarray, scale: float) -> np.ndarray:
    """[J, S - W], row by row, head by head, slot by slot. q [W, H, E], keys [J, S, E]."""
    (n_rows, n_heads, _), (n_kv, n_slots, _) = q.shape, keys.shape
    n_before = n_slots - n_rows
    votes = np.zeros((n_kv, n_before))
    for row in range(n_rows):
        for head in range(n_heads):
            j = head // (n_heads // n_kv)
            scores = np.array([scale * float(q[row, head] @ key) for key in keys[j, : n_before + row + 1]])
            weights = np.exp(scores - scores.max())
            votes[j] += (weights / weights.sum())[:n_before]
    return np.array([[sum(each[max(0, s - 3) : s + 4]) / 7 for s in range(n_before)] for each in votes])


def plain_kept(q: np.ndarray, keys: np.ndarray, scale: float, n_kept: int) -> list[set[int]]:
    """Of each key/value head."""
    n_slots = keys.shape[1]
    votes = plain_votes(q, keys, scale)
    best = [sorted(range(n_slots - len(q)), key=lambda s: (-each[s], s))[: n_kept - len(q)] for each in votes]
    return [{*each, *range(n_slots - len(q), n_slots)} for each in best]


class Emulation:
    """One text through a step. budget: None cuts nothing. kept: what was chosen, by cache layer."""

    def __init__(self, step: Step, ids: list[int], n_prompt: int, budget: int | None) -> None:
        self.step, self.ids, self.n_prompt, self.budget = step, ids, n_prompt, budget
        self.kept: dict[CacheLayer, list[set[int]]] = {}
        self._held: dict[CacheLayer, tuple[Tensor, Tensor]] = {}

    @torch.inference_mode()
    def logits(self) -> Tensor:
        """Float64 [T, V] of all rows."""
        everywhere = torch.arange(len(self.ids))
        given = {"tokens": torch.tensor(self.ids), "sequence": torch.zeros_like(everywhere)}
        values = {b.id: given.get(name, everywhere) for name, b in self.step.inputs.items()}
        for call in self.step.calls:
            operands = {
                name: values.get(o.id) if isinstance(o, Buffer) else o.load().double()
                for name, o in call.operands.items()
            }
            if call.op.writes_cache:
                self._write(call, operands)
            elif call.op.reads_cache:
                values[call.output.id] = self._attend(call, operands)
            else:
                values[call.output.id] = call.op.reference(**operands, **call.attributes)
        return values[self.step.logits.id]

    def _write(self, call: OpCall, operands: dict) -> None:
        storage, rotated = call.attributes["storage"], call.attributes["rotated"]
        k, v = (round_to(operands[name], storage).double() for name in "kv")
        if rotated:  # what is not kept of a key is its value times the norm's weight, which attention is given
            k = k.clone()
            n, half = rotated // 2, k.shape[-1] // 2
            k[..., n:half] = k[..., half + n :] = float("nan")
        self._held[call.cache] = k, v

    def _attend(self, call: OpCall, operands: dict) -> Tensor:
        q, scale, window = operands["q"], call.attributes["scale"], call.attributes["window"]
        k, v = self._held[call.cache]
        if operands.get("k_norm") is not None:
            k = torch.where(k.isnan(), v * operands["k_norm"], k)
        if window is None and self.budget is not None and call.cache not in self.kept:
            chooses = slice(self.n_prompt - N_CHOOSING, self.n_prompt)
            keys = k[: self.n_prompt].transpose(0, 1).numpy()
            self.kept[call.cache] = plain_kept(q[chooses].numpy(), keys, scale, self.budget)
        out = torch.empty_like(q)
        for head in range(q.shape[1]):
            j = head // (q.shape[1] // k.shape[1])
            for row in range(len(q)):
                seen = [p for p in range(row + 1) if window is None or p > row - window]
                if window is None and self.budget is not None and row >= self.n_prompt:
                    seen = [p for p in seen if p >= self.n_prompt or p in self.kept[call.cache][j]]
                shares = (k[seen, j] @ q[row, head] * scale).softmax(-1)
                out[row, head] = shares @ v[seen, j]
        return out
