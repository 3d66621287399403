"""A step in parts, by kind or by layer: bytes and times of each, what they are made of, and the same in words."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from bytefloor.tools.floor_model import FloorModel
from bytefloor.tools.profile_data import Link, Profile, StepProfile

OUTSIDE = "outside layers"
GAPS = "gaps"
WORTH_WORDS = 0.005
"""Of a step: what takes less of it is not talked about."""


@dataclass(frozen=True)
class Part:
    """Some launches of a step, or its gaps, and the machine's stream limit.

    needed_bytes: what the floor counts. streamed_bytes: what the layout in memory makes of them. wait_us, work_us: of
    the chain's links. step_us: of the whole step, with stamps. predicted_us: None where no model says it.
    """

    name: str
    n_launches: int
    needed_bytes: int
    streamed_bytes: int
    flops: int
    wait_us: float
    work_us: float
    step_us: float
    gb_s_limit: float
    predicted_us: float | None = None

    @property
    def us(self) -> float:
        return self.wait_us + self.work_us

    @property
    def share_of_step(self) -> float:
        return self.us / self.step_us

    @property
    def gb_s(self) -> float:
        """Needed bytes a second."""
        return self.needed_bytes / self.us / 1e3 if self.us else 0.0

    @property
    def share_of_limit(self) -> float:
        return self.gb_s / self.gb_s_limit

    @property
    def tflops(self) -> float:
        return self.flops / self.us / 1e6 if self.us else 0.0

    @property
    def floor_us(self) -> float:
        """Of the needed bytes alone."""
        return self.needed_bytes / self.gb_s_limit / 1e3

    @property
    def layout_us(self) -> float:
        """Of the bytes that the layout moves beyond those."""
        return (self.streamed_bytes - self.needed_bytes) / self.gb_s_limit / 1e3

    @property
    def beyond_us(self) -> float:
        """Work beyond all bytes; below 0 where they came while the inputs were waited for."""
        return self.work_us - self.floor_us - self.layout_us

    @property
    def residual_us(self) -> float | None:
        """What the model does not explain."""
        return None if self.predicted_us is None else self.us - self.predicted_us


def parts_by_kind(profile: Profile, step: StepProfile, model: FloorModel | None) -> list[Part]:
    """Those kinds that there are, in the order of a token, and the gaps. model: of tokens."""
    found = [part_of(profile, step, kind, links, model) for kind, links in step.links_by_kind().items()]
    return [*found, gaps_of(profile, step)]


def parts_by_layer(profile: Profile, step: StepProfile, model: FloorModel | None) -> list[Part]:
    """Each layer, and what is outside them."""
    layers = dict.fromkeys(link.span.layer for link in step.links)
    numbered = sorted(layer for layer in layers if layer is not None)
    found = [part_of(profile, step, str(n), _in_layer(step, n), model) for n in numbered]
    return [*found, part_of(profile, step, OUTSIDE, _in_layer(step, None), model)]


def _in_layer(step: StepProfile, layer: int | None) -> list[Link]:
    return [link for link in step.links if link.span.layer == layer]


def part_of(profile: Profile, step: StepProfile, name: str, links: Sequence[Link], model: FloorModel | None) -> Part:
    """Some links of a step as one part."""
    spans = [link.span for link in links]
    return Part(
        name=name,
        n_launches=sum(span.kind != "torch" for span in spans),
        needed_bytes=sum(span.needed_bytes for span in spans),
        streamed_bytes=sum(span.streamed_bytes for span in spans),
        flops=sum(span.flops for span in spans),
        wait_us=sum(link.wait_us for link in links),
        work_us=sum(link.work_us for link in links),
        step_us=step.profiled_us,
        gb_s_limit=profile.stream_gb_s,
        predicted_us=None if model is None else sum(model.span_us(span, step.depth) for span in spans),
    )


def gaps_of(profile: Profile, step: StepProfile) -> Part:
    """Before the first span and behind the last."""
    return Part(GAPS, 0, 0, 0, 0, step.gaps_us, 0.0, step.profiled_us, profile.stream_gb_s, step.gaps_us)


def whole(profile: Profile, step: StepProfile, model: FloorModel | None) -> Part:
    """All of it, gaps included."""
    parts = [part_of(profile, step, "all", step.links, model), gaps_of(profile, step)]

    def total(of: Callable[[Part], float]) -> float:
        return sum(of(part) for part in parts)

    return Part(
        name="all",
        n_launches=parts[0].n_launches,
        needed_bytes=parts[0].needed_bytes,
        streamed_bytes=parts[0].streamed_bytes,
        flops=parts[0].flops,
        wait_us=total(lambda part: part.wait_us),
        work_us=total(lambda part: part.work_us),
        step_us=step.profiled_us,
        gb_s_limit=profile.stream_gb_s,
        predicted_us=None if model is None else total(lambda part: part.predicted_us or 0.0),
    )


MADE_OF = {
    "bytes": "what is needed, in the file's encoding, at the stream limit",
    "layout": "bytes that the layout in memory adds",
    "wait": "until inputs are there: hand-over from kernel to kernel, the norm, coding of activations",
    "beyond": "work beyond all bytes; below 0 where bytes came while inputs were waited for",
}
"""What a time is made of: these four add up to it."""


def made_of(part: Part) -> tuple[float, ...]:
    """Microseconds of each of ``MADE_OF``."""
    return part.floor_us, part.layout_us, part.wait_us, part.beyond_us


def explain(part: Part) -> str:
    """A part's time as a sum, a launch at a time where there are several, and what the model leaves of it."""
    n = max(1, part.n_launches)
    terms = [f"{us / n:.2f} {name}" for name, us in zip(MADE_OF, made_of(part), strict=True) if abs(us) >= 0.005 * n]
    total = f"{n} launches of {part.us / n:.2f} us" if n > 1 else f"{part.us:.2f} us"
    told = f"{part.name}: {total} = {' + '.join(terms).replace('+ -', '- ')}"
    if part.residual_us is None:
        return told
    if abs(part.residual_us) < WORTH_WORDS * part.step_us:
        return f"{told}, as the model has it"
    return f"{told}; {part.residual_us:+.1f} us beside the model, {part.residual_us / part.step_us:+.1%} of the step"


def worth_words(parts: Iterable[Part]) -> list[Part]:
    """Those that take a part of the step that is worth talking about, the longest first; gaps have nothing to say."""
    found = [part for part in parts if part.share_of_step >= WORTH_WORDS and part.name != GAPS]
    return sorted(found, key=lambda part: -part.us)
