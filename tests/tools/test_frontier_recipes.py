"""Recipes by name: how they are read, what they plan on every family and container, what they refuse."""

from __future__ import annotations

from pathlib import Path

import pytest

from bytefloor.errors import RequestError
from bytefloor.quantize.job import prepare
from bytefloor.quantize.plan import Plan
from bytefloor.quantize.recipes import (
    BUILT_IN,
    MOST_SUBSTITUTED,
    Recipe,
    check_is_itself,
    choose_recipes,
    parse_recipe,
    substitutes_of,
)
from quantized import quantize
from tiny import build_tiny

WIDE = ("llama-wide", "qwen3-wide", "gemma3-wide", "gemma4-wide", "gemma4-e-wide")
"""Each family, with rows that every format fits."""
RECIPES = {recipe.name: recipe for recipe in BUILT_IN}
MLP_4BIT = {
    "mlp-4bit": ("affine-4b-g64", "affine-4b-g64"),
    "mlp-4bit-g32": ("affine-4b-g32", "affine-4b-g32"),
    "mlp-4bit-down-8bit": ("affine-4b-g64", "affine-8b-g64"),
}
"""Formats of gate and up, and of down."""
UNIFORM = {"all-4bit": "affine-4b-g64", "all-8bit": "affine-8b-g64", "FP4": "FP4-E2M1-g128"}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    """Each family as a directory and as a GGUF file."""
    folder, found = tmp_path_factory.mktemp("sources"), {}
    for name in WIDE:
        found[name, "directory"] = build_tiny(name, folder / name).directory
        found[name, "gguf"] = folder / f"{name}.gguf"
        quantize(found[name, "directory"], found[name, "gguf"], "Q8_0", "*=F32")
    return found


def planned(source: Path, recipe: Recipe) -> Plan:
    plan = prepare(source, recipe.target()).plan
    check_is_itself(plan)
    return plan


@pytest.mark.parametrize("container", ["directory", "gguf"])
@pytest.mark.parametrize("name", WIDE)
def test_every_built_in_recipe_plans_what_its_name_says(
    sources: dict[tuple[str, str], Path], name: str, container: str
) -> None:
    for recipe in BUILT_IN:
        plan = planned(sources[name, container], recipe)
        assert substitutes_of(plan) == ()
        formats = {p.name: p.format_name for p in plan.tensors if p.tensor.is_matrix}
        if recipe.name in UNIFORM:
            assert set(formats.values()) == {UNIFORM[recipe.name]}
        elif recipe.name in MLP_4BIT:
            gate_and_up, down = MLP_4BIT[recipe.name]
            for tensor, found in formats.items():
                part = tensor.split(".")[-2]
                wanted = {"gate_proj": gate_and_up, "up_proj": gate_and_up, "down_proj": down}
                assert found == wanted.get(part, "affine-8b-g64"), tensor
            assert sum(found == gate_and_up for found in formats.values()) >= 4
        else:
            assert recipe.words.removesuffix("_M") in formats.values()


def test_recipes_are_ordered_by_their_bits(sources: dict[tuple[str, str], Path]) -> None:
    """So that rows come from the most faithful on; neighbours may be as good as equal."""
    bits = [planned(sources["llama-wide", "directory"], recipe).bits_per_weight for recipe in BUILT_IN]
    assert bits[0] == max(bits)
    assert bits[-1] == min(bits)


def test_a_recipe_whose_format_fits_few_weights_is_refused_with_the_reason(tmp_path: Path) -> None:
    source = build_tiny("smollm2", tmp_path / "tiny").directory  # 288 and 320 columns
    with pytest.raises(RequestError, match=r"100% of the weights .* at most 10%: FP8-E4M3-row for FP4.* 288 columns"):
        planned(source, RECIPES["FP4"])
    # llama.cpp's mixtures say themselves what such rows get.
    plan = planned(source, RECIPES["Q4_K_M"])
    lines = substitutes_of(plan)
    assert any(line.startswith("Q5_0 for Q4_K in ") and "288 columns are no multiple of 256" in line for line in lines)
    assert sum(int(line.split(" in ")[1].split()[0]) for line in lines) == len(plan.substitutions) > 0


def test_a_few_narrow_tensors_may_have_another_group_and_are_told(tmp_path: Path) -> None:
    source = build_tiny("gemma4-e", tmp_path / "tiny").directory  # projections of 32 columns
    plan = planned(source, RECIPES["all-4bit"])
    share = sum(p.tensor.n_weights for p in plan.substitutions) / plan.n_weights
    assert 0 < share < MOST_SUBSTITUTED
    (line,) = substitutes_of(plan)
    assert line.startswith("affine-4b-g32 for affine-4b-g64 in 8 of ")
    assert line.endswith(f"tensors, {share:.1%} of the weights: 32 columns are no multiple of 64")


def test_a_recipe_is_words_behind_a_name() -> None:
    assert parse_recipe("Q4_K_M") == RECIPES["Q4_K_M"]
    mine = parse_recipe(" mine = affine-8b   *.up_proj.*=affine-4b-g32 lm_head.*=keep ")
    assert mine == Recipe("mine", "affine-8b *.up_proj.*=affine-4b-g32 lm_head.*=keep")
    assert [rule.format_name for rule in mine.target().rules] == ["affine-4b-g32", "keep"]
    assert choose_recipes(()) == BUILT_IN
    assert choose_recipes(("q4_k_m", "fp4")) == choose_recipes(("Q4_K_M", "FP4"))
    assert [recipe.name for recipe in choose_recipes(("FP4", "a=Q8_0", "Q8_0"))] == ["FP4", "a", "Q8_0"]


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (("q4_k_x",), r"--recipe q4_k_x: expected NAME='FORMAT PATTERN=FORMAT \.\.\.' or one of Q8_0, all-8bit"),
        (("",), "--recipe : expected NAME="),
        (("a b=Q8_0",), "--recipe a b=Q8_0: expected a name of letters"),
        (("../x=Q8_0",), "expected a name of letters"),
        (("=Q8_0",), "expected a name of letters"),
        (("Q8_0=Q4_0",), "the name Q8_0 is taken"),
        (("q8_0=Q4_0",), "the name q8_0 is taken"),
        (("source=Q4_0",), "the name source is taken"),
        (("mine=",), "--recipe mine=: expected a format after the '='"),
        (("mine=Q4_X",), "recipe mine: format Q4_X cannot be written; known: Q4_0"),
        (("mine=Q4_0 *.down",), r"recipe mine: --match \*.down: expected PATTERN=FORMAT"),
        (("mine=Q4_0 *=affine-4b",), "a file of Q4_0 cannot hold it"),
        (("a=Q4_0", "FP4", "a=Q8_0"), "--recipe a: given twice"),
        (("FP4", "FP4"), "--recipe FP4: given twice"),
    ],
)
def test_what_is_no_recipe_is_refused(texts: tuple[str, ...], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        choose_recipes(texts)
