"""What ``frontier`` measures of each recipe, a row each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from bytefloor.tools.bench_rows import Measured, Row
from bytefloor.tools.divergence import Divergence, Estimate

MEASURED, SOURCE_ROW, REFUSED, FAILED = "measured", "source", "refused", "failed"
"""State of a row. refused: the recipe does not fit the model, and nothing was written. failed: it did, and then
something was wrong."""


@dataclass(frozen=True)
class Speed:
    """Best tokens in a row at a depth, as ``bench`` measures them: see ``bench_rows.Row``."""

    depth: int
    n_gen: int
    tok_s: float
    tok_s_spread: float | None
    share: float | None
    file_bytes: int
    moved_bytes: int
    stream_gb_s: float
    checksum: str | None


@dataclass(frozen=True, kw_only=True)
class FrontierRow(Measured):
    """A recipe of a model. What was not measured is None.

    source: the model's file or folder; source_formats: of its matrices, most bytes first. recipe, words: name and
    content, see ``quantize.recipes``. state: see MEASURED; reason: why it is not that. formats: bytes by format of what
    was written, most first. substitutes: formats that are not what the recipe says, each with its reason. n_weights,
    n_bytes, bits_per_weight: of all tensors of the language model, norms included; disk_bytes: of all files.
    token_bytes: the weights that a token reads, in the file's own encoding, without the cache. weight_error: what all
    matrices lost, see ``quantize.write.Loss``. kv: what the cache kept while the text was scored. perplexity,
    divergence: beside the source over the same tokens. executor: kernels, or reference, whose speed is nobody's: it
    multiplies with float32 whatever the format. quantise_s, score_s, speed_s: seconds of each part.
    """

    COLUMNS: ClassVar = (
        "recipe", "bits", "MB", "MB a token", "KL, nats", "same best token", "perplexity", "tok/s", "share", "notes",
    )  # fmt: skip
    verb: str
    model: str
    source: str
    source_formats: tuple[str, ...]
    recipe: str
    words: str
    state: str
    reason: str | None = None
    formats: dict[str, int] | None = None
    substitutes: tuple[str, ...] = ()
    n_weights: int | None = None
    n_bytes: int | None = None
    disk_bytes: int | None = None
    bits_per_weight: float | None = None
    token_bytes: int | None = None
    weight_error: float | None = None
    context: int
    n_windows: int | None = None
    n_predictions: int | None = None
    kv: str | None = None
    perplexity: Estimate | None = None
    divergence: Divergence | None = None
    speeds: tuple[Speed, ...] = ()
    quantise_s: float | None = None
    score_s: float | None = None
    speed_s: float | None = None
    executor: str | None = None
    notes: tuple[str, ...] = ()
    card: str
    clock_mhz: int | None
    commit: str | None
    date: str

    def cells(self) -> tuple[str, ...]:
        """As a table for people has it: of a recipe that was not measured the reason alone."""
        told = (*((f"{self.state}: {self.reason}",) if self.reason else ()), *self.substitutes)
        notes = "; ".join(told).replace("|", "/")
        if self.perplexity is None or self.bits_per_weight is None or self.token_bytes is None:
            return (self.recipe, *[""] * (len(self.COLUMNS) - 2), notes)
        far = self.divergence
        return (
            self.recipe,
            f"{self.bits_per_weight:.2f}",
            f"{(self.disk_bytes or 0) / 1e6:.1f}",
            f"{self.token_bytes / 1e6:.1f}",
            "" if far is None else small(far.kl),
            "" if far is None else percent(far.same_best),
            f"{self.perplexity.value:.4f}",
            " / ".join(f"{speed.tok_s:.0f}" for speed in self.speeds) + self._doubt(),
            " / ".join(f"{speed.share:.1%}" for speed in self.speeds if speed.share is not None),
            notes,
        )

    def _doubt(self) -> str:
        return " (reference)" if self.executor == "reference" else ""


def speed_of(row: Row) -> Speed:
    """What of a row of ``bench`` is kept."""
    return Speed(
        row.depth, row.n_gen, row.tok_s, row.tok_s_spread, row.share, row.file_bytes, row.moved_bytes, row.stream_gb_s,
        row.checksum,
    )  # fmt: skip


def small(estimate: Estimate) -> str:
    """Of a KL divergence."""
    error = "" if estimate.error is None else f" ± {estimate.error:.0e}"
    return f"{estimate.value:.2e}{error}"


def percent(estimate: Estimate) -> str:
    """Of a share."""
    error = "" if estimate.error is None else f" ± {estimate.error:.2%}"
    return f"{estimate.value:.2%}{error}"
