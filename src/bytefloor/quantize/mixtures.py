"""llama.cpp's mixtures: which type each tensor of a dense model gets in a file that is called Q4_K_M.

Values, the down projections and the head are worth more bits than the rest; which of them get more, and how many,
depends on the mixture and on where in the model a layer stands.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Mixture:
    """format_name: the type of most tensors. file_type: how ``general.file_type`` numbers the mixture."""

    format_name: str
    file_type: int


MIXTURES = {
    "Q4_0": Mixture("Q4_0", 2),
    "Q4_1": Mixture("Q4_1", 3),
    "Q8_0": Mixture("Q8_0", 7),
    "Q5_0": Mixture("Q5_0", 8),
    "Q5_1": Mixture("Q5_1", 9),
    "Q2_K": Mixture("Q2_K", 10),
    "Q2_K_S": Mixture("Q2_K", 21),
    "Q3_K_S": Mixture("Q3_K", 11),
    "Q3_K_M": Mixture("Q3_K", 12),
    "Q3_K_L": Mixture("Q3_K", 13),
    "Q4_K_S": Mixture("Q4_K", 14),
    "Q4_K_M": Mixture("Q4_K", 15),
    "Q5_K_S": Mixture("Q5_K", 16),
    "Q5_K_M": Mixture("Q5_K", 17),
    "Q6_K": Mixture("Q6_K", 18),
    "IQ4_NL": Mixture("IQ4_NL", 25),
    "MXFP4": Mixture("MXFP4", 38),
}
SUBSTITUTES = {"Q2_K": "Q4_0", "Q3_K": "Q4_0", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
"""For rows that are no multiple of 256; where they are none of 32 either, F16."""
EMBEDDING, HEAD = "token_embd.weight", "output.weight"
KEPT = ("per_layer_model_proj.weight",)
"""Matrices that no mixture quantises."""
_LAYER = re.compile(r"blk\.(\d+)\.(.+)")


@dataclass(frozen=True)
class Shape:
    """What the rules look at beside a tensor's name. values: the names of all attn_v tensors, by layer.

    n_gqa: query heads for each key/value head, in the first layer.
    """

    n_layers: int
    n_gqa: int
    is_llama: bool
    has_head: bool
    values: tuple[str, ...]
    has_importances: bool

    @property
    def is_70b(self) -> bool:
        return self.is_llama and self.n_layers == 80 and self.n_gqa > 1


def layer_of(name: str) -> tuple[int, str]:
    """Layer number and the rest of a GGUF name; -1 outside layers."""
    match = _LAYER.fullmatch(name)
    return (int(match[1]), match[2]) if match else (-1, name)


def choose(mixture: str, name: str, n_columns: int, shape: Shape) -> str:
    """The type of a matrix in a mixture, before anybody asks whether its rows fit."""
    own = MIXTURES[mixture].format_name
    if name == HEAD or (name == EMBEDDING and not shape.has_head):
        return _head(mixture, own, n_columns)
    layer, part = layer_of(name)
    if part == "attn_v.weight":
        return _values(mixture, own, shape.values.index(name), shape)
    if part == "ffn_down.weight":
        return _down(mixture, own, layer, shape)
    if part == "attn_output.weight":
        return {"Q2_K": "Q3_K", "Q3_K_M": "Q4_K", "Q3_K_L": "Q5_K"}.get(mixture, own)
    return own


def _head(mixture: str, own: str, n_columns: int) -> str:
    block = 256 if own.endswith("_K") else 32
    if mixture in ("Q8_0", "MXFP4") or n_columns % block:
        return "Q8_0"
    return "Q6_K"


def _gets_more(index: int, count: int) -> bool:
    """The first and last eighth, and every third of those between."""
    return index < count // 8 or index >= 7 * count // 8 or (index - count // 8) % 3 == 2


def _values(mixture: str, own: str, index: int, shape: Shape) -> str:
    chosen = own
    if mixture == "Q2_K":
        chosen = "Q4_K" if shape.n_gqa >= 4 else "Q3_K"
    elif mixture == "Q2_K_S" and shape.n_gqa >= 4:
        chosen = "Q4_K"
    elif mixture == "Q3_K_M":
        chosen = "Q5_K" if index < 2 else "Q4_K"
    elif mixture == "Q3_K_L" or (mixture == "IQ4_NL" and shape.n_gqa >= 4) or (mixture == "Q4_K_S" and index < 4):
        chosen = "Q5_K"
    elif mixture in ("Q4_K_M", "Q5_K_M") and _gets_more(index, len(shape.values)):
        chosen = "Q6_K"
    # Eight query heads share a value there: more bits for so few weights are nearly free.
    return "Q5_K" if shape.is_70b and chosen in ("Q3_K", "Q4_K") else chosen


def _down(mixture: str, own: str, layer: int, shape: Shape) -> str:
    is_early = layer < shape.n_layers // 8
    if mixture == "Q2_K":
        return "Q3_K"
    if mixture == "Q2_K_S" and is_early:
        return "Q4_K"
    if mixture == "Q3_K_M":
        return "Q5_K" if layer < shape.n_layers // 16 else "Q4_K"
    if mixture == "Q3_K_L":
        return "Q5_K"
    if mixture in ("Q4_K_M", "Q5_K_M") and _gets_more(layer, shape.n_layers):
        return "Q6_K"
    if is_early and (mixture == "Q4_K_S" or (mixture == "IQ4_NL" and not shape.has_importances)):
        return "Q5_K"
    if is_early and shape.has_importances and mixture in ("Q4_0", "Q5_0"):
        # First down projections have outliers that a scale without a minimum follows too far.
        return {"Q4_0": "Q4_1", "Q5_0": "Q5_1"}[mixture]
    return own
