"""What ``frontier`` measures of each recipe, a row each."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from bytefloor.quantize.target import PLAIN
from bytefloor.tools.bench_rows import Measured, Row
from bytefloor.tools.divergence import Divergence, Estimate

MEASURED, SOURCE_ROW, REFUSED, FAILED = "measured", "source", "refused", "failed"
"""State of a row. refused: the recipe does not fit the model, and nothing was written. failed: something was wrong
later; what was measured before that is there."""


@dataclass(frozen=True)
class Speed:
    """Best tokens in a row at a depth, as ``bench`` measures them: see ``bench_rows.Row``."""

    depth: int
    n_gen: int
    tok_s: float
    tok_s_spread: float | None
    share: float
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
        return cells_of(asdict(self))


def cells_of(row: dict[str, Any]) -> tuple[str, ...]:
    """The same of a row as it stands in a file."""
    reason = (f"{row['state']}: {row['reason']}",) if row["reason"] else ()
    notes = "; ".join((*reason, *row["substitutes"], *row["notes"])).replace("|", "/")
    if row["perplexity"] is None:
        return (row["recipe"], *[""] * (len(FrontierRow.COLUMNS) - 2), notes)
    far, doubt = row["divergence"], " (reference)" if row["executor"] == "reference" else ""
    return (
        row["recipe"],
        f"{row['bits_per_weight']:.2f}",
        f"{row['disk_bytes'] / 1e6:.1f}",
        f"{row['token_bytes'] / 1e6:.1f}",
        "" if far is None else small(far["kl"]),
        "" if far is None else percent(far["same_best"]),
        f"{row['perplexity']['value']:.4f}",
        " / ".join(f"{speed['tok_s']:,.0f}" for speed in row["speeds"]) + doubt,
        " / ".join(f"{speed['share']:.1%}" for speed in row["speeds"]),
        notes,
    )


def speed_of(row: Row) -> Speed:
    """What of a row of ``bench`` is kept."""
    assert row.share is not None, "decoding has a share of the floor"
    return Speed(
        row.depth, row.n_gen, row.tok_s, row.tok_s_spread, row.share, row.file_bytes, row.moved_bytes, row.stream_gb_s,
        row.checksum,
    )  # fmt: skip


def small(estimate: dict[str, Any]) -> str:
    """Of a KL divergence, with its standard error."""
    error = "" if estimate["error"] is None else f" ± {estimate['error']:.0e}"
    return f"{estimate['value']:.2e}{error}"


def percent(estimate: dict[str, Any]) -> str:
    """Of a share, with its standard error."""
    error = "" if estimate["error"] is None else f" ± {estimate['error']:.2%}"
    return f"{estimate['value']:.2%}{error}"


def told_source(row: dict[str, Any]) -> str:
    """The source's name and formats, and that it is no original where it is none."""
    formats = row["source_formats"]
    quantised = "" if set(formats) <= set(PLAIN) else ", itself quantised"
    return f"{row['source']} ({', '.join(formats)}{quantised})"
