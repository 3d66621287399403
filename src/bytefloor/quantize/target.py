"""What a user may ask for: names of formats and mixtures, and which container can hold them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from bytefloor.errors import RequestError
from bytefloor.formats import FORMATS
from bytefloor.quantize.mixtures import MIXTURES

Container = Literal["gguf", "mlx", "compressed", "own"]
"""gguf: a file. mlx: affine modules in safetensors. compressed: FP8 rows of products alone, described as
compressed-tensors does. own: FP4, alone or beside FP8, and FP8 of tables, described by format names."""

GGUF_TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "MXFP4")
PLAIN = ("F32", "F16", "BF16")
FP4, FP8 = "FP4-E2M1-g128", "FP8-E4M3-row"
SHORT = {"FP4": FP4, "FP8": FP8}
KEEP = "keep"
DEFAULT_GROUP = 64
AFFINE = tuple(sorted({name.rsplit("-", 1)[0] for name in FORMATS if name.startswith("affine-")}))


@dataclass(frozen=True)
class Rule:
    """Tensors whose name fits the pattern (``*`` and ``?`` as in file names) get the format, or stay as they are."""

    pattern: str
    format_name: str


@dataclass(frozen=True)
class Target:
    """The recipe: a format for all matrices, or a mixture, which decides for each; rules that go before it.

    has_substitutes: whether a tensor that the format does not fit gets another one, or is an error.
    """

    container: Container
    format_name: str
    mixture: str | None
    rules: tuple[Rule, ...]
    has_substitutes: bool = True


def make_target(name: str, matches: list[str], group: int | None, has_substitutes: bool = True) -> Target:
    """From the words of the command line. RequestError names what is not understood."""
    base = Target("gguf", "", None, (), has_substitutes)
    name = _in_our_case(name)
    if name in MIXTURES:
        target = replace(base, format_name=MIXTURES[name].format_name, mixture=name)
    else:
        resolved = resolve(name, group)
        if resolved in (*PLAIN, KEEP):
            raise RequestError(f"--format {name}: expected a format that quantises; --match can leave tensors in it")
        target = replace(base, container=_container(resolved), format_name=resolved)
    rules = tuple(_rule(text, group) for text in matches)
    formats = {target.format_name, *(rule.format_name for rule in rules)} - {*PLAIN, KEEP}
    if target.container in ("compressed", "own"):
        target = replace(target, container="compressed" if formats == {FP8} else "own")
    for rule in rules:
        if rule.format_name not in (*PLAIN, KEEP) and not _holds(target.container, rule.format_name):
            raise RequestError(f"--match {rule.pattern}={rule.format_name}: a file of {name} cannot hold it")
    if group is not None and not any(found.startswith("affine-") for found in formats):
        raise RequestError(f"--target-group-size {group}: only affine formats have groups to choose")
    return replace(target, rules=rules)


def _in_our_case(name: str) -> str:
    """As it is written here; q4_k_m is Q4_K_M."""
    ours = {known.lower(): known for known in (*FORMATS, *GGUF_TYPES, *AFFINE, *PLAIN, *SHORT, *MIXTURES, KEEP)}
    return ours.get(name.lower(), name)


def resolve(name: str, group: int | None) -> str:
    """The full name of a format; an affine one without its group gets that of --target-group-size, or 64."""
    name = _in_our_case(name)
    if name in AFFINE:
        name = f"{name}-g{DEFAULT_GROUP if group is None else group}"
    name = SHORT.get(name, name)
    if name in (*GGUF_TYPES, *PLAIN, KEEP, FP4, FP8) or (name.startswith("affine-") and name in FORMATS):
        return name
    known = ", ".join([*MIXTURES, *(kind for kind in GGUF_TYPES if kind not in MIXTURES), *AFFINE, *SHORT])
    raise RequestError(f"format {name} cannot be written; known: {known} (affine formats may name their group: -g32)")


def _rule(text: str, group: int | None) -> Rule:
    pattern, equals, name = text.rpartition("=")
    if not equals or not pattern or not name:
        raise RequestError(f"--match {text}: expected PATTERN=FORMAT, such as '*.down_proj.*=affine-8b'")
    return Rule(pattern, resolve(name, group))


def _container(format_name: str) -> Container:
    if format_name in GGUF_TYPES:
        return "gguf"
    return "mlx" if format_name.startswith("affine-") else "own"


def _holds(container: Container, format_name: str) -> bool:
    own = _container(format_name)
    return own == container or (container == "compressed" and own == "own" and format_name == FP8)
