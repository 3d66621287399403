"""What would change it: each matrix in the format that quantize would give it, and the floors of those."""

from __future__ import annotations

import pytest

from bytefloor.engine.synthetic import make_checkpoint
from bytefloor.formats import FORMATS
from bytefloor.model.families import load_model
from bytefloor.quantize.mixtures import MIXTURES
from bytefloor.tools.floor_model import fit
from bytefloor.tools.profile_data import Profile
from bytefloor.tools.profile_recipes import (
    AS_IT_IS,
    changes_of_caches,
    changes_of_formats,
    deep_end,
    planned,
    recipes,
)
from bytefloor.tools.profile_spans import matrices_of
from made_profiles import made_profile


@pytest.fixture(scope="module")
def llama() -> Profile:
    return made_profile("synthetic:llama31-8b/BF16", chunks=())


@pytest.mark.parametrize("name", ["llama31-8b", "qwen3-8b", "gemma4-12b", "gemma4-e4b", "smollm2-135m"])
@pytest.mark.parametrize("mixture", ["Q4_K_M", "Q8_0"])
def test_a_mixture_is_what_such_a_file_has(name: str, mixture: str) -> None:
    """Made from BF16, tensor by tensor; substitutes where rows are no whole blocks."""
    expected = matrices_of(load_model(make_checkpoint(f"synthetic:{name}/{mixture}", "cpu")))
    profile = made_profile(f"synthetic:{name}/BF16", (0,), ())
    found = planned(profile, mixture)
    differs = {m.name.rpartition(".")[2] for m in expected if m.format != found[m.name]}
    # Where some layers have no V, or another's, llama.cpp counts those that are there; synthetic files count layers.
    has_gaps = len([m for m in expected if m.name.endswith(".v")]) < profile.n_layers
    assert differs <= ({"v"} if has_gaps else set())


def test_formats_that_mlx_and_fp8_files_have(llama: Profile) -> None:
    assert set(planned(llama, "affine-4b").values()) == {"affine-4b-g64"}
    fp8 = planned(llama, "FP8")
    assert fp8["layers.3.q"] == "FP8-E4M3-row"
    assert fp8["embedding"] == "BF16"  # a table, which other readers expect to find as it was


def test_every_mixture_and_every_other_format_is_there(llama: Profile) -> None:
    found = {recipe.name.partition(",")[0] for recipe in recipes(llama)}
    assert found >= {*MIXTURES, AS_IT_IS, "BF16", "FP4-E2M1-g128", "affine-3b-g64"}
    others = {name for name in FORMATS if not name.startswith("affine-")} - {"F32", "F16"}
    assert others <= found


def test_changes_are_sorted_by_bytes_and_named_once(llama: Profile) -> None:
    found = changes_of_formats(llama, fit(llama))
    assert found[0].name == AS_IT_IS
    sizes = [change.shallow.needed_bytes for change in found[1:]]
    assert sizes == sorted(sizes)
    names = [change.name for change in found]
    assert len(set(names)) == len(names)
    by_name = {change.name: change for change in found}
    assert by_name["Q4_K_M"].bits_per_weight == pytest.approx(4.9, abs=0.1)
    assert by_name["Q4_K_M"].is_written
    assert not by_name["IQ4_XS, tables kept"].is_written
    assert by_name["Q4_K_M"].shallow.tok_s > 2.2 * by_name[AS_IT_IS].shallow.tok_s
    assert by_name["Q4_K_M"].deep.us > by_name["Q4_K_M"].shallow.us


def test_floors_are_those_of_the_files_themselves(llama: Profile) -> None:
    by_name = {change.name: change for change in changes_of_formats(llama, fit(llama))}
    for mixture in ("Q4_K_M", "Q8_0"):
        own = made_profile(f"synthetic:llama31-8b/{mixture}", (0,), ()).tokens[0]
        assert by_name[mixture].shallow.needed_bytes == own.needed_bytes


def test_caches_begin_with_the_profiles_own(llama: Profile) -> None:
    own, *others = changes_of_caches(llama, fit(llama))
    assert own.name == "bf16"
    assert {other.name for other in others} == {"int8", "fp8"}
    assert all(other.deep.floor_us < own.deep.floor_us for other in others)
    assert all(other.deep.us < own.deep.us for other in others)


def test_the_deep_end_is_within_the_context(llama: Profile) -> None:
    assert deep_end(llama) == 32768
    assert deep_end(made_profile("synthetic:smollm2-135m/Q8_0", (0,), ())) == 8191
