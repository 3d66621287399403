"""The plan: each tensor's format, what it takes, and every place where it is not what the recipe says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from bytefloor.errors import RequestError, UnsupportedError
from bytefloor.formats import FORMATS, get
from bytefloor.quantize.mixtures import HEAD, KEPT, SUBSTITUTES, Shape, choose, layer_of
from bytefloor.quantize.outgoing import Outgoing
from bytefloor.quantize.target import FP4, FP8, KEEP, PLAIN, Target

_PLAIN_BYTES = {"F32": 4, "F16": 2, "BF16": 2}


@dataclass(frozen=True)
class Planned:
    """One tensor. wanted: the recipe's format; why: the reason where ``format_name`` is another, else empty."""

    tensor: Outgoing = field(repr=False)
    format_name: str
    wanted: str
    why: str = ""

    @property
    def name(self) -> str:
        return self.tensor.name

    @property
    def is_copied(self) -> bool:
        """Whether the source's bytes are taken over: same format, rows in place."""
        return self.tensor.is_as_stored and self.tensor.stored.format_name == self.format_name

    @property
    def n_bytes(self) -> int:
        """Bytes in the target, scales included."""
        if self.is_copied:
            return self.tensor.stored.n_bytes
        if self.format_name in _PLAIN_BYTES:
            return self.tensor.n_weights * _PLAIN_BYTES[self.format_name]
        n_scales = self.tensor.n_rows * 4 if self.format_name == FP8 else 0
        return int(self.tensor.n_weights * get(self.format_name).bits_per_weight) // 8 + n_scales


@dataclass(frozen=True)
class Plan:
    """All tensors in the order in which they are written."""

    target: Target
    tensors: tuple[Planned, ...]

    @property
    def n_bytes(self) -> int:
        return sum(planned.n_bytes for planned in self.tensors)

    @property
    def n_weights(self) -> int:
        return sum(planned.tensor.n_weights for planned in self.tensors)

    @property
    def bits_per_weight(self) -> float:
        """Of the whole file's tensors, norms included."""
        return 8 * self.n_bytes / self.n_weights if self.n_weights else 0.0

    @property
    def substitutions(self) -> tuple[Planned, ...]:
        return tuple(planned for planned in self.tensors if planned.why)


def make_plan(
    target: Target, tensors: Sequence[Outgoing], n_gqa: int, is_llama: bool, has_importances: bool = False
) -> Plan:
    """A format for each tensor.

    RequestError for a rule that fits no tensor, or, without substitutes, for a tensor that its format does not fit.
    """
    names = [tensor.name for tensor in tensors]
    values = sorted((name for name in names if layer_of(name)[1] == "attn_v.weight"), key=layer_of)
    n_layers = 1 + max((layer_of(name)[0] for name in names), default=-1)
    shape = Shape(n_layers, n_gqa, is_llama, HEAD in names, tuple(values), has_importances)
    _refuse_idle_rules(target, tensors)
    return Plan(target, tuple(_plan_one(target, tensor, shape) for tensor in tensors))


def _refuse_idle_rules(target: Target, tensors: Sequence[Outgoing]) -> None:
    for rule in target.rules:
        if not any(tensor.is_matrix and _fits(rule.pattern, tensor) for tensor in tensors):
            example = next((tensor for tensor in tensors if tensor.is_matrix), None)
            names = dict.fromkeys((example.name, example.stored.name)) if example is not None else ()
            like = f"; names look like {' or '.join(names)}" if names else ""
            raise RequestError(f"--match {rule.pattern}: fits no matrix of this model{like}")


def _fits(pattern: str, tensor: Outgoing) -> bool:
    return fnmatchcase(tensor.name, pattern) or fnmatchcase(tensor.stored.name, pattern)


def _plan_one(target: Target, tensor: Outgoing, shape: Shape) -> Planned:
    if not tensor.is_matrix:
        return _kept(target, tensor)
    rule = next((rule for rule in target.rules if _fits(rule.pattern, tensor)), None)
    if rule is not None:
        wanted = rule.format_name
    elif (target.container == "gguf" and tensor.name in KEPT) or (target.container == "compressed" and tensor.is_table):
        wanted = KEEP
    elif target.mixture is not None:
        wanted = choose(target.mixture, tensor.name, tensor.n_columns, shape)
    else:
        wanted = target.format_name
    if wanted == KEEP:
        return _kept(target, tensor)
    found = wanted
    while tensor.n_columns % FORMATS[found].block:
        found = _substitute(found)
    if found == wanted:
        return Planned(tensor, found, wanted)
    why = f"{tensor.n_columns} columns are no multiple of {FORMATS[wanted].block}"
    if not target.has_substitutes:
        raise RequestError(f"tensor {tensor.name}: {why}, as {wanted} needs; --match can name another format for it")
    return Planned(tensor, found, wanted, why)


def _substitute(format_name: str) -> str:
    """The next format to try for rows that a block does not divide; a plain one fits all."""
    if format_name in SUBSTITUTES:
        return SUBSTITUTES[format_name]
    if format_name == FP4:
        return FP8
    if format_name.startswith("affine-"):
        stem, group = format_name.rsplit("-g", 1)
        return "BF16" if group == "32" else f"{stem}-g{int(group) // 2}"
    return "F16"


def _kept(target: Target, tensor: Outgoing) -> Planned:
    """As it is in the source, where the container can hold that."""
    found = tensor.stored.require_format().name
    is_gguf = target.container == "gguf"
    if is_gguf and not tensor.is_matrix:
        return Planned(tensor, "F32", KEEP)  # what readers of these files expect of norms
    can_stay = found in PLAIN or (tensor.is_as_stored and _can_hold(target, tensor, found))
    if can_stay:
        return Planned(tensor, found, KEEP)
    if not target.has_substitutes:
        raise RequestError(f"tensor {tensor.name}: {found} cannot be kept in this container; --match can name another")
    return Planned(tensor, "BF16", KEEP, f"{found} cannot be kept in this container")


def _can_hold(target: Target, tensor: Outgoing, found: str) -> bool:
    if target.container == "gguf":
        # Its scale of the whole tensor would have to become a tensor of its own.
        return FORMATS[found].block_bytes is not None and not (found == "NVFP4" and "scale" in tensor.stored.read())
    if target.container == "mlx":
        return found.startswith("affine-")
    return found == FP8 or (target.container == "own" and found == FP4)


def refuse_unreadable(tensors: Sequence[Outgoing]) -> None:
    """UnsupportedError for a source with a tensor that cannot be decoded, before anything is written."""
    for tensor in tensors:
        tensor.stored.require_format()
        if 0 in tensor.shape:
            raise UnsupportedError(f"tensor {tensor.stored.name}: shape {list(tensor.shape)} has nothing to quantise")
