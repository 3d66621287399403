"""What would change a token's time: other formats and mixtures of the same model, matrix by matrix; other caches."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from bytefloor.engine.loading import KV_TYPES
from bytefloor.files.stored import StoredTensor
from bytefloor.formats import FORMATS
from bytefloor.model.weights import (
    GGUF_LAYER_NAMES,
    GGUF_MODEL_NAMES,
    SAFETENSORS_LAYER_NAMES,
    SAFETENSORS_MODEL_NAMES,
)
from bytefloor.quantize.mixtures import MIXTURES
from bytefloor.quantize.outgoing import Outgoing
from bytefloor.quantize.plan import make_plan
from bytefloor.quantize.target import AFFINE, GGUF_TYPES, PLAIN, SHORT, make_target, resolve
from bytefloor.tools.floor_model import FloorModel, Prediction, file_bytes, predict
from bytefloor.tools.profile_data import Matrix, Profile

AS_IT_IS = "as it is"
DEEP = 32768
"""The other depth that predictions are made for, where the model's context reaches so far."""
WRITTEN = (*MIXTURES, *(name for name in GGUF_TYPES if name not in MIXTURES), *AFFINE, *SHORT)
"""What ``quantize`` is asked for by."""


@dataclass(frozen=True)
class Recipe:
    """formats: of each matrix by name. is_written: whether ``quantize`` makes such a file."""

    name: str
    formats: Mapping[str, str]
    is_written: bool = True


@dataclass(frozen=True)
class Change:
    """A recipe, or a cache, and the token that it would give, at no depth and at a deep one."""

    name: str
    bits_per_weight: float
    shallow: Prediction
    deep: Prediction
    is_written: bool = True


def changes_of_formats(profile: Profile, model: FloorModel) -> list[Change]:
    """As it is first, then from few bytes to many; recipes that come to the same bytes once, by their first name."""
    found = [_change(profile, model, recipe) for recipe in recipes(profile)]
    as_it_is, others = found[0], dict[tuple[int, float | None], Change]()
    for change in found[1:]:
        others.setdefault((change.shallow.needed_bytes, change.shallow.us), change)
    return [as_it_is, *sorted(others.values(), key=lambda change: change.shallow.needed_bytes)]


def _change(profile: Profile, model: FloorModel, recipe: Recipe) -> Change:
    shallow, deep = (predict(profile, model, recipe.formats, depth) for depth in (0, deep_end(profile)))
    return Change(recipe.name, _bits(profile, recipe.formats), shallow, deep, recipe.is_written)


def changes_of_caches(profile: Profile, model: FloorModel) -> list[Change]:
    """What each cache that can be asked for would give, in the profile's formats; the profile's own first."""
    known = [kv for kv in KV_TYPES if all(kv in cache.position_bytes for cache in profile.caches)]
    found = []
    for kv in dict.fromkeys((profile.kv, *known)):
        shallow, deep = (predict(profile, model, None, depth, kv) for depth in (0, deep_end(profile)))
        found.append(Change(kv, _bits(profile, {}), shallow, deep))
    return found


def deep_end(profile: Profile) -> int:
    """DEEP, or the last position of a model's shorter context."""
    return min(DEEP, profile.context - 1)


def _bits(profile: Profile, formats: Mapping[str, str]) -> float:
    """A weight, of all matrices."""
    n_bytes = sum(file_bytes(matrix, formats.get(matrix.name, matrix.format)) for matrix in profile.matrices)
    return 8 * n_bytes / sum(matrix.n * matrix.k for matrix in profile.matrices)


def recipes(profile: Profile) -> list[Recipe]:
    """All there are for this model: as it is, what ``quantize`` writes, and formats that only come in files, of which
    tables and head stay as they are.
    """
    found = [Recipe(AS_IT_IS, {matrix.name: matrix.format for matrix in profile.matrices})]
    found += [Recipe(name if name in MIXTURES else resolve(name, None), planned(profile, name)) for name in WRITTEN]
    found.append(Recipe("BF16", {matrix.name: "BF16" for matrix in profile.matrices}))
    for name, record in FORMATS.items():
        is_known = name in (*GGUF_TYPES, *PLAIN, *SHORT.values()) or name.startswith("affine-")
        if not is_known and all(matrix.k % record.block == 0 for matrix in profile.matrices if _is_of_layer(matrix)):
            inner = {matrix.name: name if _is_of_layer(matrix) else matrix.format for matrix in profile.matrices}
            found.append(Recipe(f"{name}, tables kept", inner, is_written=False))
    return found


def _is_of_layer(matrix: Matrix) -> bool:
    return matrix.name.startswith("layers.")


def planned(profile: Profile, name: str) -> dict[str, str]:
    """Formats by matrix, as ``quantize`` would choose them for the mixture or the format."""
    target = make_target(name, [], None)
    is_gguf = target.container == "gguf"
    outgoing = {_spelled(matrix.name, is_gguf): matrix for matrix in profile.matrices}
    tensors = [Outgoing(spelled, _stored(matrix)) for spelled, matrix in outgoing.items()]
    plan = make_plan(target, tensors, profile.n_gqa, profile.family == "llama")
    return {outgoing[one.name].name: one.format_name for one in plan.tensors}


def _spelled(role: str, is_gguf: bool) -> str:
    """What the target's files call a matrix: rules of mixtures go by that."""
    layer = re.fullmatch(r"layers\.(\d+)\.(.+)", role)
    if layer is None:
        return (GGUF_MODEL_NAMES if is_gguf else SAFETENSORS_MODEL_NAMES)[role]
    if is_gguf:
        return f"blk.{layer[1]}.{GGUF_LAYER_NAMES[layer[2]]}"
    return f"layers.{layer[1]}.{SAFETENSORS_LAYER_NAMES[layer[2]]}"


def _stored(matrix: Matrix) -> StoredTensor:
    """The matrix as a plan looks at it: nobody reads it."""
    return StoredTensor(
        matrix.name, (matrix.n, matrix.k), matrix.format, FORMATS.get(matrix.format), matrix.n_bytes, dict
    )
