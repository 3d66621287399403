"""How much memory running takes beside weights and cache, worked out before any is taken.

Buffers of the launches are counted by planning them once without memory. What a step of the plain list takes is the
most over its calls of: values that are still needed, the result, and what the op's reference holds while it computes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.overrides import TorchFunctionMode

from bytefloor.engine.cache import CachePlan
from bytefloor.model.step import Buffer, CacheKind, OpCall, Step
from bytefloor.model.weights import Weight
from bytefloor.ops.eviction import OBSERVED
from bytefloor.ops.op import Sizes, n_elements

BLAS_WORKSPACE_BYTES = 32 << 20
"""What cuBLAS takes for the stream that it is used on, on Hopper; less elsewhere."""
RESULTS_A_CALL = 4
"""The most results of its own size that the reference of a plain op holds: its formula, term by term."""


CODING_BYTES = 2 * 8 * 8
"""Of a lane of K and V, while a page is coded: eight tensors of its size in float64, most for a value's tile."""
SLOT_BYTES = 8
"""Of the number of a slot that is kept, int64."""
VOTE_BYTES = 32
"""Of a slot's votes, smoothed votes, and place in the order of both: the copy that is sorted, and the numbers."""


class Rehearsal(TorchFunctionMode):
    """Tensors made for a device under it have no memory (they are ``meta``); n_bytes is what they would have taken."""

    def __init__(self) -> None:
        super().__init__()
        self.n_bytes = 0

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if not kwargs or kwargs.get("device") is None:
            return function(*args, **(kwargs or {}))
        made = function(*args, **{**kwargs, "device": "meta"})
        self.n_bytes += made.nbytes
        return made


def last_uses(step: Step) -> list[list[int]]:
    """For each call, the buffers that nothing after it reads: they can be dropped behind it."""
    last: dict[int, int] = {}
    for index, call in enumerate(step.calls):
        last |= {operand.id: index for operand in call.operands.values() if isinstance(operand, Buffer)}
    inputs = {buffer.id for buffer in (*step.inputs.values(), *step.tables.values())}
    ends: list[list[int]] = [[] for _ in step.calls]
    for buffer_id, index in last.items():
        if buffer_id not in inputs:
            ends[index].append(buffer_id)
    return ends


def step_bytes(step: Step, plan: CachePlan, item_bytes: int, n_rows: int | None = None) -> int:
    """The most that the plain list takes at the end of a full cache, as the engine asks for it: for a whole chunk, with
    one row of logits a sequence, or for so many rows of each sequence with logits of all.

    item_bytes: of an activation.
    """
    n_sequences = plan.n_sequences
    most_rows = min(plan.chunk, n_sequences * plan.capacity)
    n_tokens = most_rows if n_rows is None else min(most_rows, n_rows * n_sequences)
    sizes = {"T": n_tokens, "R": n_sequences if n_rows is None else n_tokens, "B": n_sequences}
    sizes |= {f"P.{kind.name}": plan.n_table(kind) for kind in step.kinds}
    held: dict[int, int] = {}
    most = 0
    for call, ends in zip(step.calls, last_uses(step), strict=True):
        result = 0 if call.output is None else item_bytes * n_elements(call.output.shape, sizes)
        taken = RESULTS_A_CALL * result
        if call.op.writes_cache:
            taken += _write_bytes(call, plan, sizes, item_bytes)
        if call.op.reads_cache:
            taken += _attention_bytes(call, plan, sizes, item_bytes)
        most = max(most, sum(held.values()) + taken)
        if call.output is not None:
            held[call.output.id] = result
        for buffer_id in ends:
            held.pop(buffer_id, None)
    return most


def _write_bytes(call: OpCall, plan: CachePlan, sizes: Sizes, item_bytes: int) -> int:
    """What a cache write rounds and scatters is as large as its keys; a page that is coded is float64 meanwhile."""
    if "k" in call.operands:
        return RESULTS_A_CALL * item_bytes * n_elements(call.operands["k"].shape, sizes)
    assert call.cache is not None
    return CODING_BYTES * plan.page_size * call.cache.kind.n_kv_heads * call.cache.kind.head_size


def _attention_bytes(call: OpCall, plan: CachePlan, sizes: Sizes, item_bytes: int) -> int:
    """Scores, masked scores and weights of a chunk; keys and values of the band, one copied for each head."""
    assert call.cache is not None
    kind, n_heads = call.cache.kind, call.sizes["H"]
    assert isinstance(n_heads, int)
    n_band, n_masks = band_positions(kind, plan), 3
    if kind.recent is not None:
        # Some rows of a chunk see a page in codes and some as it was written; pages are read whole.
        n_band, n_masks = n_band + min(n_band, plan.chunk) + 2 * plan.page_size, 6
    scores = sizes["T"] * n_band * n_heads * item_bytes
    masks = n_masks * sizes["T"] * n_band
    gathered = 2 * n_band * kind.n_kv_heads * kind.head_size * item_bytes
    # Where K is made of V: what is kept, and K, are there beside both together.
    made = n_band * kind.n_kv_heads * (kind.head_values + kind.head_size) * item_bytes if kind.rotated else 0
    # torch's batched product wants keys (then values) once a query head, unless one view serves all heads.
    is_copied = 1 < kind.n_kv_heads < n_heads
    copied = n_band * n_heads * kind.head_size * item_bytes if is_copied else 0
    copies = 2 if kind.recent is None else 3  # of what was gathered: as pages, position by position, those that live
    return max(gathered + made, copies * gathered, gathered + masks + 2 * scores + max(scores, copied))


def kept_bytes(kinds: Sequence[CacheKind], n_layers: Mapping[str, int], plan: CachePlan) -> int:
    """What all layers keep of the prompts that a budget cuts in one step, as numbers of slots, until its end.

    n_layers: of each kind of cache.
    """
    n_prompts = min(plan.n_sequences, plan.chunk // OBSERVED)
    heads = sum(n_layers[kind.name] * kind.n_kv_heads for kind in set(kinds) if kind.window is None)
    return n_prompts * heads * min(plan.budget or 0, plan.capacity) * SLOT_BYTES


def eviction_bytes(kind: CacheKind, n_heads: int, plan: CachePlan) -> int:
    """The most that ``Evictions`` takes beside what it keeps: one head's keys and scores, or what a layer moves."""
    group, e = n_heads // kind.n_kv_heads, kind.head_size
    # Pages, their values, and these in order of slots; where K is made of V, both once more.
    keys = kind.head_bytes + 4 * e * (6 if kind.rotated else 2)
    # Scores, these scaled, shares; which are hidden; votes and their order.
    chosen = keys + OBSERVED * (12 * group + 1) + VOTE_BYTES
    moved = kind.n_kv_heads * (kind.head_bytes + 3 * SLOT_BYTES)
    return plan.capacity * max(chosen, moved)


def band_positions(kind: CacheKind, plan: CachePlan) -> int:
    """Positions that the rows of a chunk see together, at most."""
    return plan.capacity if kind.window is None else min(plan.capacity, kind.window - 1 + plan.chunk)


def dense_weights(step: Step) -> list[Weight]:
    """Those that some op needs whole; a table that is only gathered from stays in the file."""
    return list({id(w): w for call in step.calls if call.op.name != "embed" for w in call.weights}.values())


def n_values(weight: Weight) -> int:
    """Numbers that a weight holds."""
    return n_elements(weight.shape, {})
