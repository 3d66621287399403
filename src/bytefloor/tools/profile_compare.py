"""Two profiles side by side: by kind, what the difference between them is made of."""

from __future__ import annotations

from dataclasses import dataclass

from bytefloor.errors import RequestError
from bytefloor.tools.floor_model import Prediction, fit, predict
from bytefloor.tools.profile_data import Profile, StepProfile, total_us
from bytefloor.tools.profile_parts import GAPS


@dataclass(frozen=True)
class Difference:
    """A kind in both, 0 where a step has none of it. share: of the difference between the whole steps; None where the
    two take the same time."""

    name: str
    n_launches: tuple[int, int]
    us: tuple[float, float]
    share: float | None

    @property
    def more_us(self) -> float:
        """What the second takes more."""
        return self.us[1] - self.us[0]


@dataclass(frozen=True)
class ComparedStep:
    """The same step of two profiles. differences: by kind, with the stamps on. predicted: the second's time without
    stamps by the first's model, where that is another format and both ran on kernels."""

    steps: tuple[StepProfile, StepProfile]
    differences: tuple[Difference, ...]
    predicted: Prediction | None

    @property
    def miss(self) -> float | None:
        """Of the prediction, as a share of what was measured."""
        us = None if self.predicted is None else self.predicted.us
        return None if us is None else us / self.steps[1].wall_us - 1


def compare(a: Profile, b: Profile) -> list[ComparedStep]:
    """Steps that both have. RequestError for profiles of different kinds of thing: models of other shapes, another
    executor, no step in common.
    """
    _check_comparable(a, b)
    of_b = {_key(step): step for step in b.steps}
    pairs = [(step, of_b[_key(step)]) for step in a.steps if _key(step) in of_b]
    if not pairs:
        of_a, of_b_too = (", ".join(step.title for step in profile.steps) for profile in (a, b))
        raise RequestError(f"--compare: no step is in both profiles: {of_a}; and {of_b_too}")
    return [ComparedStep(pair, _differences(*pair), _predicted(a, b, pair[1])) for pair in pairs]


def _key(step: StepProfile) -> tuple[str, int, int]:
    return step.kind, step.rows, step.depth


def _check_comparable(a: Profile, b: Profile) -> None:
    if a.executor != b.executor:
        raise RequestError(f"--compare: one profile is of {a.executor}, the other of {b.executor}")
    shapes = [{matrix.name: (matrix.n, matrix.k) for matrix in profile.matrices} for profile in (a, b)]
    names = [name for name in {**shapes[0], **shapes[1]} if shapes[0].get(name) != shapes[1].get(name)]
    # A head of its own beside a tied one is the same model in another file.
    differs = next((name for name in names if name != "head"), None)
    if differs is not None:
        found = [f"{shape[differs][0]} x {shape[differs][1]}" if differs in shape else "absent" for shape in shapes]
        raise RequestError(
            f"--compare: {a.model} and {b.model} are different models: {differs} is {found[0]} here, {found[1]} there"
        )


def _differences(a: StepProfile, b: StepProfile) -> tuple[Difference, ...]:
    kinds = [step.links_by_kind() for step in (a, b)]
    more = b.profiled_us - a.profiled_us

    def difference(name: str, n: tuple[int, int], us: tuple[float, float]) -> Difference:
        return Difference(name, n, us, (us[1] - us[0]) / more if more else None)

    found = []
    for kind in {**kinds[0], **kinds[1]}:
        links = [of_one.get(kind, []) for of_one in kinds]
        n, us = (len(links[0]), len(links[1])), (total_us(links[0]), total_us(links[1]))
        found.append(difference(kind, n, us))
    return (*found, difference(GAPS, (0, 0), (a.gaps_us, b.gaps_us)))


def _predicted(a: Profile, b: Profile, step: StepProfile) -> Prediction | None:
    """Of a token in b's formats, by a's model."""
    formats = {matrix.name: matrix.format for matrix in b.matrices}
    own = {matrix.name: matrix.format for matrix in a.matrices}
    is_other = formats.keys() == own.keys() and (formats != own or a.kv != b.kv)
    if step.kind != "token" or a.executor != "kernels" or not is_other:
        return None
    return predict(a, fit(a), formats, step.depth, b.kv)
