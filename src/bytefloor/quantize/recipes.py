"""Recipes by name: what ``quantize`` takes, a format and rules, in one line of words.

Patterns of the affine ones are names of a directory's tensors, which is what affine formats are written to.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from bytefloor.errors import RequestError
from bytefloor.quantize.plan import Plan
from bytefloor.quantize.target import Target, make_target

SOURCE = "source"
"""What the model itself is called among its recipes."""
MOST_SUBSTITUTED = 0.1
"""Of a recipe's weights, where no mixture's own rules say what they get instead: beyond that it is another recipe."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class Recipe:
    """words: a format or mixture, then rules ``PATTERN=FORMAT``, of which the first that fits counts."""

    name: str
    words: str

    def target(self) -> Target:
        """RequestError for a word that is not understood."""
        format_name, *rules = self.words.split()
        try:
            return make_target(format_name, rules, None)
        except RequestError as error:
            raise RequestError(f"recipe {self.name}: {error}") from None


BUILT_IN = tuple(
    Recipe(*pair)
    for pair in (
        ("Q8_0", "Q8_0"),
        ("all-8bit", "affine-8b-g64"),
        ("Q6_K", "Q6_K"),
        ("mlp-4bit-down-8bit", "affine-8b-g64 *.mlp.gate_proj.*=affine-4b-g64 *.mlp.up_proj.*=affine-4b-g64"),
        ("mlp-4bit-g32", "affine-8b-g64 *.mlp.*=affine-4b-g32"),
        ("mlp-4bit", "affine-8b-g64 *.mlp.*=affine-4b-g64"),
        ("Q5_K_M", "Q5_K_M"),
        ("Q4_K_M", "Q4_K_M"),
        ("Q4_0", "Q4_0"),
        ("all-4bit", "affine-4b-g64"),
        ("MXFP4", "MXFP4"),
        ("FP4", "FP4"),
    )
)


def parse_recipe(text: str) -> Recipe:
    """The name of a built-in one, or ``NAME=FORMAT PATTERN=FORMAT ...``. RequestError names what is wrong with it."""
    known = {recipe.name: recipe for recipe in BUILT_IN}
    in_any_case = {name.lower(): recipe for name, recipe in known.items()}
    name, equals, words = (part.strip() for part in text.partition("="))
    if not equals:
        if name.lower() not in in_any_case:
            built_in = ", ".join(known)
            raise RequestError(f"--recipe {text}: expected NAME='FORMAT PATTERN=FORMAT ...' or one of {built_in}")
        return in_any_case[name.lower()]
    if not _NAME.fullmatch(name):
        raise RequestError(f"--recipe {text}: expected a name of letters, digits, '.', '_' and '-' before the '='")
    if name.lower() in in_any_case or name == SOURCE:
        raise RequestError(f"--recipe {text}: the name {name} is taken by a built-in recipe or the source")
    if not words:
        raise RequestError(f"--recipe {text}: expected a format after the '='")
    recipe = Recipe(name, " ".join(words.split()))
    recipe.target()
    return recipe


def choose_recipes(texts: tuple[str, ...]) -> tuple[Recipe, ...]:
    """Those that are asked for, in that order, or all built-in ones. RequestError where two have one name."""
    chosen = tuple(map(parse_recipe, texts)) or BUILT_IN
    twice = [name for name, count in Counter(recipe.name for recipe in chosen).items() if count > 1]
    if twice:
        raise RequestError(f"--recipe {twice[0]}: given twice, expected a name for each")
    return chosen


def substitutes_of(plan: Plan) -> tuple[str, ...]:
    """A line for each kind of substitute that the plan makes, most weights first."""
    weights: Counter[tuple[str, str, str]] = Counter()
    tensors: Counter[tuple[str, str, str]] = Counter()
    for planned in plan.substitutions:
        kind = planned.format_name, planned.wanted, planned.why
        weights[kind] += planned.tensor.n_weights
        tensors[kind] += 1
    return tuple(
        f"{found} for {wanted} in {tensors[found, wanted, why]} of {len(plan.tensors)} tensors, "
        f"{n / plan.n_weights:.1%} of the weights: {why}"
        for (found, wanted, why), n in weights.most_common()
    )


def check_is_itself(plan: Plan) -> None:
    """RequestError for a plan that is no longer what its recipe says.

    A mixture says itself what rows get that do not fit; of any other recipe MOST_SUBSTITUTED of all weights may have
    another format than it names.
    """
    if plan.target.mixture is not None:
        return
    share = sum(planned.tensor.n_weights for planned in plan.substitutions) / max(1, plan.n_weights)
    if share > MOST_SUBSTITUTED:
        raise RequestError(
            f"{share:.0%} of the weights would get another format, expected at most {MOST_SUBSTITUTED:.0%}: "
            + "; ".join(substitutes_of(plan))
        )
